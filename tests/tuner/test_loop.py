"""A whole tuning on a real environment, small: what it measures, keeps, writes, and says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trials import SMALL, remeasured, resumed

import tuner
from muzerox import Config, UserError
from predictor import Measurement, Outcome, RuntimePredictor, hardware_rates
from tuner import comparison, loop
from tuner.bridge import load_config
from tuner.comparison import MIN_GAIN
from tuner.corrections import EVERY, ROLE
from tuner.goal import Goal
from tuner.history import TuneDir, share, shared_store
from tuner.loop import trial_seconds
from tuner.measuring.fingerprint import fingerprint
from tuner.measuring.workload import describe, host_step_seconds
from tuner.neighbourhood import space_around
from tuner.objective import NO_POINT, RESOURCE_PRICE, Limits, energy
from tuner.proposer import COLDEST, RANDOM_EVERY, SWITCHED_EVERY, SWITCHED_FIRST, VARIED_EVERY, VARIED_FIRST, temperature_of
from tuner.reporting.progress import Progress
from tuner.reporting.tables import closing_rows, median_errors
from tuner.residual import make_residual


def test_a_start_that_is_slow_is_not_what_a_trial_is_expected_to_take(tuned: tuner.TuneResult) -> None:
    walls = [
        dataclasses.replace(tuned.history[0].measurement, compile_seconds=20.0, wall_seconds=wall) for wall in (80.0, 30.0, 32.0)
    ]
    assert trial_seconds(walls[:1]) == 50.0, "as long to compile, and half of the rest"
    assert trial_seconds(walls) == 32.0
    never_ran = dataclasses.replace(walls[0], compile_seconds=None)
    assert trial_seconds([never_ran]) == 40.0


def test_it_measures_the_start_first_and_then_others(tuned: tuner.TuneResult) -> None:
    first, *others = tuned.history
    assert first.role == "baseline"
    assert Config.from_dict(first.config).replace("allocation.cores", None) == tuned.start.replace("allocation.cores", None)
    assert len(others) >= 2
    assert {trial.role for trial in others} >= {"shared", "annealed"}
    points = [tuple(sorted(trial.changes.items())) for trial in tuned.history]
    assert len(set(points)) == len(points)  # nothing is measured twice
    assert [trial.number for trial in tuned.history] == list(range(len(points)))


def test_every_trial_says_what_was_expected_of_it(tuned: tuner.TuneResult) -> None:
    for trial in tuned.history:
        assert trial.measurement.outcome == Outcome.OK, trial.measurement.error
        assert min(trial.predicted_uncalibrated, trial.predicted_base, trial.predicted) > 0
        assert trial.balance is not None
    first, *others = tuned.history
    assert first.expected == pytest.approx(first.predicted, rel=1e-5), "nothing was known beyond the predictor"
    assert any(trial.foreseen != pytest.approx(trial.predicted, rel=1e-3) for trial in others), "what trials say counts"
    errors = median_errors(tuned.history)
    assert set(errors) == {"base, uncalibrated", "base, calibrated", "base and graph network", "base, network and own trials"}
    assert all(value is not None and value >= 0 for value in errors.values())


def test_what_trials_say_of_power_is_not_taken_for_seconds(tuned: tuner.TuneResult, tmp_path: Path) -> None:
    folder = TuneDir(tmp_path / "t")
    folder.create(tuned.start)
    for trial in tuned.history:  # a kilowatt, far more than is expected
        folder.append(remeasured(trial, joules_per_env_step=1e3 * (trial.seconds or 0.0)))
    point = tuned.history[-1].changes
    with Progress(600.0, quiet=True) as progress:
        by_time, by_energy = (resumed(tuned, folder, progress, goal=goal) for goal in (Goal(), Goal(energy=1.0)))
        for tuning in (by_time, by_energy):
            tuning._learn()
        assert by_time._expected(point, 1.0) == pytest.approx(tuned.history[-1].seconds, rel=0.5)
        assert by_energy._expected(point, 1.0) == 1.0


def test_what_is_tuned_was_not_slower_and_learns_the_same(tuned: tuner.TuneResult) -> None:
    assert tuned.finished
    assert tuned.speedup is not None
    # The start, or what clearly beat it, with the cores and the memory of both.
    assert tuned.speedup == 1.0 or tuned.speedup >= MIN_GAIN * np.exp(-RESOURCE_PRICE)
    assert tuned.start_measurement is not None
    assert tuned.measurement is not None
    assert len(tuned.measurement.repeats) == len(tuned.start_measurement.repeats)  # paired: in alternation
    learnt = {"network", "train", "replay", "seed", "env"}
    before, after = tuned.start.to_dict(), tuned.config.to_dict()
    assert {name: before[name] for name in learnt} == {name: after[name] for name in learnt}
    assert after["search"]["num_simulations"] == before["search"]["num_simulations"]


def test_the_tuned_configuration_is_complete_and_the_folder_tells(tuned: tuner.TuneResult) -> None:
    folder = Path(tuned.out)
    assert load_config(folder / "tuned.toml") == tuned.config
    assert tuned.config.env == "gymnax:CartPole-v1"
    assert tuned.config.allocation.cores is not None
    assert tuned.config.allocation.memory_gib is not None
    assert (folder / "tuning.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((folder / "result.json").read_text())
    assert told["speedup"] == tuned.speedup
    if tuned.speedup == 1.0:
        assert told["speedup_interval"] is None
    else:
        low, high = told["speedup_interval"]
        assert low < tuned.speedup < high
    assert Measurement.from_dict(told["measurement"]) == tuned.measurement
    assert TuneDir(folder).trials() == list(tuned.history)


def test_the_report_tells_what_was_measured(tuned: tuner.TuneResult, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tuned.out, copy)
    text = (copy / "report.html").read_text("utf-8")
    for trial in tuned.history:
        assert trial.seconds is not None
        assert f'<data value="{1 / trial.seconds!r}">{1 / trial.seconds:,.0f}</data>' in text
        low, high = trial.predicted_interval
        assert low < trial.predicted < high
    assert (f"{tuned.speedup:.2f}x as fast" if tuned.speedup != 1.0 else "the start stays") in text
    (copy / "report.html").unlink()  # killed before it was written
    tuner.tune(SMALL, budget="10m", max_trials=2, out=copy, quiet=True)
    assert str(copy) in (copy / "report.html").read_text("utf-8")  # where it is now
    again = (copy / "report.html").read_text("utf-8")
    assert again.split("All trials")[1].split("</section>")[0] == text.split("All trials")[1].split("</section>")[0]


def unmetered(measure: Callable[..., list[Measurement]]) -> Callable[..., list[Measurement]]:
    """``measure`` where a counter of energy fails."""
    return lambda *args, **kwargs: [dataclasses.replace(m, joules_per_env_step=None) for m in measure(*args, **kwargs)]


def test_where_the_start_cannot_be_compared_it_stays(
    tuned: tuner.TuneResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = TuneDir(shutil.copytree(tuned.out, tmp_path / "t"))
    large = [remeasured(trial, peak_bytes=0.5 * tuned.hardware.memory_bytes) for trial in tuned.history]
    start, *others = tuned.history
    allocation = {**start.config["allocation"], "memory_gib": 0.3}
    failing = [dataclasses.replace(start, config={**start.config, "allocation": allocation}), *others]
    metered = [remeasured(trial, joules_per_env_step=1e-3) for trial in tuned.history]
    monkeypatch.setattr(comparison, "measure_in_alternation", unmetered(comparison.measure_in_alternation))
    for trials, goal, why in (
        (large, Goal(), "there is no memory for it and another"),
        (failing, Goal(), "it failed in the comparison"),
        (metered, Goal(energy=1.0), "its energy could not be read"),
    ):
        copy.result_file.unlink(missing_ok=True)
        with Progress(600.0, quiet=False) as progress:
            result = resumed(tuned, copy, progress, goal=goal).ending.compare(trials)
        said = capsys.readouterr().err
        assert f"the start stays: {why}" in " ".join(said.split())
        assert (result.finished, result.speedup, result.compared) == (True, 1.0, False)
        assert result.config.runtime == tuned.start.runtime
        assert closing_rows(result)["tuned"] == "the default: nothing was compared with it"
        assert (copy.result() or {})["finished"]


def test_a_start_that_failed_is_measured_anew(tuned: tuner.TuneResult, tmp_path: Path) -> None:
    folder = TuneDir(tmp_path / "t")
    folder.create(tuned.start)
    failed = {"outcome": Outcome.TIMEOUT, "error": "no answer", "seconds_per_env_step": None, "repeats": ()}
    folder.append(remeasured(tuned.history[0], **failed))
    with Progress(600.0, quiet=True) as progress:
        tuning = resumed(tuned, folder, progress)
        assert tuning.trials == []
        tuning._baseline()
    kept = TuneDir(folder.path).trials()
    assert [trial.number for trial in kept] == list(range(len(kept)))
    assert kept[0].measurement.outcome == Outcome.OK


def test_what_the_disk_refuses_is_said_in_one_line(
    tuned: tuner.TuneResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    gone = TuneDir(tmp_path / "gone")
    measurement, said = tuned.history[0].measurement, list[str]()
    monkeypatch.setenv("MUZEROX_HOME", str(tmp_path / "home"))
    store = shared_store("here")
    shutil.rmtree(tmp_path / "home")
    monkeypatch.setenv("MUZEROX_HOME", str(tmp_path / "file"))
    refused: list[tuple[str, Callable[[], object]]] = [
        ("MUZEROX_HOME", lambda: fingerprint(say=said.append)),
        ("MUZEROX_HOME", lambda: shared_store("here")),
        ("MUZEROX_HOME", lambda: host_step_seconds.__wrapped__("gymnasium:CartPole-v1")),
        ("MUZEROX_HOME", lambda: share(measurement, store)),
        ("--out", gone.lock),
        ("--out", lambda: gone.save_tuned(tuned.config)),
        ("--out", lambda: gone.save_result({})),
        ("--out", lambda: gone.save_drifts([])),
        ("--out", lambda: TuneDir(tmp_path / "file").append(tuned.history[0])),
    ]
    for name, write in refused:
        with pytest.raises(UserError, match=f"^{name} = .*: cannot be written: ") as caught:
            write()
        assert "\n" not in str(caught.value)
    assert said == [], "the machine is not measured where that cannot be kept"


def test_a_baseline_that_does_not_run_is_said_in_one_line(tmp_path: Path) -> None:
    config = SMALL.replace("allocation.memory_gib", 0.3)
    with pytest.raises(UserError, match="out_of_memory") as caught:
        tuner.tune(config, budget="30s", out=tmp_path / "t", quiet=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t" / "tuned.toml").exists()


def test_the_energy_is_the_predicted_time_and_a_small_price(tuned: tuner.TuneResult) -> None:
    space = space_around(tuned.start, "neutral", "cpu")
    predictor = RuntimePredictor().fit([trial.measurement for trial in tuned.history])
    rates = hardware_rates(tuned.hardware)
    points = np.stack([space.encode(trial.changes) for trial in tuned.history]).astype(np.int32)
    nothing = jnp.full((1, points.shape[1]), NO_POINT)

    corrected = make_residual(space, (), ())  # by nothing

    def limits(num_envs: float) -> Limits:
        return Limits(*map(jnp.float32, (num_envs, space.max_staleness, 0.001)))

    score = jax.jit(energy)
    fitted = predictor.params, rates, space.base, space.tables()
    found = score(jnp.asarray(points), *fitted, limits(space.max_num_envs), nothing, corrected)
    for value, trial in zip(np.asarray(found), tuned.history, strict=True):
        seconds = predictor.predict(describe(Config.from_dict(trial.config)), tuned.hardware).seconds_per_env_step
        assert 0.0 <= value - np.log(seconds) < 0.02
    too_many = space.encode({**tuned.history[0].changes, "runtime.num_envs": max(space.options("runtime.num_envs"))})
    bounded = score(jnp.asarray([too_many]), *fitted, limits(8), nothing, corrected)
    assert np.isinf(np.asarray(bounded)).all()
    again = score(jnp.asarray(points), *fitted, limits(1e9), jnp.asarray(points[1:2]), corrected)
    np.testing.assert_array_equal(np.isinf(np.asarray(again)), [index == 1 for index in range(len(points))])  # never twice


def test_a_correction_is_a_row_measured_beside_what_it_corrects(tuned: tuner.TuneResult, tmp_path: Path) -> None:
    copy = TuneDir(shutil.copytree(tuned.out, tmp_path / "t"))
    with Progress(600.0, quiet=True) as progress:
        tuning = resumed(tuned, copy, progress)
        config = Config.from_dict(tuned.history[0].config)
        beside = config, tuned.history[0].measurement
        tuning._measure(config, np.array([1.0, 1e9, 0.0]), ROLE, temperature=0.1, beside=beside)
    last = copy.trials()[-1]
    assert len(copy.trials()) == len(tuned.history) + 1  # no other loop counts
    assert last.role == ROLE
    assert last.measurement.outcome == Outcome.OK
    assert last.seconds in [row["seconds_per_env_step"] for row in tuning.store.rows()]


def test_cold_rounds_go_on_while_those_that_are_left_are_expected_to_gain(
    tuned: tuner.TuneResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what two trials taught there is much to be expected; what counts as nothing is moved instead."""
    others = ((EVERY, 0), (RANDOM_EVERY, 0), (VARIED_EVERY, VARIED_FIRST), (SWITCHED_EVERY, SWITCHED_FIRST))
    annealed = (n for n in range(1, 100) if all((n - first) % every for every, first in others))
    cold = next(n for n in annealed if temperature_of(n) == COLDEST)

    def trials_of_a_round(name: str, left: int, nothing: float) -> int:
        copy = TuneDir(shutil.copytree(tuned.out, tmp_path / name))
        with Progress(600.0, quiet=False) as progress:
            tuning = resumed(tuned, copy, progress)
            tuning._learn()
            point = tuning.proposer.propose(cold)
            assert point is not None
            monkeypatch.setattr(loop, "NOTHING", nothing * tuning.proposer.expected_gain(point))
            tuning.proposer._chains = None
            went_on = tuning._round(cold, left)
        trials = len(copy.trials()) - len(tuned.history)
        assert went_on == (trials > 0)
        assert ("no further trial is expected to gain anything" in capsys.readouterr().err) != went_on
        return trials

    assert trials_of_a_round("one alone", 1, 1.5) == 0
    assert trials_of_a_round("two together", 2, 1.5) > 0
    assert trials_of_a_round("few are looked ahead", 1000, loop.AHEAD + 1.0) == 0
