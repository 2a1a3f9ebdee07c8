"""The residual earns its place or is not heard; intervals; refits do not compile; offsets; what is predicted; saving."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from predictor import (
    STAGES,
    ArtifactError,
    Hardware,
    Measurement,
    Outcome,
    RuntimePredictor,
    Workload,
    base_log_seconds,
    hardware_rates,
    log_seconds,
    stack,
    stages,
)
from predictor import fit as fitting
from predictor.calibrate import recent_median, weighted_median

Family = Callable[[int, int], list[Workload]]
Measure = Callable[..., Measurement]
NOISE = 0.05

score, base_score, all_stages = jax.jit(log_seconds), jax.jit(base_log_seconds), jax.jit(stages)


def true_seconds(workloads: list[Workload], hardware: Hardware, *, interacts: bool) -> np.ndarray:
    """What the base can say exactly, times, where ``interacts``, what no sum of stages can: small rows with many of them."""
    base = np.asarray(all_stages(stack(workloads), hardware_rates(hardware))).sum(-1).astype(np.float64) * 3.0
    if not interacts:
        return base
    factor = [3.0 if w.num_envs < 64 and w.batch_size > 64 else 1.0 if w.puct else 0.6 for w in workloads]
    return base * np.array(factor)


def measured(workloads: list[Workload], seconds: np.ndarray, measure: Measure, seed: int) -> list[Measurement]:
    noisy = seconds * np.exp(NOISE * np.random.default_rng(seed).normal(size=len(seconds)))
    return [measure(w, float(s)) for w, s in zip(workloads, noisy, strict=True)]


def held_out_errors(model: RuntimePredictor, workloads: list[Workload], seconds: np.ndarray, hardware: Hardware) -> tuple:
    """Mean absolute log errors of base alone and of base with residual."""
    batch = stack(workloads)
    outputs = model.base_log_seconds(batch, hardware), model.log_seconds(batch, hardware)
    return tuple(float(np.mean(np.abs(np.asarray(x) - np.log(seconds)))) for x in outputs)


@pytest.fixture(scope="module")
def fitted(family: Family, hardware: Hardware, measure: Measure) -> RuntimePredictor:
    workloads = family(10, 96)
    return RuntimePredictor().fit(measured(workloads, true_seconds(workloads, hardware, interacts=True), measure, 0))


def test_the_residual_learns_what_the_base_cannot_say(fitted: RuntimePredictor, family: Family, hardware: Hardware) -> None:
    test = family(11, 70)
    base, whole = held_out_errors(fitted, test, true_seconds(test, hardware, interacts=True), hardware)
    assert fitted.report is not None
    assert fitted.report.measurements == 96
    assert 0.0 < fitted.report.shrinkage <= 1.0
    assert fitted.report.residual_log_error < fitted.report.base_log_error
    assert whole < 0.75 * base


@pytest.mark.parametrize("count", [8, 24, 48])
def test_the_residual_does_no_harm_where_the_base_is_right(
    family: Family, hardware: Hardware, measure: Measure, count: int
) -> None:
    workloads, test = family(12, count), family(13, 70)
    seconds = true_seconds(workloads, hardware, interacts=False)
    model = RuntimePredictor().fit(measured(workloads, seconds, measure, 1))
    base, whole = held_out_errors(model, test, true_seconds(test, hardware, interacts=False), hardware)
    assert base < 0.1
    assert whole < base + 0.02


def test_intervals_hold_what_is_measured(fitted: RuntimePredictor, family: Family, hardware: Hardware) -> None:
    test = family(21, 100)
    seconds = true_seconds(test, hardware, interacts=True) * np.exp(NOISE * np.random.default_rng(3).normal(size=100))
    intervals = [fitted.predict(w, hardware).interval for w in test]
    held = np.mean([low <= s <= high for (low, high), s in zip(intervals, seconds, strict=True)])
    assert 0.8 <= held <= 0.99
    narrow = np.median([high / low for low, high in intervals])
    before = np.median([high / low for low, high in (RuntimePredictor().predict(w, hardware).interval for w in test)])
    assert narrow < 0.5 * before


def test_it_scores_the_same_within_another_program(fitted: RuntimePredictor, family: Family, hardware: Hardware) -> None:
    assert fitted.params.shrinkage > 0, "the network is heard"
    batch = stack(family(16, 70))
    traced = jax.jit(lambda workload: fitted.log_seconds(workload, hardware))(batch)
    np.testing.assert_allclose(fitted.log_seconds(batch, hardware), traced, rtol=0, atol=2e-5)
    np.testing.assert_allclose(traced, score(fitted.params, batch, hardware_rates(hardware)), rtol=0, atol=2e-5)


def test_more_measurements_do_not_compile_again(fitted: RuntimePredictor, family: Family, measure: Measure) -> None:
    scores = jax.jit(log_seconds)
    batch = stack(family(14, 70))
    assert fitted.params.shrinkage > 0
    hardware = measure(family(14, 1)[0], 1.0).hardware
    scores(fitted.params, batch, hardware_rates(hardware))
    programs = fitting.linearise, fitting.train_network, fitting._stages, scores
    before = [program._cache_size() for program in programs]
    workloads = family(15, 90)
    refitted = RuntimePredictor().fit(measured(workloads, np.full(90, 1e-4), measure, 2))
    scores(refitted.params, batch, hardware_rates(dataclasses.replace(hardware, operation_seconds=1e-6)))
    assert [program._cache_size() for program in programs] == before


def test_scores_do_not_depend_on_company(fitted: RuntimePredictor, family: Family, hardware: Hardware) -> None:
    workloads = family(16, 70)  # more than a chunk, and no multiple of one
    rates = hardware_rates(hardware)
    together = np.asarray(score(fitted.params, stack(workloads), rates))
    assert together.shape == (70,)
    alone = [float(score(fitted.params, workloads[i], rates)) for i in (0, 63, 69)]
    np.testing.assert_allclose(together[[0, 63, 69]], alone, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(fitted.predict(workloads[69], hardware).seconds_per_env_step, np.exp(alone[-1]), rtol=1e-3)


def test_nothing_measured_is_the_prior(family: Family, hardware: Hardware, measure: Measure) -> None:
    model = RuntimePredictor()
    batch = stack(family(17, 70))
    np.testing.assert_array_equal(model.log_seconds(batch, hardware), model.base_log_seconds(batch, hardware))
    assert model.calibrate([]) is model
    failed = measure(family(17, 1)[0], None, outcome=Outcome.CRASHED, error="died")
    refit = model.fit([failed])
    np.testing.assert_array_equal(refit.log_seconds(batch, hardware), model.log_seconds(batch, hardware))
    assert refit.report is None
    single = model.fit([measure(family(17, 1)[0], 1e-4)])
    assert single.report is not None
    assert math.isnan(single.report.base_mape)


def test_runs_of_one_program_are_left_out_together(make_workload: Callable[..., Workload]) -> None:
    """They share what the base gets wrong: one would tell the other's seconds, on another machine, too."""
    a, b, c = make_workload(), make_workload(loop_count=8.0), make_workload(num_envs=128.0)
    timed = dataclasses.replace(a, host_step_seconds=1e-5)
    programs = [fitting.program(w) for w in (a, b, c, timed)]
    # Counted by another version.
    programs.append(fitting.program(dataclasses.replace(a, dynamics_elements=a.dynamics_elements + 3.0)))
    # Under another allocation of memory.
    programs.append(fitting.program(dataclasses.replace(a, memory_bytes=2.0**30, device_share=0.3)))
    assert programs[0] == programs[1] == programs[3] == programs[4] == programs[5] != programs[2]


