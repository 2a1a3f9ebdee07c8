"""n-step value targets and unroll masks on windows of replay rows.

A window is L = K + n consecutive rows of one environment; it may cross ends of episodes. Position k of the unroll is
the state before row k. ``discount`` is signed: negative with two players, so that the value of the opponent's turn
counts against the player to move (MuZero, arXiv:1911.08265, appendix B).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Bootstrap(NamedTuple):
    """n-step targets short of the bootstrap value: target = partial_return + weight * value(observation)."""

    partial_return: jax.Array  # [B, K+1] float32
    weight: jax.Array  # [B, K+1] float32, signed discount of the bootstrap; 0 when the episode terminated
    row: jax.Array  # [B, K+1] int32, row of the window that holds the observation to bootstrap from
    use_final: jax.Array  # [B, K+1] bool, take that row's final observation (the episode was truncated there)


def n_step(
    reward: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    n: int,
    random: jax.Array | None = None,
) -> Bootstrap:
    """n-step returns of the first K+1 = L - n + 1 positions of a window.

    Args:
      reward: [B, L] float32, to the player who acted in the row.
      terminated, truncated: [B, L] bool. Where both hold, terminated wins.
      discount: signed discount of a step.
      n: rewards summed before the bootstrap; the sum stops at the end of the episode.
      random: [B, L] bool, rows whose action was drawn at random instead of by the policy. What follows from such an
        action says nothing about the policy, so the sum stops short of it (Watkins, 1989).

    Returns:
      Bootstrap. After termination nothing is added; after truncation the value of the final observation is; before a
      random action that of the row's own observation.
    """
    positions = reward.shape[1] - n + 1
    rows = jnp.arange(positions)[:, None] + jnp.arange(n)[None, :]  # [K+1, n]
    ends = (terminated | truncated)[:, rows]  # [B, K+1, n]
    stops = ends if random is None else ends | random[:, rows]
    any_stop = jnp.any(stops, axis=-1)
    at = jnp.where(any_stop, jnp.argmax(stops, axis=-1), n - 1)  # the row that stops the sum, or the last
    at_row = jnp.arange(positions)[None, :] + at
    short = jnp.zeros_like(any_stop) if random is None else any_stop & jnp.take_along_axis(random, at_row, axis=1)
    summed = at + ~short  # rewards in the sum
    powers = jnp.float32(discount) ** jnp.arange(n + 1, dtype=jnp.int32)
    included = (jnp.arange(n)[None, None, :] < summed[..., None]).astype(jnp.float32)
    partial_return = jnp.sum(reward[:, rows] * included * powers[None, None, :n], axis=-1)
    ended = any_stop & ~short
    terminates = ended & jnp.take_along_axis(terminated, at_row, axis=1)
    weight = jnp.where(terminates, 0.0, powers[summed])
    # Where the episode goes on, the bootstrap is the state after the last reward: the next row's observation.
    row = jnp.where(ended, at_row, jnp.arange(positions)[None, :] + summed)
    return Bootstrap(partial_return, weight, row, ended & ~terminates)


def unroll_masks(terminated: jax.Array, truncated: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the unrolled model has left the episode it started in.

    Args:
      terminated, truncated: [B, K] bool, rows 0 to K-1 of a window.

    Returns:
      absorbing, unknown: [B, K+1] bool. After a terminated row the model stays in an absorbing state, worth 0 for
      ever; after a truncated row nothing is known. What happens first decides.
    """
    ended = jnp.cumsum(terminated | truncated, axis=1) > 0
    first_terminated = (jnp.cumsum(terminated | truncated, axis=1) == 1) & terminated
    absorbing = ended & (jnp.cumsum(first_terminated, axis=1) > 0)
    start = jnp.zeros_like(ended[:, :1])
    absorbing = jnp.concatenate([start, absorbing], axis=1)
    unknown = jnp.concatenate([start, ended], axis=1) & ~absorbing
    return absorbing, unknown
