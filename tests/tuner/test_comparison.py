"""The end of a tuning: who is compared, for how long, and what is clearly faster."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from predictor import Hardware, Measurement, Outcome, Workload
from tuner import comparison
from tuner.comparison import clearly_faster, speedup_interval
from tuner.history import Trial
from tuner.objective import STALENESS_PRICE, Limits, cost


def trial(
    number: int, machine: Hardware, workload: Workload, seconds: float | None = 1.0, warmup: float = 0.1, **changes: Any
) -> Trial:
    """One that took ``seconds`` an environment step."""
    outcome = Outcome.OK if seconds else Outcome.CRASHED
    fields = {"seconds_per_env_step": seconds, "warmup_seconds": warmup, "compile_seconds": 10.0}
    measurement = Measurement(hardware=machine, workload=workload, outcome=outcome, **fields)
    given = dict.fromkeys(("predicted_uncalibrated", "predicted_base", "predicted", "temperature", "elapsed"), 1.0)
    return Trial(number=number, role="annealed", changes=changes, config={}, measurement=measurement, predicted_use=(), **given)


def test_a_comparison_has_the_rivals_that_there_is_time_for(machine: Hardware, threaded: Workload) -> None:
    def made(*warmups: float) -> list[Trial]:
        return [trial(number, machine, threaded, warmup=warmup) for number, warmup in enumerate(warmups)]

    schedule, longer = (comparison.Schedule(0.4, budget) for budget in (300.0, 3000.0))
    quick, slow, fewest = made(0.1, 0.1, 0.1), made(22.0, 5.0, 5.0), comparison.MIN_ROUNDS
    assert schedule.plan(quick, 31.0) == (2, fewest)  # 9.8 s until all are up, 3 to finish, 1.2 s a round
    assert schedule.plan(quick, 30.0) == (1, fewest), "one rival less is rather done without"
    assert schedule.plan(quick, 1.0) == (1, fewest), "whatever is left"
    assert schedule.plan(slow, 150.0) == (2, comparison.LONG_ROUNDS)
    assert schedule.plan(slow, 100.0) == (1, comparison.LONG_ROUNDS)
    assert longer.plan(slow, 1000.0) == (2, fewest)
    assert schedule.reserved(quick) == pytest.approx(0.86 * 3 * 3.8 + 3.0 + fewest * 1.2), "two start at once"
    alone = schedule.reserved(slow[:1])
    later = 0.86 * 2 * 3.7 + 3.0 + comparison.LONG_ROUNDS * (22.0 + 11.0)
    assert alone == pytest.approx(later), "one that is worth finding is faster"
    more = made(0.1, 0.1, 0.1, 0.1, 0.1)
    assert schedule.reserved(more) == schedule.reserved(quick), "two have time kept for them"
    assert schedule.plan(more, 50.0)[0] == 4
    assert schedule.plan(more, 45.0)[0] == 3, "16 s until all are up and to finish, and 1.6 s a round"
    assert alone < 120.0 < 300.0 - 60.0, "of five minutes a start whose bursts take 22 s leaves time for trials"


@pytest.mark.parametrize(("peak", "device_peak", "rivals"), [(1.0, 1.0, 4), (2.0, 1.0, 2), (1.0, 3.0, 1), (7.0, 1.0, 0)])
def test_what_is_compared_fits_into_memory_side_by_side(
    machine: Hardware, threaded: Workload, peak: float, device_peak: float, rivals: int
) -> None:
    gpu = dataclasses.replace(machine, platform="gpu")  # 8 GiB of both
    trials = [trial(number, gpu, threaded, warmup=0.1) for number in range(5)]
    held = {"peak_bytes": peak * 2**30, "device_peak_bytes": device_peak * 2**30}
    trials = [dataclasses.replace(t, measurement=dataclasses.replace(t.measurement, **held)) for t in trials]
    found = comparison.finalists(trials, lambda t: t.number, lambda _: 0.0)
    assert len(found) == (4 if rivals else 0), "what does not fit beside the start cannot be compared with it"
    if found:
        assert comparison.Schedule(0.4, 300.0).plan([trials[0], *found], 200.0)[0] == rivals


def test_a_rival_beats_the_start_with_all_that_both_pay(machine: Hardware, threaded: Workload) -> None:
    def ran(*seconds: float, queue: float = 2.0) -> Measurement:
        workload = dataclasses.replace(threaded, batch_queue_size=queue)
        return Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, repeats=seconds)

    def chosen(base: Measurement, *rivals: Measurement) -> int | None:
        return comparison.choose(base, rivals, lambda m: 0.001 * m.workload.batch_queue_size, lambda _: 1.0)

    start = ran(*[1.0] * 15)
    assert chosen(start, ran(*[0.95] * 15)) == 0
    assert chosen(start, ran(*[0.95] * 15, queue=64.0)) is None, "a twentieth faster is not worth 62 updates"
    assert chosen(ran(*[1.0] * 15, queue=64.0), ran(*[0.99] * 15)) == 0
    assert chosen(start, ran(*[0.9] * 15), ran(*[0.85] * 15, queue=100.0)) == 0
    assert chosen(dataclasses.replace(start, outcome=Outcome.CRASHED, repeats=()), ran(*[0.5] * 15)) is None
    lucky, slower = ran(*[0.85] * 8, *[1.05] * 7), ran(*[1.2] * 15)  # p = 0.04
    assert chosen(start, lucky) == 0
    assert chosen(start, slower, lucky, slower, slower) is None, "one of four is as lucky in one comparison of seven"


def test_where_joules_count_what_they_were_not_read_of_is_not_compared(machine: Hardware, threaded: Workload) -> None:
    def ran(seconds: float, joules: float | None) -> Measurement:
        repeats = (seconds,) * 15
        figures = {"repeats": repeats, "joules_per_env_step": joules}
        return Measurement(hardware=machine, workload=threaded, outcome=Outcome.OK, **figures)

    def rent(measurement: Measurement) -> float:
        return measurement.joules_per_env_step or math.inf

    def chosen(*measured: Measurement) -> int | None:
        return comparison.choose(measured[0], measured[1:], lambda _: 0.0, rent)

    assert chosen(ran(1.0, 2.0), ran(0.5, None), ran(0.9, 2.0)) == 1
    assert chosen(ran(1.0, 2.0), ran(0.5, None)) is None
    assert chosen(ran(1.0, None), ran(0.5, 2.0), ran(0.5, None)) is None


def test_the_cheapest_trial_is_not_only_the_fastest(machine: Hardware, threaded: Workload) -> None:
    def tried(number: int, seconds: float | None, queue: float) -> Trial:
        return trial(number, machine, dataclasses.replace(threaded, batch_queue_size=queue), seconds, q=queue)

    def pay(measurement: Measurement) -> float:
        return cost(measurement, machine, Limits(np.inf, np.inf, STALENESS_PRICE / 20))

    trials = [tried(0, 1.0, 2), tried(1, 0.5, 64), tried(2, 0.505, 1), tried(3, None, 1), tried(4, 0.6, 2)]
    found = comparison.finalists(trials, lambda t: t.changes["q"], pay)
    assert [t.number for t in found] == [2, 1, 4]  # a hundredth faster is not worth 63 updates
    assert pay(trials[3].measurement) == np.inf


@pytest.mark.parametrize(
    ("ours", "faster"),
    [
        ([0.9] * 7, True),
        ([0.9] * 5 + [1.2] * 2, False),  # the two that were lost differ most: ranks of 13 and 15, p = 0.5
        ([0.85] * 12 + [1.3] * 3, False),  # 42 and 78, p = 0.14
        ([0.85] * 10 + [1.05] * 5, True),  # 15 and 105, p = 0.004
        ([0.99] * 15, False),  # surely, but by too little
        ([0.9] * 3, False),  # too few rounds to tell
        ([0.8] * 3, True),  # for so much they are enough
        ([0.5, 0.95, 0.8], False),  # t = 2.2
        ([0.5], False),
    ],
)
def test_clearly_faster_is_more_than_luck(ours: list[float], faster: bool, machine: Hardware, workload: Workload) -> None:
    def measured(repeats: list[float]) -> Measurement:
        return Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, repeats=tuple(repeats))

    assert clearly_faster([measured(ours)], measured([1.0] * len(ours)), 1.02) == [faster]


@pytest.mark.parametrize(
    ("ours", "alone", "of_four"),
    [
        ([0.9] * 8 + [1.05] * 7, True, False),  # p = 0.03, and each of four has its chance
        ([0.8] * 15, True, True),
        ([0.7, 0.95, 0.8], False, True),  # that these differ by so much is luck: the others tell how much rounds do
    ],
)
def test_luck_has_several_chances_and_several_tell_what_it_does(
    ours: list[float], alone: bool, of_four: bool, machine: Hardware, workload: Workload
) -> None:
    def measured(repeats: list[float]) -> Measurement:
        return Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, repeats=tuple(repeats))

    base, level = measured([1.0] * len(ours)), [measured(([1.0, 1.01, 0.99] * len(ours))[: len(ours)])] * 3
    assert clearly_faster([measured(ours)], base, 1.02) == [alone]
    assert clearly_faster([*level, measured(ours)], base, 1.02) == [False] * 3 + [of_four]


def _rounds(seconds: np.ndarray, machine: Hardware, workload: Workload) -> Measurement:
    return Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, seconds_per_env_step=1.0, repeats=tuple(seconds))


@pytest.mark.parametrize(("rounds", "of_a_round", "most"), [(25, 0.1, 0.94), (15, 0.06, 0.94), (4, 0.07, 0.98)])
def test_other_processes_lie_in_the_interval_nine_times_in_ten(
    machine: Hardware, threaded: Workload, rounds: int, of_a_round: float, most: float
) -> None:
    """Of few rounds more often: their spread is taken for no less than what is usual."""
    rng, inside = np.random.default_rng(0), []
    for _ in range(1000):
        offsets = rng.normal(0.0, comparison._OF_A_PROCESS, 4)  # two of each configuration: compared, and to come
        base, ours = np.exp(rng.normal(0.0, of_a_round / np.sqrt(2), (2, rounds)) + offsets[:2, None]) / [[1.0], [1.2]]
        low, high = speedup_interval(*(_rounds(seconds, machine, threaded) for seconds in (ours, base)))
        inside.append(low < 1.2 * np.exp(offsets[2] - offsets[3]) < high)
    assert 0.86 < np.mean(inside) < most


def test_an_interval_is_around_the_ratio_and_narrower_with_rounds(machine: Hardware, threaded: Workload) -> None:
    def interval(ratios: list[float]) -> tuple[float, float]:
        ours = _rounds(1.0 / np.array(ratios), machine, threaded)
        return speedup_interval(ours, _rounds(np.ones(len(ratios)), machine, threaded))

    few, many = interval([1.1, 1.2, 1.3]), interval([1.1, 1.2, 1.3] * 8)
    for low, high in (few, many):
        assert low * high == pytest.approx(1.2**2)  # as far on both sides, in logarithms
        assert low < 1.2 < high
    assert few[0] < many[0]
    even = interval([1.2] * 25)
    assert even[1] / even[0] == pytest.approx(np.exp(2 * 1.645 * 2 * 0.027)), "processes differ, however even the rounds are"
