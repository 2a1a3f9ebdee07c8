"""Tunings that are gone on with, from folders as they are left: what is said, what is kept to, what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from trials import EXPECTED, SMALL, remeasured, resumed

import tuner
from predictor import Hardware, Measurement, Outcome, RuntimePredictor
from tuner import ending, loop
from tuner.bridge import Config, UserError, concrete, get, load_config
from tuner.goal import Goal
from tuner.history import Trial, TuneDir
from tuner.measuring.workload import describe
from tuner.neighbourhood import space_around
from tuner.reporting.progress import Progress
from tuner.reporting.tables import print_tuning
from tuner.result import TuneResult


@pytest.fixture
def ended(tiny: Config, machine: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuneDir:
    """A start and another, of whose comparison the start came out; nothing was ever measured."""
    monkeypatch.setattr(loop, "fingerprint", lambda **_: machine)
    monkeypatch.setenv("MUZEROX_HOME", str(tmp_path / "home"))
    start, folder = concrete(tiny, machine.platform), TuneDir(tmp_path / "t")
    space = space_around(start, "neutral", machine.platform)
    folder.create(start)
    for number, role in enumerate(("baseline", "annealed")):
        config = start.replace("runtime.loop_count", 2**number)
        measurement = Measurement(
            hardware=machine,
            workload=describe(config),
            outcome=Outcome.OK,
            seconds_per_env_step=1e-4,
            env_steps_per_second=1e4,
            compile_seconds=4.0,
            warmup_seconds=0.1,
            peak_bytes=5e8,
            repeats=(1e-4,) * 9,
            wall_seconds=10.0,
        )
        trial = Trial(
            number=number,
            role=role,
            changes={knob.path: get(config, knob.path) for knob in space.knobs},
            config=config.to_dict(),
            measurement=measurement,
            elapsed=20.0 * (number + 1),
            **EXPECTED,
        )
        folder.append(trial)
    kept = folder.trials()
    result = TuneResult(
        out=str(folder.path),
        finished=True,
        start=start,
        config=start,
        speedup=1.0,
        start_measurement=kept[0].measurement,
        measurement=kept[0].measurement,
        predicted=RuntimePredictor().predict(describe(start), machine).to_dict(),
        balance=None,
        verdict=None,
        seconds=60.0,
        hardware=machine,
        history=tuple(kept),
    )
    folder.save_result(result.to_dict())
    return folder


def again(folder: TuneDir, tiny: Config, **options: Any) -> TuneResult:
    return tuner.tune(tiny, out=folder.path, **options)


def test_why_no_more_is_measured_is_said(ended: TuneDir, tiny: Config, capsys: pytest.CaptureFixture[str]) -> None:
    def said(**options: Any) -> str:
        assert again(ended, tiny, **options).speedup == 1.0
        (line,) = (line for line in capsys.readouterr().err.splitlines() if "ends as it did before: " in line)
        return line.partition(": ")[2]

    assert said(budget="10m", max_trials=2) == "2 processes are measured; go on with more --trials"
    found = re.fullmatch(r"there is no time for another trial; go on with --budget (\d+)s", said(budget="41s"))
    assert found is not None
    enough = float(found[1])
    assert 41.0 < enough < 200.0
    left = []

    def look(_: object, __: int, trials: int) -> bool:
        left.append(trials)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Tuning, "_round", look)
        assert said(budget=enough) == "nothing that is left to try is expected to gain anything"
        assert "no time" in said(budget=enough - 40.0)
    assert left in ([1], [2]), "what was compiled for the first is not for the second"


def test_what_came_after_the_last_trial_was_spent_too(ended: TuneDir, tiny: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison takes its time: where there is none left, the same command measures nothing more."""
    assert ended.trials()[-1].elapsed == 40.0
    again(ended, tiny, budget="55s")
    said = capsys.readouterr().err
    assert "continuing after 2 trials and 60 s" in said
    assert "there is no time for another trial" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_told_to_end_it_keeps_the_best_so_far(
    number: signal.Signals, ended: TuneDir, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    monkeypatch.setattr(loop._Tuning, "_round", lambda *_: os.kill(os.getpid(), number))
    try:
        stopped = again(ended, tiny, budget="10m", quiet=True)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert (stopped.finished, load_config(ended.tuned_file)) == (False, stopped.config)


def test_what_is_minimised_stays_what_it_was(ended: TuneDir, tiny: Config) -> None:
    """Of a tuning by an earlier version from the first time on that it is gone on with."""
    with pytest.raises(UserError, match="--objective time, not cost"):
        again(ended, tiny, budget="41s", quiet=True, goal=Goal(money=1.0))
    assert not ended.goal_file.exists()
    again(ended, tiny, budget="41s", quiet=True)
    for options, rule in (
        ({"staleness_price": 0.5}, "--staleness-price 0.02, not 0.5"),
        ({"goal": Goal(money=0.3)}, "--objective time, not time=0.7,cost=0.3"),
    ):
        with pytest.raises(UserError) as caught:
            again(ended, tiny, budget="41s", quiet=True, **options)
        assert str(caught.value).endswith(f": holds a tuning with {rule}; give that, or another --out")


def test_prices_stay_what_they_were_where_they_count(tmp_path: Path) -> None:
    folder = TuneDir(tmp_path)
    folder.keep_goal(Goal(money=0.5).terms)
    folder.keep_goal(Goal(money=0.5).terms)
    with pytest.raises(UserError, match=r"holds a tuning with --prices core 0\.04, not 1\.0; give that"):
        folder.keep_goal(Goal(money=0.5, core=1.0).terms)
    with pytest.raises(UserError, match=r"holds a tuning with --objective cost 0\.5, not 0\.50001; give that"):
        folder.keep_goal(Goal(money=0.50001).terms)
    assert Goal(core=1.0).terms == Goal().terms
    folder.goal_file.write_text("[")
    with pytest.raises(UserError, match=r"goal\.json: is no goal; delete it"):
        folder.keep_goal(Goal().terms)


def test_a_tuning_that_spent_its_budget_says_so_and_measures_nothing(tuned: tuner.TuneResult, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tuned.out, copy)
    again = tuner.tune(SMALL, budget="10m", max_trials=2, out=copy, quiet=True)
    assert (again.config, again.speedup, len(again.history)) == (tuned.config, tuned.speedup, len(tuned.history))


def test_another_start_in_the_same_folder_is_refused(tuned: tuner.TuneResult) -> None:
    with pytest.raises(UserError, match="another configuration"):
        tuner.tune(Config.preset("gymnax:CartPole-v1"), budget="60s", out=tuned.out, quiet=True)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [({"effect": "exact"}, "with other --knobs"), ({"goal": Goal(money=1.0)}, "with --objective time, not cost")],
)
def test_other_knobs_or_another_objective_in_the_same_folder_are_refused(
    tuned: tuner.TuneResult, asked: dict[str, Any], rule: str
) -> None:
    config = SMALL
    with pytest.raises(UserError, match=rule) as caught:
        tuner.tune(config, budget="10m", max_trials=2, out=tuned.out, quiet=True, **asked)
    assert str(caught.value).endswith("or another --out")
    assert "\n" not in str(caught.value)


