"""MuZero in JAX that solves real environments, fast.

config = muzerox.Config.preset("gymnax:CartPole-v1").replace("search.num_simulations", 32)
result = muzerox.train(config, out="runs/a")
agent = muzerox.Agent.load("runs/a")
action = agent.act(observation)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muzerox.agent import Agent, evaluate_run
    from muzerox.config import Config
    from muzerox.errors import UserError
    from muzerox.training import TrainResult, resume, train

__all__ = ["Agent", "Config", "TrainResult", "UserError", "evaluate_run", "resume", "train"]

_MODULES = {
    "Agent": "agent",
    "Config": "config",
    "TrainResult": "training",
    "UserError": "errors",
    "evaluate_run": "agent",
    "resume": "training",
    "train": "training",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is asked for: the process of a simulator needs neither JAX nor the rest."""
    if name not in _MODULES:
        raise AttributeError(f"module 'muzerox' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"muzerox.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