def test_what_several_machines_teach_is_about_none_of_them(family: Family, hardware: Hardware, measure: Measure) -> None:
    """Another is half-way between one that is faster than its rates say and one that is slower, and may be as far off."""
    workloads = family(0, 12)
    plain = RuntimePredictor()
    expected = [float(np.exp(plain.log_seconds(w, hardware))) for w in workloads]
    slow, fast = (dataclasses.replace(hardware, cpu=name) for name in ("slow", "fast"))
    rows = [measure(w, 1.5 * s, hardware=slow) for w, s in zip(workloads, expected, strict=True)]
    rows += [measure(w, s / 1.5, hardware=fast) for w, s in zip(workloads, expected, strict=True)]
    both, one = plain.fit(rows, train=False), plain.fit(rows[:12], train=False)
    assert (both.about, both.machines) == (None, (slow.id, fast.id))
    assert one.about == slow.id

    def off(model: RuntimePredictor) -> float:
        return float(np.mean([float(model.log_seconds(w, hardware)) for w in workloads]) - np.mean(np.log(expected)))

    assert abs(off(both)) < 0.1
    assert off(one) > 0.3

    def width(model: RuntimePredictor) -> float:
        return float(np.mean([float(np.subtract(*model.log_interval(w, hardware)[::-1])) for w in workloads]))

    assert width(both) > width(one)


