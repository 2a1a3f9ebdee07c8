"""Scripted play of environments on the host, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from muzerox.envs import make_env
from muzerox.types import HostEnvironment, TimeStep


def make(env_id: str) -> HostEnvironment:
    env = make_env(env_id)
    assert isinstance(env, HostEnvironment)
    return env


def play(env_id: str, actions: Any, num_envs: int = 1, seed: int = 0, *, evaluation: bool = False) -> list[TimeStep]:
    """Time steps of ``actions`` [T, E] or [T], the one after reset first."""
    env = make(env_id)
    batch = (env.make_evaluation if evaluation and env.make_evaluation else env.make)(num_envs, seed)
    shown = [batch.reset()] + [batch.step(np.broadcast_to(action, num_envs)) for action in actions]
    batch.close()
    return shown


def draw(num_actions: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, num_actions, shape).astype(np.int32)


def ends(shown: list[TimeStep]) -> list[tuple[bool, bool]]:
    """Of one environment: terminated and truncated by step."""
    return [(bool(t.terminated[0]), bool(t.truncated[0])) for t in shown[1:]]