def test_a_trial_that_is_no_choice_any_more_is_told_of(tuned: tuner.TuneResult, tmp_path: Path) -> None:
    """As of a machine with more cores, or of a version with other choices."""
    copy = TuneDir(shutil.copytree(tuned.out, tmp_path / "t"))
    last = tuned.history[-1]
    copy.append(dataclasses.replace(last, number=len(tuned.history), changes={**last.changes, "allocation.cores": 5}))
    with pytest.raises(UserError, match=r"allocation\.cores = 5, which is no choice") as caught:
        tuner.tune(SMALL, budget="10m", out=copy.path, quiet=True)
    assert "\n" not in str(caught.value)


class Interrupted(Progress):
    """Ctrl-C comes when a tuning is gone on with."""

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith("continuing"):
            raise KeyboardInterrupt


def test_interrupted_a_tuning_that_is_gone_on_with_leaves_what_was_compared(
    tuned: tuner.TuneResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = TuneDir(shutil.copytree(tuned.out, tmp_path / "t"))
    # One that looks a thousand times as fast, and was compared with nothing; at the start's level, which is not examined.
    first, moved = tuned.history[0], {"runtime.loop_count": 1 if tuned.config.runtime.loop_count == 2 else 2}
    config = Config.from_dict(first.config).replace(moved).to_dict()
    made = {"number": len(tuned.history), "changes": {**first.changes, **moved}, "config": config}
    faster = dataclasses.replace(first, id="another", role="annealed", **made)
    copy.append(remeasured(faster, seconds_per_env_step=1e-9))
    before = copy.result_file.read_text()
    with Interrupted(600.0, quiet=False) as progress:
        tuning = resumed(tuned, copy, progress)
        assert tuning.ending.best(tuning.trials).id == "another"
        assert tuning.ending.told(tuning.trials) is None, "its last trial was never compared"
        assert tuning.ending.told(tuning.trials[:-1]) is not None
        stopped = tuning.run()
    assert (stopped.finished, stopped.config, len(stopped.history)) == (False, tuned.config, len(tuned.history) + 1)
    assert load_config(copy.tuned_file) == tuned.config
    assert copy.result_file.read_text() == before
    assert "tuned.toml stays what the last comparison chose" in capsys.readouterr().err
    assert print_tuning(stopped, "runs/t", as_json=True) == 130
    said = capsys.readouterr()
    assert json.loads(said.out)["finished"] is False
    assert f"stopped; the best so far is in {stopped.out}/tuned.toml; the same command with --out runs/t" in said.err
    copy.result_file.unlink()
    with Interrupted(600.0, quiet=True) as progress:
        first = resumed(tuned, copy, progress).run()
    assert first.config == load_config(copy.tuned_file) != tuned.config, "where nothing was compared, the best so far"


def test_ctrl_c_while_the_report_is_written_costs_no_comparison(
    tuned: tuner.TuneResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    copy = TuneDir(shutil.copytree(tuned.out, tmp_path / "t"))
    copy.report_file.unlink()
    copy.tuned_file.unlink()  # killed before it was written
    before = copy.result_file.read_text()
    monkeypatch.setattr(ending, "write_report", interrupt)
    with Progress(600.0, quiet=True) as progress, pytest.raises(KeyboardInterrupt):
        resumed(tuned, copy, progress, max_trials=2).run()
    assert load_config(copy.tuned_file) == tuned.config
    assert copy.result_file.read_text() == before
