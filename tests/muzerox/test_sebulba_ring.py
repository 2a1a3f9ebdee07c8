"""The replay that threads share, against plain lists and against the ring on the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from toys import small_config

from muzerox import replay
from muzerox.config import Config
from muzerox.runtimes.sebulba import ring
from muzerox.runtimes.sebulba.queues import Replaced
from muzerox.runtimes.sebulba.ring import SharedRing, Start
from muzerox.runtimes.sebulba.rows import DeviceRows, HostRows, make_rows
from muzerox.types import EnvSpec, Transition

SPEC = EnvSpec(id="toy:labels", observation_shape=(1,), observation_dtype="float32", num_actions=2, can_truncate=True)


@pytest.fixture(autouse=True, params=[HostRows, DeviceRows])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file, with rows written in place and by programs."""
    monkeypatch.setattr(ring, "make_rows", request.param)


# The ring: two workers of two environments, ten rows, sequences of three


def ring_config(kind: str = "prioritized") -> Config:
    return small_config(
        "gymnasium:CartPole-v1",
        runtime__kind="sebulba",
        runtime__num_envs=2,
        runtime__selfplay_workers=2,
        replay__capacity=40,
        replay__min_size=8,
        replay__kind=kind,
        train__unroll_steps=1,
        train__td_steps=1,
    )


def label_row(worker: int, time: int, *, ended: bool = False) -> Transition:
    """A row that says who wrote it when: worker * 1000 + time * 10 + environment."""
    label = worker * 1000 + time * 10 + np.arange(2)
    return Transition(
        observation=label[:, None].astype(np.float32),
        action=label.astype(np.int32),
        reward=np.zeros(2, np.float32),
        terminated=np.array([ended, False]),
        truncated=np.zeros(2, bool),
        policy=np.zeros((2, 2), np.float32),
        legal=None,
        final_observation=label[:, None].astype(np.float32) + 0.5,
        random=None,
    )


def make_ring(kind: str = "prioritized", rows: tuple[int, int] = (0, 0)) -> SharedRing:
    config = ring_config(kind)
    made = SharedRing(config, ring.init(config, SPEC), jax.devices()[0])
    for worker, count in enumerate(rows):
        generation = made.begin(worker)
        for t in range(count):
            made.write(worker, generation, label_row(worker, t), lambda: None)
    return made


def labels(storage: Transition, sample: replay.Sample) -> np.ndarray:
    return np.asarray(replay.read(storage.action, sample, np.arange(3, dtype=np.int32)))


@pytest.mark.parametrize("rows", [(3, 0), (5, 2), (10, 7), (25, 13), (9, 31)])
@pytest.mark.parametrize("kind", ["prioritized", "uniform"])
def test_samples_are_consecutive_rows_of_one_worker(kind: str, rows: tuple[int, int]) -> None:
    made = make_ring(kind, rows)
    start, read, late = made.read(made.sample(np.random.default_rng(0), 400), labels)
    assert late == 0
    worker, env = read[:, 0] // 1000, read[:, 0] % 10
    first = read[:, 0] % 1000 // 10
    assert (read == (worker * 1000 + env)[:, None] + 10 * (first[:, None] + np.arange(3))).all()
    assert (first == start.row).all()
    assert (start.column == worker * 2 + env).all()
    expected = {(w, t, e) for w in (0, 1) for t in range(max(0, rows[w] - 10), rows[w] - 2) for e in (0, 1)}
    assert {(int(w), int(t), int(e)) for w, t, e in zip(worker, first, env, strict=True)} == expected


class Watched(np.ndarray):
    """Priorities beside whose writing, or before and after whose reading, something happens."""

    written: Callable[[], None] | None = None
    read: Callable[[], None] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if self.written is not None:
            self.written()

    def astype(self, *args: Any, **kwargs: Any) -> np.ndarray:
        if self.read is None:
            return np.asarray(self).astype(*args, **kwargs)
        self.read()
        copy = np.asarray(self).astype(*args, **kwargs)
        self.read()
        return copy


