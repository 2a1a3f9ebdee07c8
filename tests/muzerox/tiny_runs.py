"""Trainings so small that they take seconds, for tests of what survives them."""

from __future__ import annotations

from muzerox import Config
from muzerox.algorithms import make_algorithm
from muzerox.envs import make_env
from muzerox.runtimes import make_runtime, resolve_kind
from muzerox.types import Runtime

TINY = {
    "network.width": 8,
    "search.num_simulations": 2,
    "replay.min_size": 128,
    "runtime.num_envs": 8,
    "runtime.loop_count": 2,
    "train.batch_size": 16,
    "train.unroll_steps": 2,
    "train.td_steps": 3,
    "train.target_return": None,
    "train.eval_episodes": 2,
    "train.max_env_steps": 512,
}


def make_tiny_runtime(config: Config) -> Runtime:
    """The runtime of a configuration, as a training makes it."""
    env = make_env(config.env)
    config = resolve_kind(config, env)
    return make_runtime(config, env, make_algorithm(config, env.spec))
