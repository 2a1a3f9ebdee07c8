"""Stages against arithmetic by hand, what must grow with what, and the coefficients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest

from predictor import STAGES, Hardware, Workload, hardware_rates, resident_bytes, stack, stages
from predictor.analytic import HANDED, matmul_rate
from predictor.coefficients import PRIOR, fit_coefficients
from predictor.overlap import total

Make = Callable[..., Workload]


def seconds(workload: Workload, hardware: Hardware) -> dict[str, float]:
    values = np.asarray(stages(workload, hardware_rates(hardware)))
    assert values.dtype == np.float32
    return dict(zip(STAGES, values.tolist(), strict=True))


def faster_when_large(dynamics: float, rows: float, cores: int) -> float:
    """Of 4-byte numbers that the dynamics' four layers make: large arrays are shared by cores."""
    return 1 + (cores - 1) * dynamics * rows / (dynamics * rows + 2e6)


def product_rate(one: float, every: float, rows: float) -> float:
    """Operations a second between one core's and all cores': of 27,000 a row in four layers."""
    return one + (every - one) * 27_000 / 4 * rows / (27_000 / 4 * rows + 1e7)


def test_stages_equal_a_count_by_hand(make_workload: Make, hardware: Hardware) -> None:
    w = make_workload(search_split=2.0, reanalyze_fraction=0.25, replay_on_host=1.0, compute_bits=16.0, puct=1.0)
    # 2 of 4 cores: a third of the way from one core's rate to all cores', as far as they share products.
    narrower = 3e11 / 4e11 / 0.4  # products hide behind what is beside them
    acting_flops, learning_flops = (product_rate(1e11, 1e11 + (4e11 - 1e11) / 3, rows) * narrower for rows in (32, 256))
    copy, operation = 5e10, 3e-7
    represent, dynamics, predict = 1_700, 2_300 + (1 + 1.2) * 64, 2_200  # elements; 16 bits are widened to be moved
    learnt = 2_300 + (2 + 1.2) * 64  # and back for the gradient
    answer = predict + 6 * (21 + 2)
    search_flops = 17_000 + 19_000 + 16 * (27_000 + 19_000)
    weights = 9_000 + 10_000 + 16 * (14_000 + 10_000)
    search_passes = 4 * (represent + answer + 16 * (dynamics + answer + 6 * 21))
    depth = np.sqrt(2 * 17 / 2)
    search_statistics = 4 * 16 * ((1034 + 1.7 * depth + 25 * 16) * (2 + 16) + 64)  # PUCT in mctx
    network_operations = 3 * (3 + 4 + 16 * (4 + 4))
    tree_operations = 16 * (85 + 6.4 * depth)
    acting, learning = (faster_when_large(dynamics, rows, cores=2) for rows in (32, 256))  # reanalysis has as many roots as that
    updates = 4 / 256
    forward_and_backward = 3 * (represent + 3 * (learnt + 2 * 6 * 21) + 4 * (predict + 2 * 6 * (21 + 2)))
    forward = 4 * (represent + predict + 6 * 21)
    expected = {
        "acting_flops": search_flops / acting_flops,
        "acting_bytes": 4 * (search_passes + weights / 32) / copy / acting,
        "acting_operations": 2 / 64 * network_operations * operation,
        "tree_operations": 2 / 64 * tree_operations * operation,
        "tree_bytes": search_statistics / copy,
        "learner_flops": 4 * (3 * (17_000 + 3 * 27_000 + 4 * 19_000) + 4 * (17_000 + 19_000)) / learning_flops,
        "learner_bytes": 4 * 4 * 4 * (forward_and_backward + forward) / copy / learning,
        "learner_operations": updates * (12 * (3 * (3 + 3 * 4 + 4) + 3 + 4) + 110) * operation,
        "optimizer_bytes": updates * 4 * 46 * 33_000 / copy,
        "replay_bytes": (16 + 4 * 2 + 20 + 4 * 2 * (5 * 16 + 43 * 20 + 4 * 2 * 4) + updates * 4 * 12 * (131_072 / 64 + 256 * 64))
        / copy,
        "reanalysis_flops": 0.25 * 4 * 4 * search_flops / learning_flops,
        "reanalysis_bytes": 0.25 * 4 * 4 * 4 * (search_passes + weights / (0.25 * 256 * 4)) / copy / learning,
        "reanalysis_operations": updates * (network_operations + tree_operations) * operation,
        "reanalysis_tree_bytes": 0.25 * 4 * 4 * search_statistics / copy,
        "environment": 250 * operation / 64 + 4 * 16 / copy,
        "dispatch": updates / 32 * 80 * 1e-5,  # the arrays of a whole training
        **dict.fromkeys(("host_steps", "host_rows", "contexts", "ready"), 0.0),
    }
    assert seconds(w, hardware) == pytest.approx(expected, rel=1e-5)