def test_what_two_machines_share_by_chance_is_not_taken_for_skill(family: Family, hardware: Hardware, measure: Measure) -> None:
    """Costs that nothing explains, the same for a program on both: a network that saw it on one would know it on the other."""
    workloads = family(25, 40)
    chance = np.exp(0.5 * np.random.default_rng(3).normal(size=len(workloads)))
    seconds = true_seconds(workloads, hardware, interacts=False) * chance
    machines = [dataclasses.replace(hardware, cpu=name) for name in ("one", "another")]
    runs = [measure(w, s, hardware=machine) for machine in machines for w, s in zip(workloads, seconds, strict=True)]
    report = RuntimePredictor().fit(runs).report
    assert report is not None
    assert report.shrinkage == 0.0


def test_what_was_learnt_elsewhere_is_kept_where_little_is_measured(family: Family, hardware: Hardware, measure: Measure) -> None:
    """Every stage is three times off on one machine; another, twice as slow as that, says so with two runs."""
    factors = np.where(np.arange(len(STAGES)) % 2 == 0, 3.0, 1.0 / 3.0)
    elsewhere = dataclasses.replace(hardware, cpu="another")

    def seconds(workloads: list[Workload]) -> np.ndarray:
        return np.asarray(all_stages(stack(workloads), hardware_rates(hardware))).astype(np.float64) @ factors

    many, few, test = family(22, 80), family(23, 2), family(24, 70)
    taught = RuntimePredictor().fit([measure(w, s, hardware=elsewhere) for w, s in zip(many, seconds(many), strict=True)])
    runs = [measure(w, 2.0 * s) for w, s in zip(few, seconds(few), strict=True)]
    errors = [held_out_errors(model.fit(runs), test, 2.0 * seconds(test), hardware)[1] for model in (RuntimePredictor(), taught)]
    assert errors[1] < 0.1
    assert errors[1] < 0.5 * errors[0]


def test_luck_is_not_skill() -> None:
    rng = np.random.default_rng(0)
    error, noise, apart = rng.normal(size=16), rng.normal(size=16), range(16)
    assert fitting.choose_shrinkage(error, np.zeros(16), error, apart) == 0.0
    assert fitting.choose_shrinkage(error, -error, error, apart) == 0.0
    assert fitting.choose_shrinkage(error, error, error, apart) == pytest.approx(1.0)
    assert fitting.choose_shrinkage(error, 2.0 * error, error, apart) == pytest.approx(0.5)
    assert fitting.choose_shrinkage(error, 0.1 * noise, error, apart) == 0.0


def test_luck_that_is_repeated_is_no_more_than_that() -> None:
    """Right three times of four, by a number that says nothing: as much as that is luck, however often it is measured."""
    error, said, groups = np.array([1.0, 1.0, -1.0, 1.0]), np.ones(4), np.arange(4)
    assert fitting.choose_shrinkage(error, said, error, groups) == 0.0
    often = [np.repeat(x, 30) for x in (error, said, error)]
    assert fitting.choose_shrinkage(*often, range(120)) == pytest.approx(0.5)  # were they 120 programs
    assert fitting.choose_shrinkage(*often, np.repeat(groups, 30)) == 0.0


def test_medians_weigh_the_newest_most() -> None:
    assert weighted_median(np.array([3.0, 1.0, 2.0]), np.ones(3)) == 2.0
    assert weighted_median(np.array([1.0, 2.0]), np.ones(2)) == 1.5
    assert weighted_median(np.array([5.0, 1.0, 1.0]), np.array([3.0, 1.0, 1.0])) == 5.0
    assert recent_median([], 7.0) == 7.0
    assert recent_median([1.0] * 10 + [2.0] * 6, 0.0) == 2.0
    assert recent_median([2.0] * 6 + [1.0] * 10, 0.0) == 1.0


