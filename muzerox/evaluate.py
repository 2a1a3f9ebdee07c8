"""Evaluation: whole episodes with search and without exploration.

With two players the agent meets an opponent, moving first in every other game, and a return is the outcome for the
agent: 1 won, 0 drawn, -1 lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.opponents import Opponent, random_opponent
from muzerox.types import Algorithm, Environment, Params, TimeStep

MAX_EPISODE_STEPS = 27_000  # half an hour of Atari at 15 decisions a second; games without an end stop here


class Episodes(NamedTuple):
    """Outcome of each episode."""

    returns: jax.Array  # [episodes] float32, undiscounted
    lengths: jax.Array  # [episodes] int32
    finished: jax.Array  # [episodes] bool, False where the step limit cut it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Summary of an evaluation. ``wins``, ``draws`` and ``losses`` are present with two players."""

    mean_return: float
    std_return: float
    episodes: int
    mean_length: float
    unfinished: int
    wins: int | None = None
    draws: int | None = None
    losses: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, absent ones left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


def make_episodes(
    env: Environment,
    algorithm: Algorithm,
    episodes: int,
    *,
    opponent: Opponent = random_opponent,
    random_moves: int = 0,
    max_steps: int = MAX_EPISODE_STEPS,
) -> Callable[[jax.Array, Params], Episodes]:
    """``play(key, params) -> Episodes``: a pure function to be jitted; all episodes in parallel.

    Args:
      opponent: with two players, who the agent meets; it moves first in the odd games.
      random_moves: with two players, so many moves open a game at random, for games between players without chance to differ.
      max_steps: episodes are cut after this many steps, counting both players'.
    """
    spec = env.spec
    env_step = jax.vmap(env.step)
    seat = jnp.arange(episodes) % 2

    def play(key: jax.Array, params: Params) -> Episodes:
        key_reset, key_play = jax.random.split(key)
        state, timestep = jax.vmap(env.reset)(jax.random.split(key_reset, episodes))

        def unfinished(carry: tuple) -> jax.Array:
            return jnp.any(~carry[3].finished) & (carry[0] < max_steps)

        def step(carry: tuple) -> tuple:
            t, state, timestep, so_far = carry
            key_search, key_env, key_opponent = jax.random.split(jax.random.fold_in(key_play, t), 3)
            legal = timestep.legal if spec.has_legal else None
            action = algorithm.act(key_search, params, timestep.observation, legal, False).action
            sign = jnp.ones(episodes)
            if spec.num_players == 2:
                mine = t % 2 == seat
                action = jnp.where(mine, action, opponent(key_opponent, timestep.observation, timestep.legal))
                if random_moves:
                    opening = random_opponent(jax.random.fold_in(key_opponent, 1), timestep.observation, timestep.legal)
                    action = jnp.where(t < random_moves, opening, action)
                sign = jnp.where(mine, 1.0, -1.0)
            state, timestep = env_step(jax.random.split(key_env, episodes), state, action)
            going = ~so_far.finished
            so_far = Episodes(
                returns=so_far.returns + jnp.where(going, sign * timestep.reward, 0.0),
                lengths=so_far.lengths + going,
                finished=so_far.finished | timestep.ended,
            )
            return t + 1, state, timestep, so_far

        start = Episodes(jnp.zeros(episodes), jnp.zeros(episodes, jnp.int32), jnp.zeros(episodes, jnp.bool_))
        carry: tuple[jax.Array, Any, TimeStep, Episodes] = (jnp.int32(0), state, timestep, start)
        return jax.lax.while_loop(unfinished, step, carry)[3]

    return play


def summarise(env: Environment, episodes: Episodes) -> Evaluation:
    """Episodes to their summary, on the host."""
    returns, lengths, finished = (np.asarray(x) for x in episodes)
    two = env.spec.num_players == 2
    return Evaluation(
        mean_return=float(returns.mean()),
        std_return=float(returns.std()),
        episodes=len(returns),
        mean_length=float(lengths.mean()),
        unfinished=int((~finished).sum()),
        wins=int((returns > 0).sum()) if two else None,
        draws=int((returns == 0).sum()) if two else None,
        losses=int((returns < 0).sum()) if two else None,
    )
