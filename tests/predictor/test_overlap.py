"""How stages overlap between threads, what their queues cost, and coefficients from runs of both runtimes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from predictor import STAGES, Hardware, Measurement, RuntimePredictor, Workload, hardware_rates, stack, stages, staleness
from predictor.analytic import HANDED
from predictor.coefficients import fit_coefficients
from predictor.overlap import BOUNDS, POWER, batch_staleness, bound_weights, bounds, combine, effective_weights, total

Make = Callable[..., Workload]
Family = Callable[[int, int], list[Workload]]

weigh = jax.jit(bound_weights)


def test_combine_goes_from_sum_to_maximum() -> None:
    values = np.array([[3e-6, 4e-6], [1e-9, 5e-3]], np.float32)
    np.testing.assert_allclose(combine(values), values.sum(1), rtol=1e-6)
    np.testing.assert_allclose(combine(values, 2.0), [5e-6, 5e-3], rtol=1e-5)
    np.testing.assert_allclose(combine(values, float("inf")), [4e-6, 5e-3])
    np.testing.assert_allclose(combine(values, 64.0), [4e-6, 5e-3], rtol=1e-4)


def threaded_family(make: Make, seed: int, count: int) -> list[Workload]:
    rng = np.random.default_rng(seed)

    def one() -> Workload:
        return make(
            num_envs=float(rng.choice([8, 32, 128])),
            num_simulations=float(rng.choice([4, 16, 50])),
            batch_size=float(rng.choice([32, 128, 512])),
            replay_ratio=float(rng.choice([0.5, 2.0, 8.0])),
            loop_count=float(rng.choice([1, 8, 64])),
            selfplay_workers=float(rng.choice([1, 2, 4])),
            cpu_actors=float(rng.choice([1, 2, 4])),
            search_queue_size=float(rng.choice([1, 2, 8])),
            batch_queue_size=float(rng.choice([1, 2, 8])),
            role_threads=float(rng.choice([0, 1, 2])),
            step_in_process=float(rng.integers(2)),
            reanalyze_fraction=float(rng.choice([0.0, 0.5])),
            host_step_seconds=float(rng.choice([1e-6, 1e-5, 1e-4])),
            cores=float(rng.choice([1, 2, 4])),
        )

    return [one() for _ in range(count)]


def whole(workloads: list[Workload], hardware: Hardware, coefficients: np.ndarray | float = 1.0) -> np.ndarray:
    batch, rates = stack(workloads), hardware_rates(hardware)
    return np.asarray(total(np.asarray(stages(batch, rates)) * coefficients, batch, rates), np.float64)


def test_one_program_does_one_stage_after_the_other(family: Family, hardware: Hardware) -> None:
    workloads = family(0, 5)
    rows = np.asarray(stages(stack(workloads), hardware_rates(hardware)))
    np.testing.assert_allclose(whole(workloads, hardware), rows.sum(1), rtol=1e-6)


def test_bounds_equal_a_count_by_hand(make_threaded: Make, hardware: Hardware) -> None:
    w = make_threaded(selfplay_workers=8.0, cpu_actors=3.0, search_queue_size=4.0, batch_queue_size=9.0, step_in_process=1.0)
    rates = hardware_rates(dataclasses.replace(hardware, cores=4))
    w = dataclasses.replace(w, cores=4.0)
    found = np.asarray(bound_weights(w, rates))
    assert found.shape == (len(BOUNDS), len(STAGES))
    table = {bound: dict(zip(STAGES, row.tolist(), strict=True)) for bound, row in zip(BOUNDS, found, strict=True)}
    assert table["selfplay"]["acting_bytes"] == table["selfplay"]["host_rows"] == pytest.approx(1 / 4)  # not more than cores
    assert table["context"] == pytest.approx({name: 1 / 3 if name == "contexts" else 0.0 for name in STAGES})
    assert table["search"]["replay_bytes"] == pytest.approx(1 + 0.25 / 5)
    assert table["learner"]["dispatch"] == pytest.approx(1 + 0.25 / 10)
    assert (table["lock"]["host_rows"], table["lock"]["host_steps"], table["lock"]["acting_bytes"]) == (1.0, 0.0, 0.0)
    assert sum(table["device"].values()) == 0.0  # the device is the cores
    product = 27_000 / 4 * 32
    assert table["processors"]["acting_flops"] == pytest.approx((1 + 3 * product / (product + 1e7)) / 4)  # as far as it is shared
    assert table["processors"]["tree_bytes"] == table["processors"]["host_steps"] == pytest.approx(1 / 4)
    assert np.all(found.sum(0) > 0)  # no stage is free
    seconds = np.asarray(stages(w, rates))
    each = found @ seconds
    np.testing.assert_allclose(bounds(seconds, w, rates), each, rtol=1e-5)
    np.testing.assert_allclose(total(seconds, w, rates), np.sum(each**POWER) ** (1 / POWER), rtol=1e-5)


def test_threads_of_ones_own_are_fewer_and_cost_less(make_threaded: Make, hardware: Hardware) -> None:
    four = dataclasses.replace(hardware, cores=4)

    def weights(role_threads: float, **changes: float) -> dict[str, np.ndarray]:
        w = make_threaded(cores=4.0, role_threads=role_threads, **changes)
        return dict(zip(BOUNDS, np.asarray(bound_weights(w, hardware_rates(four))), strict=True))

    shared, own = weights(0.0), weights(2.0)
    acting, learning, targets = (STAGES.index(name) for name in ("acting_flops", "learner_flops", "reanalysis_bytes"))
    # Four workers call their searches side by side, on however many threads; a large product that took four cores takes two.
    large = {"num_envs": 1e9, "batch_size": 1e9, "selfplay_workers": 4.0}
    wide, narrow = weights(0.0, **large), weights(2.0, **large)
    assert narrow["selfplay"][acting] == pytest.approx(2.0 * wide["selfplay"][acting], rel=1e-3)
    assert narrow["learner"][learning] == pytest.approx(2.0 * wide["learner"][learning], rel=1e-3)
    rows = STAGES.index("host_rows")
    assert weights(1.0, selfplay_workers=4.0)["selfplay"][rows] == pytest.approx(1 / 4)
    assert 1.0 < own["learner"][learning] / shared["learner"][learning] < 1.3  # a small one is hardly shared
    assert shared["learner"][targets] == 0.0 < own["learner"][targets]
    small = STAGES.index("tree_bytes")
    assert own["processors"][small] == pytest.approx((1.0 - HANDED) * shared["processors"][small])
    assert own["processors"][acting] == shared["processors"][acting]
    gpu = dataclasses.replace(four, platform="gpu", device_memory_bytes=10**10)
    both = [np.asarray(bound_weights(make_threaded(cores=4.0, role_threads=t), hardware_rates(gpu))) for t in (0.0, 2.0)]
    np.testing.assert_array_equal(*both)  # an accelerator has none to give


def test_an_accelerator_is_shared_unless_each_role_has_its_own(make_threaded: Make, hardware: Hardware) -> None:
    gpu = dataclasses.replace(hardware, platform="gpu", device_memory_bytes=10**10)
    device, processors = BOUNDS.index("device"), BOUNDS.index("processors")
    acting, steps = STAGES.index("acting_flops"), STAGES.index("host_steps")
    shared = np.asarray(bound_weights(make_threaded(), hardware_rates(gpu)))
    apart = np.asarray(bound_weights(make_threaded(), hardware_rates(dataclasses.replace(gpu, devices=3))))
    assert (shared[device, acting], apart[device, acting]) == (1.0, 0.0)
    assert shared[processors, acting] == 0.0  # it takes no core
    assert shared[processors, steps] > 0.0


def test_of_two_accelerators_learning_has_one_to_itself(make_threaded: Make, hardware: Hardware) -> None:
    """Searching shares the one that acts; so it is older than the learner's own when a batch is learnt from."""
    gpu = dataclasses.replace(hardware, platform="gpu", device_memory_bytes=10**10)
    device = BOUNDS.index("device")
    names = ("acting_flops", "replay_bytes", "reanalysis_flops", "learner_flops", "optimizer_bytes")
    columns = [STAGES.index(name) for name in names]

    def shared(devices: int, **changes: float) -> list[float]:
        machine = hardware_rates(dataclasses.replace(gpu, devices=devices))
        return np.asarray(bound_weights(make_threaded(**changes), machine))[device, columns].tolist()

    assert [shared(n) for n in (1, 2, 3)] == [[1.0] * 5, [1.0, 1.0, 1.0, 0.0, 0.0], [0.0] * 5]
    assert shared(3, acting_devices=2.0, searching_devices=1.0) == [0.5, 1.0, 1.0, 0.0, 0.0]  # the first of the two that act
    w = make_threaded(loop_count=8.0, batch_queue_size=5.0)
    ages = [float(batch_staleness(w, dataclasses.replace(gpu, devices=n))) for n in (1, 2, 3)]
    assert ages == [0.0, 15.0, 15.0]
    # Those who search on a device that nobody learns with make targets of their own.
    more = dataclasses.replace(w, searching_devices=2.0, acting_devices=2.0)
    assert float(batch_staleness(more, dataclasses.replace(gpu, devices=2))) == 15.5


