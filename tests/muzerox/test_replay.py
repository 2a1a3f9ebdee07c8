"""The ring against a Python list, and draws against their probabilities."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muzerox import replay
from muzerox.config import ReplayConfig
from muzerox.replay import ReplayState, Sample
from muzerox.types import Transition

C, E, B, LENGTH = 7, 3, 4, 3
ALPHA, BETA = 0.6, 0.4
PRIORITIZED = ReplayConfig(capacity=C * E + 2, min_size=1, priority_exponent=ALPHA, importance_exponent=BETA)  # not a multiple
UNIFORM = ReplayConfig(capacity=C * E, min_size=1, kind="uniform")

jit_add = jax.jit(replay.add)
jit_sample = jax.jit(replay.sample, static_argnums=(0, 3, 4))
jit_read = jax.jit(replay.read)
jit_update = jax.jit(replay.update_priority, static_argnums=0)


@functools.cache
def make_row(time: int, num_envs: int = E) -> Transition:
    """A row that says when and where it was written."""
    label = time * 100 + np.arange(num_envs)
    return Transition(
        observation=jnp.asarray(label[:, None] + np.array([0.0, 0.5]), jnp.float32),
        action=jnp.asarray(label, jnp.int32),
        reward=jnp.asarray(-label, jnp.float32),
        terminated=jnp.asarray(label % 2 == 0),
        truncated=jnp.asarray(label % 3 == 0),
        policy=jnp.asarray(label[:, None] + np.array([0.1, 0.2]), jnp.float32),
        legal=None,
        final_observation=None,
    )


def filled(config: ReplayConfig, rows: int) -> ReplayState:
    state = replay.init(config, make_row(0))
    for time in range(rows):
        state = jit_add(state, make_row(time))
    return state


class Oracle:
    """A list of rows, oldest first, each a list of priorities; no ring anywhere."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, list[float]]] = []  # (time, raised priority of every environment)
        self.time = 0
        self.largest = 1.0

    def add(self) -> None:
        self.rows = [*self.rows, (self.time, [self.largest] * E)][-C:]
        self.time += 1

    def starts(self) -> list[tuple[int, list[float]]]:
        return self.rows[: len(self.rows) - LENGTH + 1]

    def update(self, times: list[int], envs: list[int], errors: list[float]) -> None:
        given: dict[tuple[int, int], float] = {}
        for time, env, error in zip(times, envs, errors, strict=True):
            raised = (abs(error) + 1e-3) ** ALPHA
            given[time, env] = max(raised, given.get((time, env), 0.0))
            self.largest = max(self.largest, raised)
        for time, priorities in self.rows:
            for env in range(E):
                priorities[env] = given.get((time, env), priorities[env])


operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 9)),
        st.tuples(st.just("update"), st.integers(0, 2**31 - 1)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("config", [PRIORITIZED, UNIFORM], ids=["prioritized", "uniform"])
@settings(max_examples=40)
@given(operations)
def test_ring_is_a_list_of_the_newest_rows(config: ReplayConfig, steps: list[tuple[str, int]]) -> None:
    state, oracle = replay.init(config, make_row(0)), Oracle()
    for name, number in [("add", LENGTH), *steps]:
        if name == "add":
            for _ in range(number):
                state = jit_add(state, make_row(oracle.time))
                oracle.add()
        start = jit_sample(config, jax.random.key(number), state, B, LENGTH)
        times = _check_sample(config, state, start, oracle)
        if name == "update":
            errors = np.random.default_rng(number).exponential(size=B).astype(np.float32) * 3
            state = jit_update(config, state, start, jnp.asarray(errors))
            if config.kind == "prioritized":
                oracle.update(times, np.asarray(start.env).tolist(), errors.tolist())
        _check_state(state, oracle)


def _check_sample(config: ReplayConfig, state: ReplayState, start: Sample, oracle: Oracle) -> list[int]:
    """Checks what a sample reads and weighs; returns the times at which its rows were written."""
    window = jax.device_get(jit_read(state.storage, start, jnp.arange(LENGTH)))
    times = (window.action[:, 0] // 100).tolist()
    allowed = dict(oracle.starts())
    total = sum(sum(priorities) for priorities in allowed.values())
    weights = []
    for b, (time, env) in enumerate(zip(times, np.asarray(start.env).tolist(), strict=True)):
        assert time in allowed  # every row of the window exists and is newer than the one before
        for offset in range(LENGTH):
            written = jax.device_get(make_row(time + offset))
            for field in ("observation", "action", "reward", "terminated", "truncated", "policy"):
                np.testing.assert_array_equal(getattr(window, field)[b, offset], getattr(written, field)[env])
        probability = allowed[time][env] / total
        weights.append((1 / (probability * len(allowed) * E)) ** BETA)
    expected = [w / max(weights) for w in weights] if config.kind == "prioritized" else [1.0] * B
    np.testing.assert_allclose(start.importance, expected, rtol=1e-4)
    assert start.importance.dtype == jnp.float32
    return times


def _check_state(state: ReplayState, oracle: Oracle) -> None:
    assert int(state.filled) == len(oracle.rows)
    assert int(state.cursor) == oracle.time % C
    priority = np.asarray(state.priority)
    for time, priorities in oracle.rows:
        np.testing.assert_allclose(priority[time % C], priorities, rtol=1e-5)
    np.testing.assert_allclose(state.row_priority, priority.sum(1), rtol=1e-6)
    np.testing.assert_allclose(state.max_priority, oracle.largest, rtol=1e-5)


@pytest.mark.parametrize("rows", [LENGTH, C - 1, C, C + 4])
@pytest.mark.parametrize("config", [PRIORITIZED, UNIFORM], ids=["prioritized", "uniform"])
def test_every_start_is_drawn_as_often_as_it_should(config: ReplayConfig, rows: int) -> None:
    """Stratified draws spread less than independent ones, so chi-square's tail bounds them."""
    draws = 6_000
    state = filled(config, rows)
    every = Sample(*jnp.divmod(jnp.arange(C * E, dtype=jnp.int32), E), importance=jnp.ones(C * E))
    errors = np.random.default_rng(1).exponential(size=C * E).astype(np.float32)
    state = jit_update(config, state, every, jnp.asarray(errors))
    start = jit_sample(config, jax.random.key(5), state, draws, LENGTH)

    oldest = max(rows - C, 0)
    times = range(oldest, rows - LENGTH + 1)
    mass = {}
    for time in times:
        for env in range(E):
            error = float(errors[(time % C) * E + env])
            mass[time % C, env] = (error + 1e-3) ** ALPHA if config.kind == "prioritized" else 1.0
    seen = dict.fromkeys(mass, 0)
    for cell in zip(np.asarray(start.row).tolist(), np.asarray(start.env).tolist(), strict=True):
        seen[cell] += 1  # a cell that cannot start a sequence is a KeyError
    chi_square = 0.0
    for cell, weight in mass.items():
        expected = draws * weight / sum(mass.values())
        chi_square += (seen[cell] - expected) ** 2 / expected
    freedom = len(mass) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_a_draw_of_the_newest_start_never_crosses_the_cursor() -> None:
    """All the priority on the last allowed start, and much on rows that are not allowed."""
    state = filled(PRIORITIZED, C + 2)  # the cursor is at 2, so the newest start is (2 - LENGTH) mod C
    newest = (2 - LENGTH) % C
    priority = jnp.full((C, E), 1e-8).at[newest].set(1.0).at[jnp.array([0, 1])].set(1e6)
    state = state.replace(priority=priority, row_priority=priority.sum(1))
    start = jit_sample(PRIORITIZED, jax.random.key(0), state, 512, LENGTH)
    assert set(np.asarray(start.row).tolist()) == {newest}
    assert set(np.asarray(start.env).tolist()) == {0, 1, 2}


def test_draws_are_stratified() -> None:
    """One draw from each of B equal shares: equal priorities over B cells give every cell once."""
    state = filled(PRIORITIZED, C)
    cells = (C - LENGTH + 1) * E
    start = jit_sample(PRIORITIZED, jax.random.key(3), state, cells, LENGTH)
    drawn = sorted(zip(np.asarray(start.row).tolist(), np.asarray(start.env).tolist(), strict=True))
    assert len(set(drawn)) >= cells - 2  # a point on the border of two shares may fall on either side
    np.testing.assert_allclose(start.importance, 1.0, rtol=1e-5)


@given(st.integers(1, 5_000), st.floats(0.05, 1.0))
def test_any_shares_in_a_row_are_evenly_spread(size: int, part: float) -> None:
    shares, taken = replay.spread(size), max(1, round(part * size))
    assert sorted(shares.tolist()) == list(range(size))
    gaps = np.diff(np.sort(shares[:taken]), append=np.min(shares[:taken]) + size)
    assert gaps.sum() == size
    assert gaps.max() <= 3 * size / taken + 1


@pytest.mark.parametrize("rows", [C - 1, C + 4])
@pytest.mark.parametrize("config", [PRIORITIZED, UNIFORM], ids=["prioritized", "uniform"])
def test_any_part_of_a_batch_is_drawn_from_the_whole_ring(config: ReplayConfig, rows: int) -> None:
    """Who takes the first quarter of every batch, as reanalysis does, gets each start as often as who takes it all."""
    state, size, draws = filled(config, rows), 8, 4_000
    draw = jax.jit(jax.vmap(lambda key: replay.sample(config, key, state, size, LENGTH)))
    drawn = np.asarray(draw(jax.random.split(jax.random.key(2), draws)).row)
    starts = {time % C for time in range(max(rows - C, 0), rows - LENGTH + 1)}
    for part in np.split(drawn, 4, axis=1):
        share = np.bincount(part.ravel(), minlength=C) / part.size
        assert set(np.flatnonzero(share)) == starts
        np.testing.assert_allclose(share[sorted(starts)], 1 / len(starts), atol=5 * np.sqrt(1 / len(starts) / part.size))


def test_duplicates_take_the_larger_and_lower_priorities_are_accepted() -> None:
    state = filled(PRIORITIZED, C)
    start = Sample(jnp.array([2, 2, 2, 4]), jnp.array([1, 1, 1, 0]), jnp.ones(4))
    state = jit_update(PRIORITIZED, state, start, jnp.array([0.1, -0.5, 0.2, 0.0]))
    expected = np.ones((C, E))
    expected[2, 1], expected[4, 0] = (0.5 + 1e-3) ** ALPHA, 1e-3**ALPHA
    np.testing.assert_allclose(state.priority, expected, rtol=1e-5)
    np.testing.assert_allclose(state.row_priority, expected.sum(1), rtol=1e-6)
    assert float(state.max_priority) == 1.0


def test_new_rows_get_the_largest_priority_ever_given() -> None:
    state = filled(PRIORITIZED, 4)
    state = jit_update(PRIORITIZED, state, Sample(jnp.array([0]), jnp.array([0]), jnp.ones(1)), jnp.array([31.0]))
    for time in range(4, 4 + C):  # past the point where the row that had it is overwritten
        state = jit_add(state, make_row(time))
        np.testing.assert_allclose(state.priority[time % C], (31.0 + 1e-3) ** ALPHA, rtol=1e-6)


def test_uniform_keeps_priorities_out_of_it() -> None:
    state = filled(UNIFORM, C)
    start = jit_sample(UNIFORM, jax.random.key(0), state, B, LENGTH)
    after = jit_update(UNIFORM, state, start, jnp.full(B, 9.0))
    np.testing.assert_array_equal(after.priority, state.priority)


def test_read_takes_offsets_for_each_sequence() -> None:
    state = filled(PRIORITIZED, C)
    start = Sample(jnp.array([0, 5]), jnp.array([2, 0]), jnp.ones(2))
    offsets = jnp.array([[0, 3], [1, 0]])
    np.testing.assert_array_equal(jit_read(state.storage.action, start, offsets), [[2, 302], [600, 500]])


def test_adding_to_a_donated_ring_copies_nothing() -> None:
    num_envs = 16
    config = ReplayConfig(capacity=num_envs * 4096, min_size=1)
    state = jax.eval_shape(lambda: replay.init(config, make_row(0, num_envs)))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    add = functools.partial(jax.jit, donate_argnums=0)(replay.add)
    memory = add.lower(state, make_row(0, num_envs)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 100
