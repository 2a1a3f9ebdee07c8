"""Queues, limiter and crew of the sebulba runtime, each against what it promises."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leftovers import threads_beside

from muzerox.errors import RunFailed
from muzerox.runtimes import placement
from muzerox.runtimes.sebulba import crew as crew_module
from muzerox.runtimes.sebulba.crew import Crew, Worker
from muzerox.runtimes.sebulba.limiter import Pace, RateLimiter
from muzerox.runtimes.sebulba.meter import Meter
from muzerox.runtimes.sebulba.parameters import ParameterStore, Published
from muzerox.runtimes.sebulba.queues import BoundedQueue, Closed, Interrupted, Replaced


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# Queues


def test_many_producers_and_consumers_lose_and_repeat_nothing() -> None:
    meter = Meter()
    queue: BoundedQueue[int] = BoundedQueue("items", 3, meter)
    got: list[int] = []

    def consume() -> None:
        while True:
            try:
                got.append(queue.get())
            except Closed:
                return

    producers = [in_thread(lambda start=start: [queue.put(i) for i in range(start, 2000, 4)]) for start in range(4)]
    consumers = [in_thread(consume) for _ in range(3)]
    for thread in producers:
        thread.join(30)
    assert wait_until(lambda: len(got) == 2000)
    queue.close()
    for thread in consumers:
        thread.join(10)
        assert not thread.is_alive()
    assert sorted(got) == list(range(2000))
    seen = meter.take()
    assert seen["wait_items_put_count"] == 2000
    assert seen["wait_items_get_count"] == 2003  # each consumer's last ended in Closed
    assert 0 <= seen["items_depth_p50"] <= seen["items_depth_p90"] <= 3


def test_a_full_queue_blocks_until_there_is_room_and_says_how_long() -> None:
    meter = Meter()
    queue: BoundedQueue[str] = BoundedQueue("q", 1, meter)
    queue.put("first")
    done = threading.Event()
    thread = in_thread(lambda: (queue.put("second"), done.set()))
    assert not done.wait(0.1)
    assert len(queue) == 1
    assert queue.get() == "first"
    assert done.wait(5)
    thread.join()
    assert queue.get() == "second"
    assert meter.take()["wait_q_put_seconds"] >= 0.1


def test_interrupting_a_getter_leaves_what_comes_later() -> None:
    queue: BoundedQueue[int] = BoundedQueue("q", 2, Meter())
    interrupted = threading.Event()
    outcome: list[object] = []

    def get() -> None:
        try:
            outcome.append(queue.get(interrupted.is_set))
        except Interrupted as error:
            outcome.append(error)

    thread = in_thread(get)
    assert not wait_until(lambda: bool(outcome), 0.1)
    interrupted.set()
    queue.wake()
    thread.join(5)
    assert isinstance(outcome[0], Interrupted)
    queue.put(7)
    assert queue.get() == 7


def test_a_thousand_starts_and_stops_leak_no_thread() -> None:
    before = threading.enumerate()
    for _ in range(1000):
        queue: BoundedQueue[int] = BoundedQueue("q", 1, Meter())

        def put_for_ever(queue: BoundedQueue[int] = queue) -> None:
            try:
                while True:
                    queue.put(0)
            except Closed:
                return

        def get_for_ever(queue: BoundedQueue[int] = queue) -> None:
            try:
                while True:
                    queue.get()
            except Closed:
                return

        threads = [in_thread(put_for_ever), in_thread(get_for_ever), in_thread(get_for_ever)]
        queue.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    assert threads_beside(before) == []


# The replay ratio


@given(
    first=st.integers(1, 10_000),
    batch=st.integers(1, 4096),
    ratio=st.fractions(min_value=Fraction(1, 100), max_value=100, max_denominator=1000),
    update=st.integers(1, 100_000),
)
def test_pace_is_exact_and_inverts(first: int, batch: int, ratio: Fraction, update: int) -> None:
    pace = Pace(first=first, batch_size=batch, replay_ratio=ratio)
    steps = pace.steps_before(update)
    assert (steps - first) * ratio >= (update - 1) * batch > (steps - first - 1) * ratio
    at = pace.updates_at(steps)
    assert pace.steps_before(at) >= steps
    assert at == 1 or pace.steps_before(at - 1) < steps


def make_limiter(**changes: Any) -> RateLimiter:
    pace = Pace(first=20, batch_size=8, replay_ratio=Fraction(2))  # four steps an update
    limiter = RateLimiter(pace, Meter(), **{"window": 3, "updates": 0, "env_steps": 0, "last": 1000, **changes})
    limiter.begin(0, 1)
    limiter.begin(1, 1)
    return limiter


def test_self_play_waits_for_the_learner_and_contexts_for_self_play() -> None:
    limiter = make_limiter()

    def play() -> None:
        try:
            while True:
                limiter.reserve(0, 1, 4)
                limiter.commit(0)
        except Closed:
            return

    taken: list[int] = []

    def take() -> None:
        try:
            while True:
                taken.append(limiter.next_context())
        except Closed:
            return

    threads = [in_thread(play), in_thread(take)]
    for learned in range(5):
        limiter.learned(learned)
        allowed = 20 + (learned + 2) * 4  # what update learned + 3 needs
        assert wait_until(lambda allowed=allowed, learned=learned: limiter.env_steps == allowed and len(taken) == learned + 3)
        time.sleep(0.02)
        assert (limiter.env_steps, taken) == (allowed, list(range(1, learned + 4)))
    limiter.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_no_step_is_made_for_updates_beyond_the_last() -> None:
    limiter = make_limiter(last=2, window=100)
    for _ in range(6):
        limiter.reserve(0, 1, 4)
        limiter.commit(0)
    assert limiter.env_steps == 24  # exactly what update 2 needs
    blocked = in_thread(lambda: limiter.reserve(0, 1, 4))
    assert [limiter.next_context(), limiter.next_context()] == [1, 2]
    time.sleep(0.05)
    assert blocked.is_alive()
    limiter.until(3)
    blocked.join(5)
    assert not blocked.is_alive()


def test_steps_of_a_worker_that_failed_are_given_back() -> None:
    limiter = make_limiter(last=1)
    limiter.reserve(0, 1, 20)  # all there is to do
    second = in_thread(lambda: (limiter.reserve(1, 1, 20), limiter.commit(1)))
    time.sleep(0.05)
    assert second.is_alive()
    limiter.begin(0, 2)
    second.join(5)
    assert limiter.env_steps == 20
    with pytest.raises(Replaced):  # given up, and back: it must not take the place of its successor
        limiter.reserve(0, 1, 4)


# The crew


@pytest.mark.parametrize("kind", [ValueError, SystemExit])  # the second is what a simulator's sys.exit() raises
def test_a_worker_that_raises_is_replaced_and_one_that_only_fails_ends_everything(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[RunFailed] = []
    crew = Crew(Meter(), max_failures=3, on_end=ended.append)
    calls = {"good": 0, "bad": 0}

    def sometimes(worker: Worker) -> None:
        calls["good"] += 1
        if calls["good"] > 8:
            raise Closed
        worker.done()
        raise kind("now and then")

    crew.start("good", 0, sometimes)
    assert wait_until(lambda: calls["good"] == 9)
    assert not ended

    def never(_: Worker) -> None:
        calls["bad"] += 1
        raise kind("always\nthis")

    crew.start("bad", 1, never)
    assert wait_until(lambda: bool(ended))
    assert calls["bad"] == 3
    assert str(ended[0]) == f"bad 1 failed 3 times in a row; the last: {kind.__name__}: always this"
    crew.stop()
    assert crew.failures == 11
    assert "now and then" in caplog.text
    assert "Traceback" in caplog.text


def test_a_worker_that_hangs_is_given_up_and_replaced() -> None:
    crew = Crew(Meter(), max_failures=3, on_end=lambda _: None)
    release, entered, finished = threading.Event(), [], threading.Event()

    def hang_first(worker: Worker) -> None:
        entered.append(worker)
        if len(entered) == 1:
            with worker.within(0.1):
                release.wait(30)
            raise ValueError("of no interest: it was given up")
        finished.set()

    before = threading.enumerate()
    crew.start("simulator", 0, hang_first)
    crew.watch(0.02)
    assert finished.wait(10)
    assert entered[0].given_up
    assert not entered[1].given_up
    release.set()
    crew.stop()
    assert crew.failures == 1
    assert threads_beside(before, seconds=5) == []


def test_of_two_that_hang_one_ends_everything() -> None:
    ended: list[RunFailed] = []
    crew, release = Crew(Meter(), max_failures=1, on_end=ended.append), threading.Event()
    entered: list[Worker] = []

    def hang(worker: Worker) -> None:
        with worker.within(0.05, "for a step"):
            entered.append(worker)
            release.wait(30)

    for index in range(2):
        crew.start("simulator", index, hang)
    assert wait_until(lambda: len(entered) == 2 and all((w.deadline or math.inf) < time.monotonic() for w in entered))
    crew.watch(0.02)
    assert wait_until(lambda: bool(ended))
    release.set()
    crew.stop()
    assert [str(end) for end in ended] == [
        "simulator 0 failed 1 times in a row; the last: its environments took longer than 0.05 seconds for a step"
    ]


def test_a_worker_that_fails_while_it_is_given_up_does_not_come_back() -> None:
    crew = Crew(Meter(), max_failures=3, on_end=lambda _: None)
    release = threading.Event()
    entered: tuple[list[Worker], list[Worker]] = ([], [])

    def hang_first(worker: Worker) -> None:
        entered[worker.index].append(worker)
        if len(entered[worker.index]) == 1:
            with worker.within(0.01):
                release.wait(30)
            raise ValueError("late")
        release.wait(30)

    def between(record: logging.LogRecord) -> bool:
        """The watcher has found both late and given up the first: now the second fails by itself."""
        if record.getMessage() == "simulator 0 hangs and is replaced":
            release.set()
            time.sleep(0.1)
        return True

    for index in range(2):
        crew.start("simulator", index, hang_first)
    assert wait_until(lambda: all(seen and (seen[0].deadline or math.inf) < time.monotonic() for seen in entered))
    crew_module.log.addFilter(between)
    try:
        crew.watch(0.02)
        assert not wait_until(lambda: len(entered[1]) > 2, 0.5)
        crew.stop()
    finally:
        crew_module.log.removeFilter(between)
    assert crew.failures == 2
    assert [worker.given_up for seen in entered for worker in seen] == [True, False, True, False]


@settings(max_examples=20)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_a_meter_gives_what_it_was_given_and_starts_again(values: list[float]) -> None:
    meter = Meter()
    for value in values:
        meter.add("sum", value)
        meter.observe("seen", value)
    taken = meter.take()
    assert taken["sum"] == pytest.approx(sum(values))
    assert taken["seen_mean"] == pytest.approx(np.mean(values))
    assert taken["seen_p50"] == pytest.approx(np.median(values))
    assert meter.take() == {}


# Parameters


def test_parameters_are_moved_once_and_only_if_they_lie_elsewhere() -> None:
    device, meter = jax.devices()[0], Meter()
    store = ParameterStore(meter)
    weights = np.arange(3, dtype=np.float32)
    store.publish(Published(1, {"w": weights}, {"w": -weights}))
    version, leaves = store.pull(device)
    assert version == 1
    assert [x.devices() for x in leaves] == [{device}]
    assert store.pull(device)[1] is leaves
    np.testing.assert_array_equal(store.pull(device, target=True)[1], [-weights])
    assert meter.take()["bytes_parameters"] == 2 * weights.nbytes

    there = placement.put({"w": weights + 1}, device)
    store.publish(Published(2, there, there))
    version, leaves = store.pull(device)
    assert version == 2
    assert [x is there["w"] for x in leaves] == [True]
    assert store.pull(device)[1] is leaves
    assert "bytes_parameters" not in meter.take()


def test_who_has_asked_for_parameters_finds_the_next_ones_in_place() -> None:
    device, meter = jax.devices()[0], Meter()
    store = ParameterStore(meter)
    weights = np.arange(3, dtype=np.float32)
    store.publish(Published(1, {"w": weights}, {"w": -weights}))
    store.pull(device)
    assert meter.take()["wait_parameters_get_count"] == 1
    store.publish(Published(2, {"w": weights + 1}, {"w": weights - 1}))
    assert meter.take() == {"bytes_parameters": weights.nbytes}  # by who published; nobody asked for target parameters
    version, leaves = store.pull(device)
    assert version == 2
    np.testing.assert_array_equal(leaves, [weights + 1])
    assert meter.take() == {}
