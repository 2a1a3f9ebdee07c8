"""MuZero in JAX that solves real environments, fast.

config = muzerox.Config.preset("gymnax:CartPole-v1").replace("search.num_simulations", 32)
result = muzerox.train(config, out="runs/a")
agent = muzerox.Agent.load("runs/a")
action = agent.act(observation)
"""

from muzerox.agent import Agent, evaluate_run
from muzerox.config import Config
from muzerox.errors import UserError
from muzerox.training import TrainResult, resume, train

__all__ = ["Agent", "Config", "TrainResult", "UserError", "evaluate_run", "resume", "train"]