@pytest.mark.parametrize("rows", [(3, 0), (8, 3), (14, 5)])
@pytest.mark.parametrize("first", ["write", "draw"])
def test_draws_and_writes_at_once_name_sequences_that_exist(first: str, rows: tuple[int, int]) -> None:
    made, rng = make_ring(rows=rows), np.random.default_rng(0)
    generation, drawn = made.begin(0), []

    def draw() -> None:
        drawn.append(made.sample(rng, 400))

    def write() -> None:
        made.write(0, generation, label_row(0, int(made.count[0])), lambda: None)

    watched = made._row_priority.view(Watched)
    made._row_priority = watched
    if first == "write":
        watched.written = draw
        write()
    else:
        watched.read = write
        draw()
    (start,) = drawn
    assert (start.row >= 0).all()
    assert (start.row <= made.count[start.column // 2] - 3).all()


def test_draws_follow_priorities() -> None:
    made = make_ring(rows=(10, 4))
    rng = np.random.default_rng(1)
    drawn = made.sample(rng, 64)
    made.update_priority(drawn, rng.uniform(0.0, 5.0, 64).astype(np.float32))
    state = made.snapshot()
    eligible = np.zeros((10, 4), bool)
    eligible[:8, :2], eligible[:2, 2:] = True, True
    probability = np.where(eligible, state.priority, 0.0)
    probability /= probability.sum()
    counts = np.zeros((10, 4))
    draws = 0
    for _ in range(200):
        start = made.sample(rng, 100)
        np.add.at(counts, (start.row % 10, start.column), 1)
        draws += 100
        weight = (probability[start.row % 10, start.column] * eligible.sum()) ** -0.4
        np.testing.assert_allclose(start.importance, weight / weight.max(), rtol=1e-4)
    # Stratified draws vary less than independent ones: five standard deviations of those are generous.
    assert (np.abs(counts / draws - probability) <= 5 * np.sqrt(probability * (1 - probability) / draws) + 1e-9).all()


@pytest.mark.parametrize("kind", ["prioritized", "uniform"])
def test_any_part_of_a_batch_is_drawn_from_the_whole_ring(kind: str) -> None:
    """Who takes the first quarter of every batch, as reanalysis does, gets each start as often as who takes it all."""
    made, rng = make_ring(kind, rows=(13, 6)), np.random.default_rng(5)
    drawn = [made.sample(rng, 8) for _ in range(4_000)]
    row, column = (np.stack([getattr(start, name) for start in drawn]) for name in ("row", "column"))
    starts = {(t, c) for c in range(4) for t in (range(3, 11) if c < 2 else range(4))}
    for part in np.split(row * 4 + column, 4, axis=1):
        cells, counts = np.unique(part, return_counts=True)
        assert {(int(cell) // 4, int(cell) % 4) for cell in cells} == starts
        np.testing.assert_allclose(counts / part.size, 1 / len(starts), atol=5 * np.sqrt(1 / len(starts) / part.size))


def test_one_worker_draws_as_the_ring_on_the_device_does() -> None:
    """Same priorities: same probabilities as muzerox.replay, by the importance weights, which are a function of them."""
    config = small_config(
        runtime__kind="sebulba", runtime__selfplay_workers=1, runtime__num_envs=2, replay__capacity=20, replay__min_size=4,
        train__unroll_steps=1, train__td_steps=1,
    )  # fmt: skip
    made = SharedRing(config, ring.init(config, SPEC), jax.devices()[0])
    generation = made.begin(0)
    device = replay.init(config.replay, label_row(0, 0))
    for t in range(13):
        made.write(0, generation, label_row(0, t), lambda: None)
        device = replay.add(device, label_row(0, t))
    errors = np.random.default_rng(0).uniform(0, 3, 16).astype(np.float32)
    start = made.sample(np.random.default_rng(0), 16)
    made.update_priority(start, errors)
    same = replay.Sample((start.row % 10).astype(np.int32), start.column, start.importance)
    device = replay.update_priority(config.replay, device, same, errors)
    saved = made.snapshot()
    np.testing.assert_allclose(saved.priority, device.priority, rtol=1e-6)
    ours, theirs = np.zeros((10, 2)), np.zeros((10, 2))
    rng = np.random.default_rng(2)
    for seed in range(300):
        host = made.sample(rng, 16)
        np.add.at(ours, (host.row % 10, host.column), 1 / 4800)
        there = replay.sample(config.replay, jax.random.key(seed), device, 16, 3)
        np.add.at(theirs, (np.asarray(there.row), np.asarray(there.env)), 1 / 4800)
    assert ((ours > 0) == (theirs > 0)).all()
    np.testing.assert_allclose(ours, theirs, atol=5 * np.sqrt(2 * 0.1 / 4800))


def test_starts_overwritten_on_the_way_are_moved_and_their_priorities_left() -> None:
    made = make_ring(rows=(10, 10))
    start = Start(np.array([0, 7, 3]), np.array([0, 1, 2], np.int32), np.ones(3, np.float32))
    generation = made.begin(0)
    for t in range(10, 15):
        made.write(0, generation, label_row(0, t), lambda: None)
    moved, read, late = made.read(start, labels)
    assert late == 1
    assert moved.row.tolist() == [5, 7, 3]
    assert read[:, 0].tolist() == [50, 71, 1030]
    before = made.snapshot().priority
    made.update_priority(start, np.array([9.0, 2.0, 3.0], np.float32))
    after = made.snapshot().priority
    changed = {(int(r), int(c)) for r, c in np.argwhere(before != after)}
    assert changed == {(7, 1), (3, 2)}


def test_rows_overwritten_while_they_are_read_are_not_taken() -> None:
    made = make_ring(rows=(10, 10))
    generation, written = made.begin(0), threading.Event()

    def write() -> None:
        for t in range(10, 13):
            made.write(0, generation, label_row(0, t), lambda: None)
        written.set()

    def gather(storage: Transition, sample: replay.Sample) -> np.ndarray:
        if not writer.is_alive() and not written.is_set():
            writer.start()
            written.wait(0.5)  # in vain where a reader holds the lock
        return labels(storage, sample)

    writer = threading.Thread(target=write)
    start = Start(np.array([0, 4]), np.array([0, 2], np.int32), np.ones(2, np.float32))
    moved, read, late = made.read(start, gather)
    writer.join()
    first = moved.row[0]
    assert (late, first) in ((1, 3), (0, 0))
    assert read.tolist() == [[10 * (first + i) for i in range(3)], [1040, 1050, 1060]]


def test_where_rows_lie_makes_no_difference() -> None:
    config, rng = ring_config(), np.random.default_rng(3)
    made = [kind(ring.init(config, SPEC).storage, jax.devices()[0]) for kind in (HostRows, DeviceRows)]
    for t in range(30):
        worker = int(rng.integers(2))
        row = label_row(worker, t, ended=bool(rng.integers(2)))
        for rows in made:
            rows.write(row, t % 10, 2 * worker)
            if t % 4 == 0:
                rows.cut(t % 10, 2 * worker, 2)
    host, device = (rows.copy() for rows in made)
    jax.tree.map(np.testing.assert_array_equal, host, device)
    assert host.truncated.any()
    jax.tree.map(np.testing.assert_array_equal, host, jax.tree.map(np.asarray, made[0].read(lambda storage: storage)))


def test_memory_that_numpy_made_is_copied_before_it_is_written() -> None:
    assert isinstance(make_rows(ring.init(ring_config(), SPEC).storage, jax.devices("cpu")[0]), HostRows)
    storage = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), ring.init(ring_config(), SPEC).storage)
    rows = HostRows(storage, jax.devices("cpu")[0])
    rows.write(label_row(1, 5), 3, 0)
    assert rows.copy().action[3].tolist() == [1050, 1051, 0, 0]
    assert not storage.action.any()


def test_a_start_drawn_twice_takes_the_larger_priority() -> None:
    made = make_ring(rows=(10, 0))
    start = Start(np.array([4, 4, 5]), np.array([0, 0, 0], np.int32), np.ones(3, np.float32))
    made.update_priority(start, np.array([3.0, 1.0, 2.0], np.float32))
    saved = made.snapshot()
    assert saved.priority[4, 0] == pytest.approx((3.0 + replay.SMALLEST_PRIORITY) ** 0.6, rel=1e-5)
    assert float(saved.max_priority) == pytest.approx((3.0 + replay.SMALLEST_PRIORITY) ** 0.6, rel=1e-5)


def test_who_starts_over_cuts_the_unfinished_episodes_and_silences_its_predecessor() -> None:
    made = make_ring(rows=(0, 4))
    old = made.begin(0)
    made.write(0, old, label_row(0, 0), lambda: None)
    made.write(0, old, label_row(0, 1, ended=True), lambda: None)
    new = made.begin(0)
    truncated = made.snapshot().storage.truncated
    assert truncated[:2, :2].tolist() == [[False, False], [False, True]]  # environment 0 had ended by itself
    assert not truncated[:, 2:].any(), "the other worker's episodes go on"
    committed: list[int] = []
    with pytest.raises(Replaced):
        made.write(0, old, label_row(0, 2), lambda: committed.append(1))
    assert not committed
    made.write(0, new, label_row(0, 2), lambda: committed.append(1))
    assert made.count.tolist() == [3, 4]
    assert committed == [1]
