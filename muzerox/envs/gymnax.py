"""Environments of gymnax (Lange, 2022): classic control, MinAtar, bsuite and others, in JAX.

gymnax keeps termination and its time limit apart, which this adapter passes on: a step that does both counts as
terminated.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from muzerox.envs.wrappers import array_state
from muzerox.types import Environment, EnvSpec, TimeStep


class _Deferred(types.ModuleType):
    """Stands for a module until one of its attributes is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def _loaded_when_used(*names: str) -> Iterator[None]:
    """Imports inside the block get stand-ins for ``names``; the real modules load at their first use."""
    deferred = {name: _Deferred(name) for name in names if name not in sys.modules}
    sys.modules.update(deferred)
    try:
        yield
    finally:
        for name in deferred:
            del sys.modules[name]


with _loaded_when_used("seaborn", "matplotlib.pyplot"):  # gymnax draws with them and we do not: 1 s of a cold start
    import gymnax

_CONTINUOUS = "its actions are continuous"
UNAVAILABLE = {
    "Pendulum-v1": _CONTINUOUS,
    "MountainCarContinuous-v0": _CONTINUOUS,
    "PointRobot-misc": _CONTINUOUS,
    "Reacher-misc": _CONTINUOUS,
    "Swimmer-misc": _CONTINUOUS,
    "MNISTBandit-bsuite": "gymnax downloads its data set from a host when it is made",
}


def names() -> list[str]:
    """Names this suite serves."""
    return [name for name in gymnax.registered_envs if name not in UNAVAILABLE]


def make(name: str) -> Environment:
    """The gymnax environment ``name`` with its default parameters."""
    env, params = gymnax.make(name)
    space = env.observation_space(params)
    one_hot = int(space.n) if not hasattr(space, "low") else None  # a discrete observation is a category

    # One-hot grids (MinAtar) are declared float32 with bounds 0 and 1 but hold only zeros and ones: a byte a cell in
    # the replay ring instead of four.
    binary = name.endswith("-MinAtar")

    def encode(observation: jax.Array) -> jax.Array:
        if one_hot is not None:
            return jax.nn.one_hot(observation, one_hot, dtype=jnp.bool_)
        return observation.astype(jnp.bool_) if binary else observation.astype(jnp.float32)

    observation = jax.eval_shape(lambda: encode(env.reset(jax.random.key(0), params)[0]))
    num_actions = int(env.action_space(params).n)
    spec = EnvSpec(
        id=f"gymnax:{name}",
        observation_shape=observation.shape,
        observation_dtype=str(observation.dtype),
        num_actions=num_actions,
        can_truncate=True,
    )

    def reset(key: jax.Array) -> tuple[Any, TimeStep]:
        observation, state = env.reset_env(key, params)
        return state, _timestep(encode(observation), 0.0, False, False)

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        observation, state, reward, terminated, _ = env.step_env(key, state, action, params)
        truncated = env.is_truncated(state, params)
        return state, _timestep(encode(observation), reward, terminated, truncated)

    def _timestep(observation: jax.Array, reward: Any, terminated: Any, truncated: Any) -> TimeStep:
        terminated = jnp.asarray(terminated, jnp.bool_)
        return TimeStep(
            observation=observation,
            reward=jnp.asarray(reward, jnp.float32),
            terminated=terminated,
            truncated=jnp.asarray(truncated, jnp.bool_) & ~terminated,
            final_observation=observation,
            legal=jnp.ones(num_actions, jnp.bool_),
            player=jnp.int32(0),
        )

    return array_state(Environment(spec, reset, step))
