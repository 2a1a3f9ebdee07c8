"""Folders of tunings that were damaged, edited or half lost: one line that names the file."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from trials import EXPECTED

from muzerox import UserError
from predictor import Hardware, Measurement, Outcome, RuntimePredictor, Store, Workload
from tuner.bridge import Config
from tuner.history import Trial, TuneDir
from tuner.measuring.fingerprint import fingerprint
from tuner.result import TuneResult


@pytest.fixture
def trials(tiny: Config, machine: Hardware, workload: Workload) -> list[Trial]:
    """A start, what shared its process, and another."""
    measurement = Measurement(
        hardware=machine, workload=workload, outcome=Outcome.OK, seconds_per_env_step=1e-4, repeats=(1e-4, 1e-4), wall_seconds=9.0
    )
    return [
        Trial(
            number=number,
            role=role,
            changes={"runtime.num_envs": 8 * 2**number},
            config=tiny.to_dict(),
            measurement=measurement,
            elapsed=10.0 * (number + 1),
            **EXPECTED,
        )
        for number, role in enumerate(("baseline", "shared", "annealed"))
    ]


def refusal(act: Any) -> str:
    """The one line that refuses it."""
    with pytest.raises(UserError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def folder_of(rows: list[dict[str, Any]], path: Path) -> TuneDir:
    store = Store(path / "trials")
    for row in rows:
        store.append(row)
    return TuneDir(path)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"number": "x"}, "Trial.number = 'x': must be a whole number"),
        ({"number": True}, "Trial.number = True"),
        ({"changes": None}, "Trial.changes = None: must be an object"),
        ({"predicted": 0}, "Trial.predicted = 0: must be a number above 0"),
        ({"predicted_use": 3}, "Trial.predicted_use = 3: must be a list of numbers"),
        ({"balance": "much"}, "Trial.balance = 'much': must be a number, or null"),
        ({"measurement": []}, "Trial.measurement = []: must be an object"),
        ({"config": {"env": "foo", "seed": -1}}, "seed = -1"),
        ({"another": 1}, "another missing or unknown"),
    ],
    ids=str,
)
def test_a_damaged_trial_is_told_of(changes: dict[str, Any], rule: str, trials: list[Trial], tmp_path: Path) -> None:
    folder = folder_of([trials[0].to_dict(), {**trials[1].to_dict(), **changes}], tmp_path)
    said = refusal(folder.trials)
    assert said.startswith(f"{tmp_path}/trials: ")
    assert rule in said


def test_a_trial_whose_measured_seconds_are_none_at_all_is_told_of(trials: list[Trial], tmp_path: Path) -> None:
    row = trials[0].to_dict()
    row["measurement"]["seconds_per_env_step"] = 0.0
    assert "seconds_per_env_step = 0.0: must be a number above 0" in refusal(folder_of([row], tmp_path).trials)


@pytest.mark.parametrize(
    ("left", "rule"),
    [([1], "trial 0 of 2 is missing"), ([0, 2], "trial 1 of 3 is missing"), ([1, 2], "trial 0 of 3 is missing")],
)
def test_a_lost_trial_is_told_of(left: list[int], rule: str, trials: list[Trial], tmp_path: Path) -> None:
    said = refusal(folder_of([trials[number].to_dict() for number in left], tmp_path).trials)
    assert said == f"{tmp_path}/trials: {rule}; give another --out"


def test_no_other_trial_takes_the_place_of_the_start(trials: list[Trial], tmp_path: Path) -> None:
    said = refusal(folder_of([{**trials[2].to_dict(), "number": 0}], tmp_path).trials)
    assert said == f"{tmp_path}/trials: trial 0 is annealed, and must be baseline; give another --out"


def test_a_trial_of_another_environment_is_told_of(trials: list[Trial], tiny: Config, tmp_path: Path) -> None:
    folder, choices = TuneDir(tmp_path / "t"), {"runtime.num_envs": (8, 16, 32)}
    folder.create(tiny)
    for trial in trials:
        folder.append(trial)
    folder.check_same(choices, "time")
    folder.append(dataclasses.replace(trials[2], config={**trials[2].config, "env": "foo"}))
    said = refusal(lambda: folder.check_same(choices, "time"))
    assert said == f"{folder.path}/trials: trial 2 is of foo, not gymnax:CartPole-v1; give another --out"


@pytest.fixture
def told(trials: list[Trial], tiny: Config, machine: Hardware) -> dict[str, Any]:
    """What ``result.json`` holds."""
    predicted = RuntimePredictor().predict(trials[0].measurement.workload, machine).to_dict()
    measured = {"start_measurement": trials[0].measurement, "measurement": trials[2].measurement, "history": tuple(trials)}
    given = {"out": "t", "finished": True, "start": tiny, "config": tiny, "seconds": 60.0, "hardware": machine}
    found = {"speedup": 1.5, "gain": 1.5, "predicted": predicted, "balance": 0.9, "verdict": "balanced"}
    return json.loads(json.dumps(TuneResult(**given, **measured, **found).to_dict()))


def read(tree: dict[str, Any], trials: list[Trial], tiny: Config, machine: Hardware) -> TuneResult:
    return TuneResult.from_dict(tree, start=tiny, hardware=machine, history=trials, source="t/result.json")


def test_a_result_is_read_as_it_was_written(told: dict[str, Any], trials: list[Trial], tiny: Config, machine: Hardware) -> None:
    assert json.loads(json.dumps(read(told, trials, tiny, machine).to_dict())) == told


@pytest.mark.parametrize(
    "changes",
    [
        {"config": "x"},
        {"config": {"env": 3}},
        {"measurement": "foo"},
        {"measurement": None},
        {"predicted": {}},
        {"predicted": {"env_steps_per_second": "1", "seconds_per_env_step": 1.0}},
        {"speedup": "foo"},
        {"speedup": None},
        {"gain": []},
        {"seconds": None},
        {"balance_factor": "well"},
        {"drifts": ["O1"]},
        {"drifts": {"O1": 3}},
    ],
    ids=str,
)
def test_a_damaged_result_is_told_of(
    changes: dict[str, Any], told: dict[str, Any], trials: list[Trial], tiny: Config, machine: Hardware
) -> None:
    said = refusal(lambda: read({**told, **changes}, trials, tiny, machine))
    assert said.startswith("t/result.json: is not a result (")
    assert said.endswith("delete it to compare again")


@pytest.mark.parametrize("text", ["{", "[]", "3", "null"])
def test_a_result_must_be_an_object(text: str, tmp_path: Path) -> None:
    folder = TuneDir(tmp_path)
    folder.result_file.write_text(text)
    assert refusal(folder.result) == f"{tmp_path}/result.json: is not a result; delete it to compare again"


def test_a_folder_in_the_place_of_a_file_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, home = TuneDir(tmp_path), tmp_path / "home"
    monkeypatch.setattr("tuner.measuring.fingerprint._cheap_key", lambda: "key")
    monkeypatch.setenv("MUZEROX_HOME", str(home))
    for file, reads in (
        (folder.result_file, folder.result),
        (folder.drift_file, folder.drifts),
        (home / "hardware" / "key.json", fingerprint),
    ):
        file.mkdir(parents=True)
        assert refusal(reads) == f"{file}: cannot be read: Is a directory"


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert refusal(TuneDir(tmp_path).lock) == f"--out = '{tmp_path}': cannot be locked: No locks available"


def test_a_file_in_the_place_of_trials_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("")
    assert refusal(TuneDir(tmp_path).trials) == f"{tmp_path}/trials: File exists"