def test_stages_of_threads_equal_a_count_by_hand(make_workload: Make, make_threaded: Make, hardware: Hardware) -> None:
    updates = 4 / 256
    w = make_threaded(step_in_process=1.0, reanalyze_fraction=0.25)
    found = seconds(w, hardware)
    priorities = 4 * 12 * (131_072 / 32 + 256 * 32)
    sequences = 5 * 16 + 43 * 20 + 4 * 2 * 4
    expected = {
        "replay_bytes": (2 * 16 + 8 + 20 + 4 * sequences) / 5e10,  # priorities lie on the host
        "environment": 0.0,
        "dispatch": updates * ((80 + 200) / 8 + 10) * 1e-5,  # parameters are taken once a dispatch
        "host_steps": 7e-6,
        "host_rows": (50 + 10) * 1e-5 / 32,
        "contexts": updates * (30 * 1e-5 + priorities / 5e10),
        "ready": updates * 180 * 1e-5,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    # The rest is what the same search and learner cost in one program.
    same = seconds(make_workload(num_envs=32.0, loop_count=8.0, reanalyze_fraction=0.25), hardware)
    others = [name for name in STAGES if name not in expected]
    # Cores share large arrays there; here they are counted where threads meet.
    by_one = seconds(make_workload(num_envs=32.0, loop_count=8.0, reanalyze_fraction=0.25, cores=1.0), hardware)
    same |= {name: by_one[name] for name in ("acting_bytes", "learner_bytes", "reanalysis_bytes")}
    assert [found[name] for name in others] == pytest.approx([same[name] for name in others], rel=1e-6)
    # A JAX environment on the host is a program, still, that is asked for.
    program = seconds(make_threaded(host_step_seconds=0.0, step_in_process=1.0), hardware)
    assert program["environment"] > 0.0
    assert program["host_rows"] == pytest.approx((50 + 30 + 10) * 1e-5 / 32)
    assert seconds(make_threaded(learning_devices=2.0), hardware)["learner_flops"] == pytest.approx(found["learner_flops"] / 2)


@pytest.mark.parametrize(
    ("field", "low", "high", "sign"),
    [
        ("num_simulations", 8, 64, 1),
        ("num_actions", 2, 18, 1),
        ("dynamics_flops", 1e4, 1e6, 1),
        ("num_bins", 21, 601, 1),
        ("replay_ratio", 1, 8, 1),
        ("unroll_steps", 1, 5, 1),
        ("reanalyze_fraction", 0, 0.5, 1),
        ("puct", 0, 1, 1),
        ("search_split", 1, 8, 1),
        ("capacity", 1e5, 1e7, 1),
        ("loop_count", 1, 64, -1),
        ("cores", 1, 4, -1),
        ("num_devices", 1, 4, -1),
    ],
)
def test_cost_is_monotone(make_workload: Make, hardware: Hardware, field: str, low: float, high: float, sign: int) -> None:
    rates = hardware_rates(hardware)
    values = np.linspace(low, high, 9)
    batch = stack([make_workload(**{field: float(v)}) for v in values])
    whole = np.asarray(total(stages(batch, rates), batch, rates), np.float64)
    assert np.all(sign * np.diff(whole) >= 0)
    assert sign * (whole[-1] - whole[0]) > 0


def test_searches_cost_what_their_engine_and_policy_do(make_workload: Make, hardware: Hardware) -> None:
    """Mctx more than ours, PUCT more than Gumbel; of two actions Gumbel tries both at once."""
    found = {
        (engine, puct): seconds(make_workload(search_engine=engine, puct=puct), hardware)
        for engine in (0.0, 1.0)
        for puct in (0.0, 1.0)
    }
    for stage in ("tree_operations", "tree_bytes"):
        cost = {key: figures[stage] for key, figures in found.items()}
        assert cost[1.0, 0.0] < cost[0.0, 0.0] < cost[0.0, 1.0]
        assert cost[1.0, 1.0] < cost[0.0, 1.0]
        # Of our own, operations are as good as the same (25 and 22 a simulation here); PUCT pays in bytes.
        assert cost[1.0, 0.0] < (1.2 if stage == "tree_operations" else 1.0) * cost[1.0, 1.0]
    both = {key: figures["tree_operations"] + figures["tree_bytes"] for key, figures in found.items()}
    assert both[1.0, 0.0] < both[1.0, 1.0]
    calls = {key: figures["acting_operations"] for key, figures in found.items()}
    assert calls[0.0, 0.0] == calls[0.0, 1.0] == calls[1.0, 1.0]
    assert calls[1.0, 0.0] < 0.7 * calls[1.0, 1.0]
    three = seconds(make_workload(search_engine=1.0, num_actions=3.0), hardware)
    assert three["acting_operations"] == calls[1.0, 1.0]


def test_a_batch_is_its_workloads_one_by_one(family: Callable[[int, int], list[Workload]], hardware: Hardware) -> None:
    rates = hardware_rates(hardware)
    workloads = family(0, 5)
    batched = jax.jit(stages)(stack(workloads), rates)
    assert batched.shape == (5, len(STAGES))
    singles = np.stack([np.asarray(jax.jit(stages)(w, rates)) for w in workloads])
    np.testing.assert_allclose(np.asarray(batched), singles, rtol=1e-6)
    memory = np.stack([np.asarray(resident_bytes(w)) for w in workloads])
    np.testing.assert_allclose(np.asarray(resident_bytes(stack(workloads))), memory, rtol=1e-6)


def test_one_core_hands_no_small_operation_to_another(make_workload: Make, hardware: Hardware) -> None:
    one, two = (seconds(make_workload(cores=cores), hardware) for cores in (1.0, 2.0))
    for name in ("acting_operations", "tree_operations", "learner_operations"):
        assert one[name] == pytest.approx((1 - HANDED) * two[name]), name
    assert one["acting_bytes"] == pytest.approx(faster_when_large(2_300 + 64, 64, cores=2) * two["acting_bytes"])
    assert one["tree_bytes"] == two["tree_bytes"]
    assert one["dispatch"] == two["dispatch"]
    gpu = dataclasses.replace(hardware, platform="gpu")
    assert seconds(make_workload(cores=1.0), gpu)["acting_operations"] == pytest.approx(two["acting_operations"])


def test_a_learner_of_boards_takes_longer_where_its_arrays_leave_the_caches(make_workload: Make, hardware: Hardware) -> None:
    """By what a convolution moves of all rows that are learnt from at once, which are few on a device of one core."""

    def taken(batch: float, moved: float = 4e4, machine: Hardware = hardware, **changes: float) -> float:
        w = make_workload(dynamics_moved=moved, batch_size=batch, cores=1.0, **changes)
        return seconds(w, machine)["learner_bytes"]

    layers = make_workload().dynamics_layers
    half_way = 6e6 / (4.0 * 4e4 / layers)  # rows
    # A step's share of an update does not depend on the batch otherwise.
    least, between, most = (taken(rows) for rows in (1.0, half_way, 1e6))
    assert [least / between, most / between] == pytest.approx([0.7, 1.3], rel=1e-3)
    assert taken(1e6, cached_rows=half_way) == pytest.approx(between)
    assert taken(1.0, cached_rows=half_way) == pytest.approx(least)
    assert taken(1e6, sebulba=1.0, learning_devices=1.0, cached_rows=half_way) == pytest.approx(between)
    shared = make_workload(dynamics_moved=4e4, batch_size=1e6, cores=2.0)  # by cores, which take all rows at once
    few = dataclasses.replace(shared, cached_rows=half_way)
    assert seconds(few, hardware)["learner_bytes"] == seconds(shared, hardware)["learner_bytes"]
    dense = 64.0  # a hidden state, looked up
    assert taken(1e6, dense) == pytest.approx(taken(1.0, dense))
    gpu = dataclasses.replace(hardware, platform="gpu")
    assert taken(1e6, machine=gpu) == pytest.approx(taken(1.0, machine=gpu))


def test_sixteen_bits_are_widened_to_be_moved_on_a_processor_alone(make_workload: Make, hardware: Hardware) -> None:
    w = make_workload(compute_bits=16.0)
    gpu = dataclasses.replace(hardware, platform="gpu")
    processor, accelerator = (seconds(w, kind)["acting_bytes"] for kind in (hardware, gpu))
    processor *= faster_when_large(2_300 + (1 + 1.2) * 64, 64, cores=2)
    assert processor - accelerator == pytest.approx(4 * 4 * 16 * 1.2 * 64 / 5e10, rel=1e-3)


def test_narrowing_costs_what_it_takes_where_it_was_measured(make_workload: Make, hardware: Hardware) -> None:
    """Of the elements of networks, in 16 bits, on a processor; nothing else is dearer."""
    slow = dataclasses.replace(hardware, narrowing_seconds=2e-10)
    wide, w = make_workload(reanalyze_fraction=0.25), make_workload(reanalyze_fraction=0.25, compute_bits=16.0)
    assert seconds(wide, slow) == seconds(wide, hardware)
    gpu = dataclasses.replace(slow, platform="gpu")
    assert seconds(w, gpu) == seconds(w, dataclasses.replace(hardware, platform="gpu"))
    before, after = seconds(w, hardware), seconds(w, slow)
    moved = 2_300 + (1 + 1.2) * 64
    searched = 1_700 + 2_200 + 16 * (2_300 + 2_200)
    written = 3 * (1_700 + 3 * 2_300 + 4 * 2_200) + 4 * (1_700 + 2_200)
    expected = {
        "acting_bytes": 2.0 * searched / faster_when_large(moved, 64, cores=2),
        "learner_bytes": 4 * 0.9 * written / faster_when_large(moved, 256, cores=2),
        "reanalysis_bytes": 0.25 * 4 * 4 * 2.0 * searched / faster_when_large(moved, 256, cores=2),
    }
    for name in STAGES:
        assert after[name] - before[name] == pytest.approx(expected.get(name, 0.0) * 2e-10, rel=1e-3), name


def test_matmul_rate_of_one_core_all_cores_and_16_bits(make_workload: Make, hardware: Hardware) -> None:
    rates = hardware_rates(hardware)
    assert float(matmul_rate(make_workload(cores=1.0), rates)) == pytest.approx(1e11)
    assert float(matmul_rate(make_workload(cores=4.0), rates)) == pytest.approx(4e11)
    assert float(matmul_rate(make_workload(cores=4.0, compute_bits=16.0), rates)) == pytest.approx(3e11)
    assert float(matmul_rate(make_workload(cores=4.0), rates, 0.0)) == pytest.approx(1e11)  # a product that is not shared


def test_cores_share_large_products_alone(make_workload: Make, hardware: Hardware) -> None:
    """Of few rows two cores are no faster than one; of very many they are as much faster as their rates."""
    one, two = (
        {rows: seconds(make_workload(cores=cores, num_envs=rows), hardware)["acting_flops"] for rows in (2.0, 1e7)}
        for cores in (1.0, 2.0)
    )
    assert two[2.0] == pytest.approx(one[2.0], rel=0.01)
    assert two[1e7] == pytest.approx(one[1e7] / 2, rel=0.01)
    assert one[2.0] == one[1e7]


def test_products_hide_behind_what_is_beside_them_on_a_processor_alone(make_workload: Make, hardware: Hardware) -> None:
    gpu = dataclasses.replace(hardware, platform="gpu")
    here, there = (seconds(make_workload(reanalyze_fraction=0.5), kind) for kind in (hardware, gpu))
    for name in ("acting_flops", "learner_flops", "reanalysis_flops"):
        assert here[name] == pytest.approx(0.4 * there[name]), name


def test_resident_bytes_by_hand(make_workload: Make) -> None:
    w = make_workload(capacity=1e6, observation_bytes=400.0)
    ring = 1e6 * (400 + 8 + 20)
    tree = 64 * 17 * (64 * 4 + 48)
    batch = 4 * 256 * ((3 + 3 * 8) * 64 + 7 * 21)
    assert float(resident_bytes(w)) == pytest.approx(ring + tree + batch + 24 * 33_000, rel=1e-6)


def test_resident_bytes_of_threads_by_hand(make_threaded: Make) -> None:
    w = make_threaded(capacity=1e6, observation_bytes=400.0, reanalyze_fraction=0.5)
    ring = 1e6 * (2 * 400 + 8 + 20)
    tree = (2 * 32 + 0.5 * 256 * 4) * 17 * (64 * 4 + 48)
    batch = 4 * 256 * ((3 + 3 * 8) * 64 + 7 * 21)
    ready = 256 * (400 + 4 + 4 * (8 + 22) + 16 * 3)
    queues = (2 + 1 + 3 * 8) * ready + 256 * 4 * 400 + 16 * 256 * (2 + 1)
    parameters = (24 + 4 * (4 + 1 + 1)) * 33_000
    assert float(resident_bytes(w)) == pytest.approx(ring + tree + batch + queues + parameters, rel=1e-6)
    for field in ("batch_queue_size", "search_queue_size", "cpu_actors", "selfplay_workers", "loop_count"):
        small, large = make_threaded(**{field: 1.0}), make_threaded(**{field: 64.0})
        assert float(resident_bytes(large)) > float(resident_bytes(small)), field


def matrix(family: Callable[[int, int], list[Workload]], hardware: Hardware, count: int) -> np.ndarray:
    return np.asarray(stages(stack(family(1, count)), hardware_rates(hardware)))


def test_many_measurements_determine_the_coefficients(family: Callable[[int, int], list[Workload]], hardware: Hardware) -> None:
    rows = matrix(family, hardware, 400)
    true = np.random.default_rng(0).uniform(0.3, 3.0, len(STAGES))
    found = fit_coefficients(rows, rows @ true, ridge=1e-9)
    big = (rows * true / (rows @ true)[:, None]).mean(0) > 0.01
    np.testing.assert_allclose(found[big], true[big], rtol=0.02)
    # The default ridge gives way to as many.
    np.testing.assert_allclose(rows @ fit_coefficients(rows, rows @ true), rows @ true, rtol=0.1)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_measurements_scale_the_prior(family: Callable[[int, int], list[Workload]], hardware: Hardware, count: int) -> None:
    rows = matrix(family, hardware, 60)
    slower = rows @ (PRIOR * 7.0)
    found = fit_coefficients(rows[:count], slower[:count])
    np.testing.assert_allclose(found, PRIOR * 7.0, rtol=1e-3)
    noisy = slower[:count] * np.random.default_rng(count).uniform(0.8, 1.25, count)
    predicted = rows @ fit_coefficients(rows[:count], noisy)
    assert np.all(np.abs(np.log(predicted / slower)) < np.log(2.0))


def test_coefficients_are_never_negative_nor_lost(family: Callable[[int, int], list[Workload]], hardware: Hardware) -> None:
    rows = matrix(family, hardware, 30)
    rng = np.random.default_rng(3)
    found = fit_coefficients(rows, rng.lognormal(-9, 2, 30))
    assert np.all(found >= 0)
    assert np.all(np.isfinite(found))
    assert np.sum(found) > 0
    np.testing.assert_array_equal(fit_coefficients(rows[:0], np.zeros(0)), PRIOR)
