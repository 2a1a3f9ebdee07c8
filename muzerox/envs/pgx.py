"""Games of pgx (Koyamada et al., arXiv:2303.17503): boards with legal-action masks and two players, 2048, MinAtar.

Observations are those of the player to move, rewards those of the player who acted. Turns alternate strictly in every
two-player game served here, so one sign a step turns a value to the other side's perspective.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # pgx warns about its own deprecations on import
    import pgx

from muzerox.envs.wrappers import array_state
from muzerox.types import Environment, EnvSpec, TimeStep

UNAVAILABLE = {
    "backgammon": "a player moves several times in a row, and the model's turns alternate strictly",
    "leduc_holdem": "a player moves several times in a row, and the model's turns alternate strictly",
    "sparrow_mahjong": "it has three players",
    "bridge_bidding": "it has four players",
}


def names() -> list[str]:
    """Names this suite serves."""
    return [name for name in pgx.available_envs() if name not in UNAVAILABLE]


def make(name: str) -> Environment:
    """The pgx game ``name``."""
    env = pgx.make(name)
    first = jax.eval_shape(lambda: env.init(jax.random.key(0)))
    shape, dtype = first.observation.shape, first.observation.dtype
    num_actions = int(first.legal_action_mask.shape[0])
    stored = "bool" if dtype == jnp.bool_ else "float32"
    masked = not name.startswith("minatar-")
    spec = EnvSpec(
        id=f"pgx:{name}",
        observation_shape=shape,
        observation_dtype=stored,
        num_actions=num_actions,
        num_players=env.num_players,
        has_legal=masked,
    )

    def reset(key: jax.Array) -> tuple[Any, TimeStep]:
        state = env.init(key)
        return state, _timestep(state, jnp.float32(0.0))

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        actor = state.current_player
        state = env.step(state, action, key)
        return state, _timestep(state, state.rewards.astype(jnp.float32)[actor])

    def _timestep(state: Any, reward: jax.Array) -> TimeStep:
        observation = state.observation.astype(stored)
        return TimeStep(
            observation=observation,
            reward=reward,
            terminated=state.terminated,
            truncated=state.truncated & ~state.terminated,
            final_observation=observation,
            legal=state.legal_action_mask,
            player=state.current_player.astype(jnp.int32),
        )

    return array_state(Environment(spec, reset, step))
