"""Who an agent meets when a two-player game is evaluated.

An opponent is ``(key, observation [B, ...], legal [B, A]) -> action [B] int32``. To add one, add a row to ``OPPONENTS``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.errors import UserError, nearest_name
from muzerox.types import EnvSpec

Opponent = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def random_opponent(key: jax.Array, observation: jax.Array, legal: jax.Array) -> jax.Array:
    """Uniform over legal actions."""
    del observation
    return jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf)).astype(jnp.int32)


_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_POWERS = 3 ** np.arange(9)


def perfect_tic_tac_toe() -> np.ndarray:
    """[3**9, 9] bool, the moves of perfect play by board: none where a game has ended, or cannot get to.

    A board is a number in base 3: cell i has digit i, 0 empty, 1 the mover's stone, 2 the other's.
    """
    optimal = np.zeros((3**9, 9), bool)

    @cache
    def value(board: tuple[int, ...]) -> int:
        """1, 0 or -1 for the player to move; fills ``optimal`` on the way."""
        if any(all(board[i] == 2 for i in line) for line in _LINES):
            return -1
        moves = [i for i in range(9) if board[i] == 0]
        if not moves:
            return 0
        outcomes = {i: -value(tuple((0, 2, 1)[s] for s in (*board[:i], 1, *board[i + 1 :]))) for i in moves}
        best = max(outcomes.values())
        optimal[np.dot(_POWERS, board)] = [outcomes.get(i) == best for i in range(9)]
        return best

    value((0,) * 9)
    return optimal


def _perfect_tic_tac_toe() -> Opponent:
    table = jnp.asarray(perfect_tic_tac_toe())

    def opponent(key: jax.Array, observation: jax.Array, legal: jax.Array) -> jax.Array:
        stones = observation.reshape((-1, 9, 2)).astype(jnp.int32)
        board = (stones[..., 0] + 2 * stones[..., 1]) @ jnp.asarray(_POWERS, jnp.int32)
        return random_opponent(key, observation, table[board] & legal)

    return opponent


OPPONENTS: dict[str, Callable[[EnvSpec], Opponent | None]] = {
    "random": lambda _: random_opponent,
    "perfect": lambda spec: _perfect_tic_tac_toe() if spec.id == "pgx:tic_tac_toe" else None,
}


def make_opponent(name: str, spec: EnvSpec) -> Opponent:
    """The opponent ``name`` for an environment: ``random``, or ``perfect``, which picks at random among optimal moves.

    Raises:
      UserError: unknown name, or no such opponent for this environment.
    """
    if name not in OPPONENTS:
        rule = f"must be one of {', '.join(OPPONENTS)}, or the directory of a run"
        raise UserError("--opponent", name, rule, nearest_name(name, OPPONENTS))
    opponent = OPPONENTS[name](spec)
    if opponent is None:
        raise UserError("--opponent", name, f"is not known for {spec.id}", "random")
    return opponent
