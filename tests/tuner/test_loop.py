"""A whole tuning on a real environment, small: what it measures, keeps, writes, and says."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tuner
from muzerox import Config, UserError
from predictor import Measurement, Outcome, RuntimePredictor, hardware_rates
from tuner import loop
from tuner.bridge import load_config
from tuner.comparison import MIN_GAIN
from tuner.corrections import EVERY, ROLE
from tuner.history import TuneDir
from tuner.live import Progress
from tuner.loop import _Tuning
from tuner.neighbourhood import space_around
from tuner.objective import NO_POINT, Limits, energy
from tuner.proposer import COLDEST, role_of, temperature_of
from tuner.report import median_errors
from tuner.residual import make_residual
from tuner.result import parse_budget
from tuner.task import Task
from tuner.workload import describe

TINY = {
    "replay.min_size": 64,
    "replay.capacity": 8192,
    "runtime.num_envs": 8,
    "runtime.loop_count": 1,
    "train.batch_size": 16,
    "search.num_simulations": 2,
    "network.width": 8,
    "network.depth": 1,
    "train.unroll_steps": 1,
    "train.td_steps": 4,
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuner.TuneResult:
    config = Config.preset("gymnax:CartPole-v1").replace(TINY)
    out = tmp_path_factory.mktemp("tuning") / "t"
    return tuner.tune(config, budget="10m", max_trials=2, out=out, burst=0.05, quiet=True)


def resumed(tuned: tuner.TuneResult, folder: TuneDir, progress: Progress) -> _Tuning:
    """A tuning that goes on from what ``folder`` holds, with time left."""
    space = space_around(tuned.start, "neutral", "cpu")
    task = Task(
        start=tuned.start, space=space, hardware=tuned.hardware, folder=folder, progress=progress, budget=600.0, burst=0.05
    )
    return _Tuning(task, time.monotonic())


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
    errors = median_errors(tuned.history)
    assert set(errors) == {"base, uncalibrated", "base, calibrated", "base and graph network"}
    assert all(value is not None and value >= 0 for value in errors.values())


def test_what_is_tuned_was_not_slower_and_learns_the_same(tuned: tuner.TuneResult) -> None:
    assert tuned.finished
    assert tuned.speedup is not None
    assert tuned.speedup == 1.0 or tuned.speedup >= MIN_GAIN  # the start, or what clearly beat it
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
    tuner.tune(Config.preset("gymnax:CartPole-v1").replace(TINY), budget="10m", max_trials=2, out=copy, quiet=True)
    assert str(copy) in (copy / "report.html").read_text("utf-8")  # where it is now
    again = (copy / "report.html").read_text("utf-8")
    assert again.split("All trials")[1].split("</section>")[0] == text.split("All trials")[1].split("</section>")[0]


def test_a_tuning_that_spent_its_budget_says_so_and_measures_nothing(tuned: tuner.TuneResult, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tuned.out, copy)
    again = tuner.tune(Config.preset("gymnax:CartPole-v1").replace(TINY), budget="10m", max_trials=2, out=copy, quiet=True)
    assert (again.config, again.speedup, len(again.history)) == (tuned.config, tuned.speedup, len(tuned.history))


def test_another_start_in_the_same_folder_is_refused(tuned: tuner.TuneResult) -> None:
    with pytest.raises(UserError, match="another configuration"):
        tuner.tune(Config.preset("gymnax:CartPole-v1"), budget="60s", out=tuned.out, quiet=True)


def test_a_baseline_that_does_not_run_is_said_in_one_line(tmp_path: Path) -> None:
    config = Config.preset("gymnax:CartPole-v1").replace({**TINY, "allocation.memory_gib": 0.3})
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

    fitted = predictor.params, rates, space.base, space.tables()
    found = energy(jnp.asarray(points), *fitted, limits(space.max_num_envs), nothing, corrected)
    for value, trial in zip(np.asarray(found), tuned.history, strict=True):
        seconds = predictor.predict(describe(Config.from_dict(trial.config)), tuned.hardware).seconds_per_env_step
        assert 0.0 <= value - np.log(seconds) < 0.02
    too_many = space.encode({**tuned.history[0].changes, "runtime.num_envs": max(space.options("runtime.num_envs"))})
    bounded = jax.jit(energy)(jnp.asarray([too_many]), *fitted, limits(8), nothing, corrected)
    assert np.isinf(np.asarray(bounded)).all()
    again = energy(jnp.asarray(points), *fitted, limits(1e9), jnp.asarray(points[1:2]), corrected)
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
    cold = next(n for n in range(1, 100) if temperature_of(n) == COLDEST and role_of(n) == "annealed" and n % EVERY)

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


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("4m", 240.0), ("1.5h", 5400.0), (45, 45.0), (" 2M ", 120.0)])
def test_budgets(text: str | float, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 minutes", "-4m", "0", "nan", "inf", "3s", "9d", "1e9h", None])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="budget") as caught:
        parse_budget(text)
    assert "nearest valid" in str(caught.value)
    assert "\n" not in str(caught.value)
