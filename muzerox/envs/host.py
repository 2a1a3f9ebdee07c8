"""Environments stepped as a batch on the host, with NumPy in and out."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.envs.process import SimulatorError, in_process
from muzerox.envs.simulators import Frames, Simulators
from muzerox.envs.wrappers import auto_reset
from muzerox.types import Environment, EnvSpec, HostBatch, HostEnvironment, TimeStep

__all__ = ["SimulatorError", "host_environment", "in_process", "on_host"]


def host_environment(spec: EnvSpec, simulators: Callable[[int, int], Simulators]) -> HostEnvironment:
    """A single player's simulators, in which every action is always legal, as a HostEnvironment.

    Args:
      simulators: ``simulators(num_envs, seed)`` starts them.
    """

    def make(num_envs: int, seed: int) -> HostBatch:
        _, reset, step, close = simulators(num_envs, seed)
        legal, player = np.ones((num_envs, spec.num_actions), np.bool_), np.zeros(num_envs, np.int32)

        def show(frames: Frames) -> TimeStep:
            return TimeStep(**frames._asdict(), legal=legal.copy(), player=player.copy())

        return HostBatch(lambda: show(reset()), lambda action: show(step(action)), close)

    return HostEnvironment(spec, make)


def _cpu() -> Any:
    """Simulators leave the accelerator to the networks, where JAX has a CPU backend beside it."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return jax.default_device(None)


def on_host(env: Environment) -> HostEnvironment:
    """A JAX environment, E instances of it stepped by one compiled program on the CPU.

    Batches of one ``on_host`` share their programs. They are compiled when a batch is made, so no step waits for that.
    ``can_truncate`` is True, since whoever steps a batch may have to cut its episodes.
    """
    looped, compiling = auto_reset(env), threading.Lock()

    def all_reset(key: jax.Array, num_envs: int) -> tuple[Any, TimeStep]:
        return jax.vmap(env.reset)(jax.random.split(key, num_envs))

    def all_step(key: jax.Array, t: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        return jax.vmap(looped.step)(jax.random.split(jax.random.fold_in(key, t), action.shape[0]), state, action)

    @functools.cache
    def compiled(num_envs: int) -> tuple[Any, Any]:
        key = jax.random.key(0)
        reset = jax.jit(lambda key: all_reset(key, num_envs)).lower(key).compile()
        state = jax.eval_shape(lambda key: all_reset(key, num_envs)[0], key)
        counter, action = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((num_envs,), jnp.int32)
        step = jax.jit(all_step, donate_argnames="state").lower(key, counter, state, action).compile()
        return reset, step

    def make(num_envs: int, seed: int) -> HostBatch:
        with _cpu(), compiling:  # threads that make batches of one size at a time share its programs
            reset_all, step_all = compiled(num_envs)
            keys = jax.random.split(jax.random.key(seed))
        at: dict[str, Any] = {"state": None, "t": 0, "resets": 0}

        def show(state: Any, timestep: TimeStep) -> TimeStep:
            at["state"] = state
            return jax.tree.map(np.array, timestep)

        def reset() -> TimeStep:
            with _cpu():
                key = jax.random.fold_in(keys[0], at["resets"])
                at["resets"] += 1
                return show(*reset_all(key))

        def step(action: Any) -> TimeStep:
            with _cpu():
                at["t"] += 1
                return show(*step_all(keys[1], np.int32(at["t"] - 1), at["state"], np.asarray(action, np.int32)))

        return HostBatch(reset, step, lambda: at.update(state=None))

    return HostEnvironment(dataclasses.replace(env.spec, can_truncate=True), make)
