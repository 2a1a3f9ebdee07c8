"""Rounds of bursts that other programs disturb: seen, made again and left out."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from predictor import Hardware
from tuner.bridge import Config
from tuner.measuring.measure import Bursts, Reference, Timing, measure_timings

CORES = len(os.sched_getaffinity(0))

TAKEN = [
    ([0, 2, 0, 1, 0, 0, 0], [0, 2, 4, 5, 6], ["2 of 7 rounds are left out"]),  # as many more as it takes
    ([2, 2, 2, 2, 2], [0, 1, 2, 3, 4], ["what is measured meanwhile is less certain"]),  # always so: no more are made
    ([2, 0, 2, 1.5, 2, 1], [0, 1, 2, 3, 5], ["1 of 6 rounds are left out"]),  # one was quiet: one more
    ([0, 0, 0, 0, 0.1], [0, 1, 2, 3, 4], []),  # a program at rest
]


@pytest.mark.parametrize(("taken", "kept", "told"), TAKEN)
def test_rounds_that_others_disturb_are_made_again(
    tiny: Config, machine: Hardware, monkeypatch: pytest.MonkeyPatch, taken: list[float], kept: list[int], told: list[str]
) -> None:
    said: list[str] = []
    timing = Timing(tiny, hardware=machine, timeout=120.0)
    with timing.worker:
        timing.wait()
        ask, cores = timing.worker.ask, iter(taken)

        def ask_beside_others(**request: Any) -> dict[str, Any]:
            return {**ask(**request), "wall_seconds": 0.2, "others_seconds": next(cores) * 0.2}  # however long it was

        monkeypatch.setattr(timing.worker, "ask", ask_beside_others)
        ((found,),) = measure_timings([timing], [()], Bursts(5, 0.2), say=said.append)
    bursts = timing.bursts[2]
    assert len(bursts) == len(taken)
    assert found.repeats == tuple(bursts[index]["seconds_per_env_step"] for index in kept)
    assert found.seconds_per_env_step == sorted(found.repeats)[2]
    assert [text.partition(": ")[2] for text in said] == told


def test_what_is_measured_beside_disturbed_rounds_is_told_by_the_same_rounds(
    tiny: Config, machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = [Timing(tiny, hardware=machine, timeout=120.0) for _ in range(2)]
    ours, other = timings
    with ours.worker, other.worker:
        for timing in timings:
            timing.wait()
        seconds = {ours: iter([2.0, 9.0, 4.0, 6.0]), other: iter([1.0, 1.0, 2.0, 2.0])}
        taken = iter([0.0, 2.0, 0.0, 0.0])

        def scripted(timing: Timing, others: Iterator[float]) -> Any:
            facts = timing.worker.ask(seconds=0.05, loop_count=2)

            def ask(**_: Any) -> dict[str, Any]:
                return {
                    **facts,
                    "seconds_per_env_step": next(seconds[timing]),
                    "wall_seconds": 1.0,
                    "others_seconds": next(others),
                }

            return ask

        monkeypatch.setattr(ours.worker, "ask", scripted(ours, itertools.repeat(0.0)))
        monkeypatch.setattr(other.worker, "ask", scripted(other, taken))
        ((found,),) = measure_timings([ours], [()], Bursts(3, 0.05), Reference(other, 10.0))
    # 2, 2 and 3 times the other's; 9 is the round in which it was disturbed.
    assert found.seconds_per_env_step == 20.0
    assert found.repeats == pytest.approx((10.0, 20.0, 30.0))


def test_it_waits_once_for_others_to_end(tiny: Config, machine: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    timings = [Timing(tiny, hardware=machine, timeout=120.0) for _ in range(2)]
    ours, other = timings
    with ours.worker, other.worker:
        for timing in timings:
            timing.wait()
        facts = ours.worker.ask(seconds=0.05, loop_count=2)
        cores = iter([2.0] * 6 + [2.0] * 3 + [0.0, 2.0, 2.0, 2.0] + [2.0] * 6)

        def ask(**_: Any) -> dict[str, Any]:
            return {**facts, "wall_seconds": 1.0, "others_seconds": next(cores)}

        monkeypatch.setattr(other.worker, "ask", ask)
        monkeypatch.setattr(ours.worker, "ask", lambda **_: {**facts, "others_seconds": 0.0})
        made = []
        for _ in range(4):
            ours.bursts = {}
            measure_timings([ours], [()], Bursts(3, 0.05), Reference(other, 1.0))
            made.append(len(ours.bursts[2]))
    assert made == [6, 3, 4, 6]


def test_a_burst_tells_what_others_take_of_its_cores(tiny: Config, machine: Hardware) -> None:
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(CORES)]
    try:
        timing = Timing(tiny, hardware=machine, timeout=120.0)
        with timing.worker:
            timing.wait()
            for _ in range(3):
                timing.burst(0.5)
    finally:
        for process in others:
            process.kill()
            process.wait()
    # As many are busy as there are cores, so that each has half of one at the least.
    assert sorted(burst["others_seconds"] / burst["wall_seconds"] for burst in timing.bursts[2])[1] > 0.3 * CORES