def test_calibration_follows_the_newest_baselines(family: Family, hardware: Hardware, measure: Measure) -> None:
    model = RuntimePredictor()
    workloads = family(19, 6)
    predictions = [model.predict(w, hardware) for w in workloads]
    elsewhere = dataclasses.replace(hardware, cpu="another")
    runs = [measure(w, 9.0, hardware=elsewhere) for w in workloads] + [
        measure(
            w,
            p.seconds_per_env_step * 1.7,
            compile_seconds=p.compile_seconds * 2.0,
            warmup_seconds=p.warmup_seconds * 3.0,
            peak_bytes=p.peak_bytes + 1e9,
            cpu_use=p.cpu_use * 0.8,
        )
        for w, p in zip(workloads, predictions, strict=True)
    ]
    calibrated = model.calibrate(runs)
    for w, before in zip(workloads, predictions, strict=True):
        after = calibrated.predict(w, hardware)
        assert after.seconds_per_env_step == pytest.approx(before.seconds_per_env_step * 1.7, rel=0.02)
        assert after.env_steps_per_second == pytest.approx(1.0 / after.seconds_per_env_step)
        assert after.updates_per_second == pytest.approx(after.env_steps_per_second * w.replay_ratio / w.batch_size)
        assert after.compile_seconds == pytest.approx(before.compile_seconds * 2.0, rel=1e-4)
        assert after.warmup_seconds == pytest.approx(before.warmup_seconds * 3.0, rel=1e-4)
        assert after.peak_bytes == pytest.approx(before.peak_bytes + 1e9, rel=1e-5)
        assert after.cpu_use == pytest.approx(before.cpu_use * 0.8, rel=1e-4)
    np.testing.assert_array_equal(calibrated.params.coefficients, model.params.coefficients)


@pytest.mark.parametrize("by", ["fit", "calibrate"])
def test_one_measurement_says_the_less_of_a_machine_the_more_is_known_of_machines(
    family: Family, hardware: Hardware, measure: Measure, by: str
) -> None:
    """It may be as far off as any single prediction. Whoever knows of no machine has nothing else to go by."""
    workloads = family(19, 12)
    untaught = RuntimePredictor()
    one = workloads[0]

    def moved(model: RuntimePredictor, machine: Hardware) -> float:
        """How much of a difference of two on one measurement is believed: 0 to 1."""
        before = model.predict(one, machine).seconds_per_env_step
        after = getattr(model, by)([measure(one, 2.0 * before, hardware=machine)]).predict(one, machine)
        return math.log(after.seconds_per_env_step / before) / math.log(2.0)

    seconds = [untaught.predict(w, hardware).seconds_per_env_step for w in workloads]
    off = np.exp(0.25 * np.random.default_rng(2).normal(size=len(workloads)))  # what single predictions are off by
    taught = untaught.fit([measure(w, s) for w, s in zip(workloads, seconds * off, strict=True)])
    another = dataclasses.replace(hardware, cpu="another")
    assert 0.2 < moved(taught, hardware) < moved(taught, another) < moved(untaught, another) - 0.1
    assert 0.9 < moved(untaught, another) <= 1.0
    assert moved(taught, dataclasses.replace(another, platform="gpu")) > moved(taught, another) + 0.1  # nobody knows of one


def test_what_does_not_fit_is_foretold(make_workload: Callable[..., Workload], hardware: Hardware, measure: Measure) -> None:
    model = RuntimePredictor()
    small, large = make_workload(), make_workload(capacity=1e9)
    assert model.predict(small, hardware).outcome is Outcome.OK
    assert model.predict(large, hardware).outcome is Outcome.OUT_OF_MEMORY
    roomy = dataclasses.replace(hardware, memory_bytes=2**40)
    assert model.predict(large, roomy).outcome is Outcome.OK
    # Less than the machine has, and yet it failed: so will anything as large.
    medium, near = make_workload(capacity=1e8), make_workload(capacity=8e7)
    assert model.predict(medium, hardware).outcome is Outcome.OK
    failure = measure(medium, None, outcome=Outcome.OUT_OF_MEMORY, error="killed")
    taught = model.fit([measure(small, 1e-4), failure])
    assert taught.predict(medium, hardware).outcome is Outcome.OUT_OF_MEMORY
    assert taught.predict(near, hardware).outcome is Outcome.OK
    # Under an allocation less is there, and failing under one says nothing of those without.
    assert model.predict(make_workload(memory_bytes=2.0**29), hardware).outcome is Outcome.OUT_OF_MEMORY
    held = measure(make_workload(memory_bytes=2.0**29), None, outcome=Outcome.OUT_OF_MEMORY, error="killed")
    assert model.fit([measure(small, 1e-4), held]).predict(medium, hardware).outcome is Outcome.OK
    gpu = dataclasses.replace(hardware, platform="gpu", device_memory_bytes=10**9)
    assert model.predict(small, gpu).outcome is Outcome.OK
    assert model.predict(medium, gpu).outcome is Outcome.OUT_OF_MEMORY


