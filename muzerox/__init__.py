"""MuZero in JAX that solves real environments, fast.

config = muzerox.Config.preset("gymnax:CartPole-v1").replace("search.num_simulations", 32)
result = muzerox.train(config, out="runs/a")
agent = muzerox.Agent.load("runs/a")
action = agent.act(observation)
"""

from typing import TYPE_CHECKING

from muzerox.lazy import lazy_names

if TYPE_CHECKING:
    from muzerox.agent import Agent, evaluate_run
    from muzerox.config import Config
    from muzerox.errors import UserError
    from muzerox.training import TrainResult, resume, train

__all__ = ["Agent", "Config", "TrainResult", "UserError", "evaluate_run", "resume", "train"]

_MODULES = {
    "Agent": ".agent",
    "Config": ".config",
    "TrainResult": ".training",
    "UserError": ".errors",
    "evaluate_run": ".agent",
    "resume": ".training",
    "train": ".training",
}


__getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
