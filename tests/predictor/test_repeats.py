"""What one program, measured often, says of others; what several calls of ``fit`` add up to; which machines are known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from predictor import Hardware, Measurement, Outcome, RuntimePredictor, Workload, stack
from predictor.posterior import conformal_factor

Make = Callable[..., Workload]
Measure = Callable[..., Measurement]


def out_of_memory(workload: Workload, measure: Measure) -> Measurement:
    return measure(workload, None, outcome=Outcome.OUT_OF_MEMORY, error="killed")


def fits(model: RuntimePredictor, workload: Workload, hardware: Hardware) -> bool:
    return model.predict(workload, hardware).outcome is Outcome.OK


# Intervals


def test_scores_of_a_group_weigh_as_one() -> None:
    scores = np.array([1.0] * 30 + [2.0, 3.0, 4.0])
    groups = [0] * 30 + [1, 2, 3]
    assert conformal_factor(scores, np.ones(33), groups, coverage=0.6) == 3.0  # the third of four groups
    assert conformal_factor(scores, np.ones(33), coverage=0.6) == 1.0
    assert conformal_factor(scores, np.ones(33), groups) == 4.0, "of four groups no factor is sure"


@pytest.mark.parametrize(("programs", "repeats"), [(1, 12), (3, 10), (12, 1), (12, 4)])
def test_intervals_hold_what_other_programs_take(
    programs: int, repeats: int, family: Callable[[int, int], list[Workload]], hardware: Hardware, measure: Measure
) -> None:
    """However often each is measured; a program is 15% off from what is expected, each time that it is measured."""
    inside, widths = [], []
    plain, rng = RuntimePredictor.pretrained(), np.random.default_rng(0)
    workloads = family(3, 40)
    expected = np.asarray(plain.log_seconds(stack(workloads), hardware))
    for _ in range(8):
        true = expected + 0.15 * rng.standard_normal(len(workloads))
        order = rng.permutation(len(workloads))
        some, others = order[:programs], order[programs:]
        rows = [measure(workloads[i], math.exp(true[i] + 0.03 * rng.standard_normal())) for i in some for _ in range(repeats)]
        low, high = (np.asarray(x) for x in plain.fit(rows, train=False).log_interval(stack(workloads), hardware))
        inside += list((low <= true)[others] & (true <= high)[others])
        widths.append(np.median(high - low))
    assert np.mean(inside) >= 0.85
    assert np.median(widths) < math.log(3.5)


# Memory


def test_what_ran_out_once_is_unlearnt_by_what_went_well_since(make_workload: Make, hardware: Hardware, measure: Measure) -> None:
    """In one call or in several, in any order."""
    small, less, between, more = (make_workload(capacity=c) for c in (1e6, 2e7, 4e7, 5e7))
    failed, fine = out_of_memory(less, measure), measure(more, 1e-4)
    calls = [[[failed, fine]], [[failed], [fine]], [[fine, failed]], [[failed], [measure(small, 1e-4)], [fine]]]
    for rows in calls:
        model = RuntimePredictor()
        for some in rows:
            model = model.fit(some, train=False)
        assert fits(model, between, hardware)
        assert fits(model, more, hardware), "what went well is expected to"


def test_a_later_failure_of_more_does_not_undo_an_earlier_of_less(
    make_workload: Make, hardware: Hardware, measure: Measure
) -> None:
    less, between, more = (make_workload(capacity=c) for c in (2e7, 4e7, 1e8))
    small = measure(make_workload(), 1e-4)
    model = RuntimePredictor().fit([small, out_of_memory(less, measure)], train=False)
    assert not fits(model, between, hardware)
    assert not fits(model.fit([small, out_of_memory(more, measure)], train=False), between, hardware)


def test_what_went_well_fits_to_the_last_byte(make_workload: Make, hardware: Hardware, measure: Measure) -> None:
    failed = out_of_memory(make_workload(capacity=1e7), measure)
    for i in range(30):
        large = make_workload(capacity=5e7 + 12_345.0 * i)
        assert fits(RuntimePredictor().fit([failed, measure(large, 1e-4)], train=False), large, hardware)


# Machines


def test_a_machine_on_which_all_failed_is_not_known(make_workload: Make, hardware: Hardware, measure: Measure) -> None:
    plain, workload = RuntimePredictor.pretrained(), make_workload()
    crashed = measure(workload, None, outcome=Outcome.CRASHED, error="killed by signal 6")
    after = plain.fit([crashed], train=False)
    assert (after.about, after.machines) == (plain.about, plain.machines)
    slow = [measure(workload, 2.0 * plain.predict(workload, hardware).seconds_per_env_step)]
    found = [model.fit(slow, train=False).predict(workload, hardware).seconds_per_env_step for model in (plain, after)]
    assert found[0] == pytest.approx(found[1])


def test_of_several_machines_another_is_in_the_middle(make_workload: Make, hardware: Hardware, measure: Measure) -> None:
    workload, plain = make_workload(), RuntimePredictor()
    machines = [dataclasses.replace(hardware, cpu=name) for name in "abc"]
    usual = plain.predict(workload, hardware).compile_seconds
    rows = [
        measure(workload, 1e-4, hardware=machine, compile_seconds=factor * usual)
        for machine, factor in zip(machines, (0.5, 3.0, 2.0), strict=True)
    ]
    for order in (rows, rows[::-1], [rows[1], rows[2], rows[0]]):
        found = plain.fit(order, train=False).predict(workload, hardware)
        assert found.compile_seconds == pytest.approx(2.0 * usual, rel=1e-3)


def test_no_more_cores_are_busy_than_a_workload_has(make_workload: Make, hardware: Hardware, measure: Measure) -> None:
    rows = [measure(make_workload(num_envs=n, cores=4.0), 1e-4, cpu_use=3.6) for n in (8.0, 16.0, 32.0, 64.0)]
    model = RuntimePredictor().fit(rows, train=False)
    found = [model.predict(make_workload(cores=cores), hardware).cpu_use for cores in (1.0, 2.0, 4.0)]
    assert found[0] <= 1.0
    assert found[1] <= 2.0
    assert found[2] == pytest.approx(3.6, rel=0.05)