def test_workers_take_turns_on_the_devices_they_act_with(make_threaded: Make, hardware: Hardware) -> None:
    """Eight workers, two devices: what runs on a device is bound by the two, what holds Python is not."""
    gpu = dataclasses.replace(hardware, platform="gpu", device_memory_bytes=10**10, devices=8)
    busy = make_threaded(selfplay_workers=8.0, acting_devices=2.0)
    acting, rows = STAGES.index("acting_flops"), STAGES.index("host_rows")
    found = dict(zip(BOUNDS, np.asarray(bound_weights(busy, hardware_rates(gpu))), strict=True))
    assert (found["selfplay"][acting], found["acting"][acting], found["acting"][rows]) == (1 / 8, 1 / 2, 0.0)
    here = dict(zip(BOUNDS, np.asarray(bound_weights(busy, hardware_rates(hardware))), strict=True))
    assert here["acting"][acting] == 0.0  # a processor's cores are counted elsewhere


@pytest.mark.parametrize(
    ("field", "low", "high", "sign"),
    [
        ("search_queue_size", 1, 64, -1),
        ("batch_queue_size", 1, 64, -1),
        ("cores", 1, 4, -1),
        ("host_step_seconds", 1e-6, 1e-3, 1),
        ("loop_count", 1, 64, -1),
        ("step_in_process", 0, 1, 1),  # where steps are cheap a message costs more
        ("num_simulations", 8, 64, 1),
    ],
)
def test_what_threads_cost_is_monotone(
    make_threaded: Make, hardware: Hardware, field: str, low: float, high: float, sign: int
) -> None:
    values = np.linspace(low, high, 9)
    found = whole([make_threaded(**{field: float(v)}) for v in values], hardware)
    assert np.all(sign * np.diff(found) >= 0)
    assert sign * (found[-1] - found[0]) > 0


