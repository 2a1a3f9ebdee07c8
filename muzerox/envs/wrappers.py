"""Wrappers: functions from Environment to Environment."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from muzerox.types import Environment, TimeStep


def auto_reset(env: Environment) -> Environment:
    """Starts the next episode within the step that ended the last.

    ``observation``, ``legal`` and ``player`` are then the new episode's; ``reward``, ``terminated``, ``truncated`` and
    ``final_observation`` stay those of the step.
    """

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        key_step, key_reset = jax.random.split(key)
        state, timestep = env.step(key_step, state, action)
        fresh_state, fresh = env.reset(key_reset)
        ended = timestep.ended

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(ended.reshape((1,) * new.ndim) if new.ndim else ended, new, old)

        state = jax.tree.map(choose, fresh_state, state)
        shown = jax.tree.map(
            choose, (fresh.observation, fresh.legal, fresh.player), (timestep.observation, timestep.legal, timestep.player)
        )
        return state, timestep.replace(observation=shown[0], legal=shown[1], player=shown[2])

    return env._replace(step=step)


def array_state(env: Environment) -> Environment:
    """Gives every leaf of the state the dtype it has after a step.

    Some games start from Python numbers and go on as arrays, which changes the type of a loop's carry.
    """
    after = jax.eval_shape(lambda key: env.step(key, env.reset(key)[0], jnp.int32(0))[0], jax.random.key(0))

    def fix(state: Any) -> Any:
        return jax.tree.map(
            lambda x, like: x if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else jnp.asarray(x).astype(like.dtype),
            state,
            after,
        )

    def reset(key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = env.reset(key)
        return fix(state), timestep

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = env.step(key, state, action)
        return fix(state), timestep

    return env._replace(reset=reset, step=step)
