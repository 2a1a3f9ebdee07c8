"""Allocation and balance against the method's formulas written out in NumPy, and what they say to do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from predictor import Hardware, Measurement, Outcome, Workload
from tuner import allocate, balance, resources
from tuner.balance import Verdict
from tuner.bridge import Config

amounts = hnp.arrays(np.float32, (4, 3), elements=st.integers(0, 10_000).map(lambda n: n / 100.0))


@given(amounts, amounts, amounts)
def test_an_allocation_is_the_demand_between_the_limits(wanted: np.ndarray, minimum: np.ndarray, maximum: np.ndarray) -> None:
    found = np.asarray(allocate.allocate(wanted, allocate.Limits(minimum, maximum)))
    np.testing.assert_allclose(found, np.minimum(np.maximum(wanted, minimum), maximum))
    assert (found <= maximum).all()  # whatever is wanted, the machine has no more


def test_demand_falls_with_the_temperature_and_follows_the_history() -> None:
    use = np.array([1.0, 4.0, 0.0], np.float32)
    hot, warm, cold = (np.asarray(allocate.demand(use, np.ones(3), t)) for t in (1.0, 0.5, 0.0))
    assert (hot[:2] > warm[:2]).all()
    assert (warm[:2] > cold[:2]).all()
    assert (cold[:2] > use[:2]).all()
    np.testing.assert_allclose(allocate.demand(use, [2.0, 1.0, 1.0], 0.0), cold * [2.0, 1.0, 1.0])


def test_the_correction_is_the_median_of_measured_over_predicted() -> None:
    measured = np.array([[2.0, 1.0, 0.0], [4.0, np.nan, 0.0], [6.0, 3.0, 0.0]])
    predicted = np.array([[2.0, 2.0, np.nan], [2.0, 2.0, np.nan], [2.0, 2.0, np.nan]])
    np.testing.assert_allclose(allocate.correction(measured, predicted), [2.0, 1.0, 1.0])
    np.testing.assert_allclose(allocate.correction(np.zeros((0, 3)), np.zeros((0, 3))), [1.0, 1.0, 1.0])


@given(amounts, amounts)
def test_a_correction_moves_towards_the_demand_and_never_past_it(allocated: np.ndarray, wanted: np.ndarray) -> None:
    room = allocate.Limits(np.zeros(3), np.full(3, 1e9))
    for given_, needed in zip(allocated.astype(float), wanted.astype(float), strict=True):
        seen = balance.Seen(1.0, needed, room, np.zeros(3), np.zeros(3))
        after = balance.correct(balance.start(given_), seen).allocated
        assert (after >= np.minimum(given_, needed) - 1e-6).all()
        assert (after <= np.maximum(given_, needed) + 1e-6).all()
        assert (after != given_).sum() <= 1  # one resource a correction
        near = np.abs(given_ - needed) < (balance.THRESHOLD - 1e-3) * needed
        np.testing.assert_array_equal(after[near], given_[near])


def test_the_balance_factor_is_the_mean_over_resources_that_are_wanted() -> None:
    assert float(balance.balance_factor([2.0, 8.0, 0.0], [1.0, 4.0, 0.0])) == pytest.approx(2.0)
    assert float(balance.balance_factor([2.0, 2.0, 1.0], [1.0, 4.0, 2.0])) == pytest.approx(3.0 / 3.0)
    np.testing.assert_allclose(balance.balance_factor([[2.0, 2.0, 2.0]] * 2, [[1.0, 1.0, 1.0], [4.0, 4.0, 4.0]]), [2.0, 0.5])


@pytest.mark.parametrize(
    ("factor", "expected"), [(1.3, Verdict.OVER), (1.2, Verdict.BALANCED), (0.8, Verdict.BALANCED), (0.7, Verdict.STARVED)]
)
def test_verdicts(factor: float, expected: Verdict) -> None:
    assert balance.verdict(factor, 0.25) == expected


def test_a_configuration_is_given_whole_cores_and_quarters_of_a_gibibyte(machine: Hardware) -> None:
    config = Config().replace("allocation.cores", 4)
    given_ = resources.with_allocation(config, np.array([1.6, 1.1 * 2**30, 0.0]), machine, (1, 2, 3, 4)).allocation
    assert (given_.cores, given_.memory_gib, given_.device_memory) == (2, 1.25, None)
    fewer = resources.with_allocation(config.replace("allocation.cores", 1), np.array([3.0, 2**30, 0.0]), machine, (1, 4))
    assert fewer.allocation.cores == 1  # never more than it asked for
    threads = config.replace({"runtime.kind": "sebulba", "runtime.role_threads": 3})
    idle = np.array([0.5, 2**30, 0.0])
    assert resources.with_allocation(threads, idle, machine, (1, 2, 3, 4)).allocation.cores == 3  # as many as a role's threads
    np.testing.assert_allclose(resources.allocation_of(fewer, machine), [1.0, 2**30, 0.0])
    np.testing.assert_allclose(resources.allocation_of(Config(), machine), [4.0, 8 * 2**30, 0.0])  # all there is


def test_what_was_asked_for_is_not_rounded_up_beyond(machine: Hardware) -> None:
    gpu = dataclasses.replace(machine, platform="gpu", device_memory_bytes=150_754_820_096)
    asked = Config().replace({"allocation.memory_gib": 1.6, "allocation.device_memory": 0.6})
    most = resources.allocation_of(asked, gpu)
    given_ = resources.for_training(np.array([1.0, 8e9, 140e9], np.float32), gpu, most)
    for hardware, share in ((gpu, 0.6), (machine, 0.6)):
        found = resources.with_allocation(asked, given_, hardware, (), most).allocation
        assert (found.memory_gib, found.device_memory) == (1.6, share)
    little = resources.with_allocation(asked, np.array([1.0, 1.1 * 2**30, 15e9]), gpu, (), most).allocation
    assert (little.memory_gib, little.device_memory) == (1.25, 0.1)


def test_the_next_allocation_follows_the_balance(machine: Hardware) -> None:
    use = np.array([1.0, 2**30, 0.0], np.float32)
    everything = np.asarray(resources.limits(machine).maximum)
    state, first = resources.next_allocation(balance.start(everything), use, 1.0, machine)
    # 4 cores and 8 GiB where 1.75 of each are wanted: memory is farthest over, and moves alone.
    np.testing.assert_allclose(first, [4.0, 1.75 * 2**30, 0.0])
    state, second = resources.next_allocation(state, use, 1.0, machine)
    np.testing.assert_allclose(second, [1.75, 1.75 * 2**30, 0.0])
    state, last = resources.next_allocation(state, use, 0.0, machine)
    assert last[1] >= use[1] + allocate.SAFETY_BYTES["cpu"]  # what keeps it alive, whatever was given before
    _, capped = resources.next_allocation(state, use, 1.0, machine, np.array([1.0, 2**30, 0.0], np.float32))
    np.testing.assert_allclose(capped, [1.0, 2**30, 0.0])  # no more than was asked for


def test_on_a_gpu_there_is_memory_left_to_compile(machine: Hardware) -> None:
    """What was measured of programs from the cache is a quarter of what a training holds that compiles them."""
    gpu = dataclasses.replace(machine, platform="gpu", device_memory_bytes=80 * 2**30, memory_bytes=64 * 2**30)
    use = np.array([0.1, 0.9 * 2**30, 14e6], np.float32)
    given_ = resources.for_training(use, gpu, np.asarray(resources.limits(gpu).maximum))
    config = resources.with_allocation(Config(), given_, gpu, (1, 2, 3, 4))
    assert config.allocation.memory_gib == pytest.approx(4.0)
    assert 1.0 / 80 < config.allocation.device_memory < 2.0 / 80


def test_a_training_is_given_its_measured_demand_between_the_limits(machine: Hardware) -> None:
    use = np.array([1.6, 4 * 2**30, 0.0], np.float32)
    most = np.array([4.0, 8 * 2**30, 0.0], np.float32)
    np.testing.assert_allclose(resources.for_training(use, machine, most), [2.0, 5 * 2**30, 0.0])
    alive = 0.4 * 2**30 + allocate.SAFETY_BYTES["cpu"]
    np.testing.assert_allclose(resources.for_training(use * 0.1, machine, most), [1.0, alive, 0.0])
    np.testing.assert_allclose(resources.for_training(use * 10.0, machine, most), most)


@pytest.mark.parametrize(
    ("roles", "devices", "visible"),
    [((2, 1, 1), 8, 4), ((2, 2, 1), 3, 3), ((2, 1, 1), 2, 2), ((1, 1, 1), 1, 1), ((1, 1, 1), 4, 3)],
)
def test_a_configuration_sees_the_accelerators_that_it_has_work_for(
    machine: Hardware, roles: tuple[int, int, int], devices: int, visible: int
) -> None:
    names = ("runtime.acting_devices", "runtime.searching_devices", "runtime.learning_devices")
    config = Config().replace({"runtime.kind": "sebulba", **dict(zip(names, roles, strict=True))})
    gpus = dataclasses.replace(machine, platform="gpu", devices=devices, device_memory_bytes=40 * 2**30)
    given_ = resources.with_allocation(config, np.array([2.0, 2**30, 10 * 2**30]), gpus, ()).allocation
    assert (given_.devices, given_.device_memory) == (visible, 0.25)
    assert resources.with_allocation(config, np.array([2.0, 2**30, 0.0]), machine, ()).allocation.devices is None


def test_the_balance_of_a_run_comes_from_what_it_was_measured_to_use(machine: Hardware, workload: Workload) -> None:
    config = Config().replace({"allocation.cores": 2, "allocation.memory_gib": 2.0})
    ran = Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, cpu_use=1.0, peak_bytes=float(2**30))
    headroom = 1.0 + allocate.HEADROOM
    found = resources.balance_of(config, resources.use_of(ran), machine)
    assert found == pytest.approx((2.0 / headroom + 2.0 / headroom) / 2)


def test_a_learner_that_waits_while_all_cores_are_busy_is_starved(machine: Hardware, workload: Workload) -> None:
    config = Config().replace({"allocation.cores": 2, "allocation.memory_gib": 2.0})

    def ran(cpu_use: float, waiting: float) -> Measurement:
        figures = {"cpu_use": cpu_use, "peak_bytes": 1.6 * 2**30, "waits": {"batch_get": waiting, "step_put": 3.0}}
        return Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, **figures)

    def factor(measured: Measurement) -> float:
        found = resources.balance_of_run(config, measured, machine)
        assert found is not None
        return found

    fed, hungry, idle = ran(1.9, 0.0), ran(1.9, 0.6), ran(1.2, 0.6)
    np.testing.assert_allclose(resources.need_of(config, fed, machine), resources.use_of(fed))
    np.testing.assert_allclose(resources.need_of(config, idle, machine), resources.use_of(idle))  # cores are not what it lacks
    assert resources.need_of(config, hungry, machine)[0] == pytest.approx(1.9 / 0.4)
    assert balance.verdict(factor(fed)) is Verdict.BALANCED
    assert balance.verdict(factor(hungry)) is Verdict.STARVED


def test_a_run_from_the_cache_does_not_say_how_much_memory_the_next_one_needs(machine: Hardware, workload: Workload) -> None:
    def ran(*, from_cache: bool) -> Measurement:
        figures = {"seconds_per_env_step": 1e-4, "peak_bytes": 0.5e9, "cpu_use": 1.5, "from_cache": from_cache}
        return Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, **figures)

    predicted = (1.0, 1e9, 0.0)
    np.testing.assert_allclose(resources.correction([(ran(from_cache=True), predicted)]), [1.5, 1.0, 1.0])
    np.testing.assert_allclose(resources.correction([(ran(from_cache=False), predicted)]), [1.5, 0.5, 1.0])