def test_saved_and_loaded_bit_for_bit(fitted: RuntimePredictor, tmp_path: Path) -> None:
    fitted.save(tmp_path / "model")
    loaded = RuntimePredictor.load(tmp_path / "model")
    assert loaded.report == fitted.report
    pairs = zip(jax.tree.leaves(loaded.params), jax.tree.leaves(fitted.params), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    assert jax.tree.structure(loaded.params) == jax.tree.structure(fitted.params)
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["arrays.npz", "meta.json"]


def test_a_damaged_predictor_is_one_line(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(ArtifactError) as error:
            RuntimePredictor.load(tmp_path / "model")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "No such file" in message()
    RuntimePredictor().save(tmp_path / "model")
    meta = tmp_path / "model" / "meta.json"
    text = meta.read_text()
    meta.write_text("{")
    assert "not a saved predictor" in message()
    meta.write_text(json.dumps({**json.loads(text), "schema": "another"}))
    assert "another version" in message()
    for damaged in (
        "[]",
        json.dumps({**json.loads(text), "machines": None}),
        json.dumps({**json.loads(text), "report": {"x": 1}}),
    ):
        meta.write_text(damaged)
        assert "model" in message()
    meta.write_text(text)
    arrays = tmp_path / "model" / "arrays.npz"
    whole = arrays.read_bytes()
    arrays.write_bytes(whole[: len(whole) // 2])
    assert "not a saved predictor" in message()
    np.savez(arrays, other=np.zeros(3))
    assert "missing or of another shape" in message()
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="file"):
        RuntimePredictor().save(tmp_path / "file")


def test_the_base_is_part_of_the_whole(fitted: RuntimePredictor, family: Family, hardware: Hardware) -> None:
    batch, rates = stack(family(20, 70)), hardware_rates(hardware)
    off = fitted.params._replace(shrinkage=np.float32(0.0))
    np.testing.assert_array_equal(score(off, batch, rates), base_score(fitted.params, batch, rates))
    assert off.heard().network == {}
    np.testing.assert_array_equal(score(off.heard(), batch, rates), score(off, batch, rates))
    assert fitted.params.heard() is fitted.params
    assert fitted.params.compiler_options
    assert not off.heard().compiler_options
    capped = fitted.params._replace(limit=np.float32(0.01))
    difference = np.asarray(score(capped, batch, rates) - base_score(fitted.params, batch, rates))
    assert np.all(np.abs(difference) <= 0.01 + 1e-5)
    assert np.any(difference != 0.0)


def test_who_was_lent_cores_does_not_say_how_long_compiling_takes(
    make_workload: Callable[..., Workload], hardware: Hardware, measure: Measure
) -> None:
    model, workload = RuntimePredictor(), make_workload()
    before = model.predict(workload, hardware)
    figures = {"compile_seconds": before.compile_seconds / 10.0, "peak_bytes": before.peak_bytes / 2.0}
    after = model.calibrate([measure(workload, before.seconds_per_env_step, compile_cores=2, **figures)]).predict(
        workload, hardware
    )
    assert after.compile_seconds == before.compile_seconds
    assert after.peak_bytes < before.peak_bytes * 0.9  # which is as it was


def test_runs_from_the_cache_do_not_say_what_compiling_costs(
    make_workload: Callable[..., Workload], hardware: Hardware, measure: Measure
) -> None:
    model, workload = RuntimePredictor(), make_workload()
    before = model.predict(workload, hardware)
    figures = {"compile_seconds": before.compile_seconds / 10.0, "peak_bytes": before.peak_bytes / 2.0}
    seconds = before.seconds_per_env_step * 2.0
    first = model.calibrate([measure(workload, seconds, **figures)]).predict(workload, hardware)
    assert first.compile_seconds == pytest.approx(before.compile_seconds / 10.0)
    assert first.peak_bytes < before.peak_bytes * 0.9
    again = model.calibrate([measure(workload, seconds, from_cache=True, **figures)]).predict(workload, hardware)
    assert (again.compile_seconds, again.peak_bytes) == (before.compile_seconds, before.peak_bytes)
    assert again.seconds_per_env_step == pytest.approx(seconds, rel=0.05)