def test_workers_beyond_the_cores_are_no_gain(make_threaded: Make, hardware: Hardware) -> None:
    one, two, many = whole([make_threaded(selfplay_workers=n) for n in (1.0, 2.0, 16.0)], hardware)
    assert two < one
    assert many >= two * (1.0 - 1e-6)


def test_a_process_pays_where_simulators_are_slow(make_threaded: Make, hardware: Hardware) -> None:
    slow = {"host_step_seconds": 1e-3, "selfplay_workers": 4.0, "cores": 4.0}
    threads, processes = whole([make_threaded(**slow, step_in_process=x) for x in (0.0, 1.0)], hardware)
    assert processes < 0.6 * threads


def test_effective_weights_are_the_gradient_and_add_up_to_the_whole(
    make_threaded: Make, family: Family, hardware: Hardware
) -> None:
    workloads = threaded_family(make_threaded, 1, 6) + family(1, 2)
    batch, rates = stack(workloads), hardware_rates(hardware)
    terms, weights = np.asarray(stages(batch, rates), np.float64), np.asarray(weigh(batch, rates), np.float64)
    shares = effective_weights(terms, weights)
    np.testing.assert_allclose((terms * shares).sum(1), whole(workloads, hardware), rtol=1e-4)
    gradient = np.asarray(jax.jit(jax.grad(lambda s: total(s, batch, rates).sum()))(terms.astype(np.float32)))
    np.testing.assert_allclose(shares, gradient, rtol=1e-3, atol=1e-4)


def test_coefficients_come_from_runs_of_both_runtimes(make_threaded: Make, family: Family, hardware: Hardware) -> None:
    workloads = threaded_family(make_threaded, 2, 200) + family(2, 200)
    batch, rates = stack(workloads), hardware_rates(hardware)
    rows, weights = np.asarray(stages(batch, rates)), np.asarray(weigh(batch, rates))
    true = np.random.default_rng(0).uniform(0.5, 2.0, len(STAGES))
    measured = whole(workloads, hardware, true)
    found = fit_coefficients(rows, measured, weights, ridge=1e-6)
    np.testing.assert_allclose(whole(workloads, hardware, found), measured, rtol=0.03)
    # A handful of them scales everything, and many beat that.
    few = fit_coefficients(rows[:3], measured[:3] * 5.0, weights[:3])
    assert np.all(np.abs(np.log(whole(workloads, hardware, few) / measured / 5.0)) < np.log(2.5))


def test_a_fit_learns_from_threads(
    make_threaded: Make, family: Family, hardware: Hardware, measure: Callable[..., Measurement]
) -> None:
    workloads = threaded_family(make_threaded, 3, 12) + family(3, 8)
    seconds = whole(workloads, hardware, 2.5)
    model = RuntimePredictor().fit([measure(w, float(s)) for w, s in zip(workloads, seconds, strict=True)])
    others = threaded_family(make_threaded, 4, 20)
    predicted = np.exp(np.asarray(model.log_seconds(stack(others), hardware)))
    np.testing.assert_allclose(predicted, whole(others, hardware, 2.5), rtol=0.02)


def test_staleness_counts_what_is_under_way(make_workload: Make, make_threaded: Make, hardware: Hardware) -> None:
    w = make_threaded(loop_count=8.0, search_queue_size=3.0, batch_queue_size=5.0, cpu_actors=2.0)
    assert float(staleness(w)) == 2 * 8 + 3 + 5 + 2 + 1
    assert float(batch_staleness(w, hardware)) == 0.0  # the learner makes the targets
    w = dataclasses.replace(w, reanalyze_fraction=0.25)
    assert float(batch_staleness(w, hardware)) == 1.5 * 8 + 0.5 * (5 + 1)
    images = dataclasses.replace(w, reanalyze_fraction=0.0, observation_bytes=84.0 * 84 * 4)
    assert float(batch_staleness(images, hardware)) == 15.0
    assert float(staleness(make_workload())) == float(batch_staleness(make_workload(), hardware)) == 0.0
    assert RuntimePredictor().predict(w, hardware).batch_staleness == 15.0
    assert RuntimePredictor().predict(make_workload(), hardware).batch_staleness is None
