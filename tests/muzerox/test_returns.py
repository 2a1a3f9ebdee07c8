"""n-step targets and masks against a walk through each episode that knows who moves and whose reward it is."""

from __future__ import annotations

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Walk, first_end, n_step_target

from muzerox.returns import n_step, unroll_masks

B = 4
SIZES = [(1, 1), (1, 4), (2, 3), (3, 2), (5, 3), (4, 6)]  # (n, K)
DISCOUNTS = [1.0, 0.9, 0.5, 0.0]

jit_n_step = functools.partial(jax.jit, static_argnames=("discount", "n"))(n_step)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, int, float, int, list[Walk]]:
    """n, K, discount, players and B windows of K + n + 1 rows, with ends where hypothesis wants them."""
    n, unroll = draw(st.sampled_from(SIZES))
    discount = draw(st.sampled_from(DISCOUNTS))
    players = draw(st.sampled_from([1, 2]))
    rows = unroll + n + 1
    terminated, truncated, random = (draw(hnp.arrays(np.bool_, (B, rows))) for _ in range(3))
    random &= draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    walks = []
    for b in range(B):
        player = np.zeros(rows, int)
        player[0] = rng.integers(players)
        following = np.zeros(rows, int)
        for row in range(rows):
            following[row] = (player[row] + 1) % players
            if row + 1 < rows:
                ended = terminated[b, row] or truncated[b, row]
                player[row + 1] = rng.integers(players) if ended else following[row]  # anyone may open the next game
        reward, value, final = rng.normal(size=(3, rows)).astype(np.float32)
        walks.append(Walk(reward, terminated[b], truncated[b], player, following, value, final, random[b]))
    return n, unroll, discount, players, walks


def _stack(walks: list[Walk], name: str) -> np.ndarray:
    return np.stack([getattr(walk, name) for walk in walks])


@settings(max_examples=200)
@given(windows())
def test_n_step_is_the_walk_through_the_episode(window: tuple) -> None:
    n, unroll, discount, players, walks = window
    signed = -discount if players == 2 else discount
    columns = [_stack(walks, name)[:, : unroll + n] for name in ("reward", "terminated", "truncated", "random")]
    random = columns.pop() if columns[-1].any() else None  # None is what is stored when no action is drawn at random
    partial, weight, row, use_final = map(np.asarray, jit_n_step(*columns[:3], discount=signed, n=n, random=random))
    assert partial.shape == weight.shape == row.shape == use_final.shape == (B, unroll + 1)
    assert partial.dtype == weight.dtype == np.float32
    for b, walk in enumerate(walks):
        for k in range(unroll + 1):
            value = walk.final_value[row[b, k]] if use_final[b, k] else walk.value[row[b, k]]
            target = partial[b, k] + weight[b, k] * value
            np.testing.assert_allclose(target, n_step_target(walk, k, n, discount), rtol=1e-5, atol=1e-5)


@settings(max_examples=200)
@given(windows())
def test_masks_follow_the_first_end(window: tuple) -> None:
    _, unroll, _, _, walks = window
    absorbing, unknown = map(
        np.asarray, unroll_masks(_stack(walks, "terminated")[:, :unroll], _stack(walks, "truncated")[:, :unroll])
    )
    for b, walk in enumerate(walks):
        for k in range(unroll + 1):
            end = first_end(walk, 0, k)
            assert absorbing[b, k] == (end == "terminated")
            assert unknown[b, k] == (end == "truncated")


def _one(terminated: bool, truncated: bool) -> tuple[np.ndarray, ...]:
    """Rewards 1, 2, 4, 8 with the given flags on the second row; two rewards are summed."""
    reward = jnp.array([[1.0, 2.0, 4.0, 8.0]])
    at_one = jnp.arange(4)[None] == 1
    return tuple(np.asarray(x)[0] for x in n_step(reward, at_one & terminated, at_one & truncated, discount=0.5, n=2))


def test_truncation_bootstraps_from_the_final_observation() -> None:
    partial, weight, row, use_final = _one(terminated=False, truncated=True)
    np.testing.assert_array_equal(partial, [2.0, 2.0, 8.0])
    np.testing.assert_array_equal(weight, [0.25, 0.5, 0.25])
    np.testing.assert_array_equal(row, [1, 1, 4])
    np.testing.assert_array_equal(use_final, [True, True, False])


def test_termination_does_not_bootstrap() -> None:
    partial, weight, _, use_final = _one(terminated=True, truncated=False)
    np.testing.assert_array_equal(partial, [2.0, 2.0, 8.0])
    np.testing.assert_array_equal(weight, [0.0, 0.0, 0.25])
    assert not use_final.any()


def test_termination_wins_over_truncation() -> None:
    for both, terminated in zip(_one(terminated=True, truncated=True), _one(terminated=True, truncated=False), strict=True):
        np.testing.assert_array_equal(both, terminated)
    flags = jnp.array([[False, True, False]])
    absorbing, unknown = unroll_masks(flags, flags)
    np.testing.assert_array_equal(absorbing, [[False, False, True, True]])
    assert not np.asarray(unknown).any()


def test_the_sum_stops_short_of_a_random_action() -> None:
    reward, never = jnp.array([[1.0, 2.0, 4.0, 8.0]]), jnp.zeros((1, 4), bool)
    partial, weight, row, use_final = (
        np.asarray(x)[0] for x in n_step(reward, never, never, discount=0.5, n=2, random=jnp.arange(4)[None] == 1)
    )
    np.testing.assert_array_equal(partial, [1.0, 0.0, 8.0])
    np.testing.assert_array_equal(weight, [0.5, 1.0, 0.25])
    np.testing.assert_array_equal(row, [1, 1, 4])
    assert not use_final.any()


def test_discount_zero_keeps_the_first_reward_only() -> None:
    never = jnp.zeros((1, 3), bool)
    partial, weight, _, _ = n_step(jnp.array([[3.0, 5.0, 7.0]]), never, never, discount=0.0, n=2)
    np.testing.assert_array_equal(partial, [[3.0, 5.0]])
    np.testing.assert_array_equal(weight, [[0.0, 0.0]])
