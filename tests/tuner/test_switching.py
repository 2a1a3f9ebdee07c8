"""Switches of a training that runs: what is asked of it, signals at awkward moments, ways back that fail."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from predictor import Hardware, Measurement, Outcome, RuntimePredictor
from tuner.bridge import Config, ConfigError, RunDir, concrete, get, toml
from tuner.following import retune, switches
from tuner.following.phases import Level, Reason, Report
from tuner.following.process import Child, Training
from tuner.following.retune import _Phases
from tuner.following.switches import Switch
from tuner.goal import Goal
from tuner.measuring.fingerprint import fingerprint
from tuner.proposer import Proposer

ENDLESS = {"train.max_env_steps": 1_000_000_000, "train.eval_period": 1_000_000_000, "train.target_return": None}
FLAT = Level(1e-3, 1e-3, (math.nan,) * 3, 10.0, 1.0, 2)  # costs of a stretch of training, of searches of 2 simulations
FOLLOW = """
import sys
from tuner.bridge import RunDir, load_config
from tuner.measuring.fingerprint import fingerprint
from tuner.following.retune import train_in_phases
start, run = sys.argv[1], RunDir(sys.argv[2])
sys.exit(train_in_phases(load_config(start), run, ["--config", start, "--out", str(run.path)], fingerprint()).code)
"""


def report(**changes: Any) -> Report:
    values = {"seconds": 1.0, "env_steps": 10_000, "progress": 0.01, "seconds_per_env_step": 1e-3, "clocks": (math.nan,) * 3}
    values |= {"episodes": 9, "mean_return": 1.0, "mean_length": 10.0, "fill": 1.0, "simulations": 2, "cores_busy": 0.5}
    return Report(**{**values, **changes})


def following(config: Config, run: RunDir, machine: Hardware, most_gib: float | None = None) -> _Phases:
    """Of a training that is said to have reported once."""
    found = _Phases(concrete(config, "cpu"), run, machine, Goal(max_memory_gib=most_gib), as_json=False, quiet=True)
    found.training.last, found.training.cost = report(), 1.0
    return found


@pytest.mark.parametrize(("kind", "threads", "asked"), [("sebulba", 2, [2]), ("sebulba", 4, []), ("anakin", 2, [1])])
def test_cores_are_released_down_to_the_threads_of_a_role(
    kind: str, threads: int, asked: list[int], tmp_path: Path, tiny: Config, machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a core is busy of four."""
    settings = {"runtime.kind": kind, "allocation.cores": 4, "runtime.role_threads": threads}
    follower = following(tiny.replace({**ENDLESS, **settings}), RunDir(tmp_path), machine)
    found = []
    monkeypatch.setattr(follower, "_try", lambda changes, *_: found.append(changes["allocation.cores"]))
    follower._release(Reason("return", "the return has become flat", FLAT, FLAT))
    assert found == asked


def test_what_makes_no_configuration_is_not_asked_of_a_training(tmp_path: Path, tiny_threads: Config, machine: Hardware) -> None:
    config = tiny_threads.replace({**ENDLESS, "runtime.role_threads": 2, "allocation.cores": 2})
    follower = following(config, RunDir(tmp_path), machine)
    one = {"allocation.cores": 1}
    with pytest.raises(ConfigError, match="role_threads"):
        follower.training.change(one)
    tried = follower._try(one, Reason("return", "flat", FLAT, FLAT), 1.0, 1e-3)
    assert tried == ("failed", None), "and the training goes on"
    assert list(tmp_path.iterdir()) == [], "neither live.json nor a row of a switch"


@pytest.mark.parametrize("applied", [True, False])
def test_what_nobody_lived_to_judge_is_undone(applied: bool, tmp_path: Path, tiny: Config, machine: Hardware) -> None:
    """Whoever tried a candidate was killed, before or after its configuration was written."""
    run = RunDir(tmp_path / "run")
    before, after = {"runtime.loop_count": 4}, {"runtime.loop_count": 16}
    run.create(concrete(tiny.replace({**ENDLESS, **(after if applied else before)}), "cpu"))
    tried = Switch(number=0, env_steps=1000, kind="speed", reason="slow", how="restart", before=before, after=after,
                   expected_gain=1.5)  # fmt: skip
    switches.append(run, tried)
    follower = following(run.load_config(), run, machine)
    follower._undo_what_was_on_trial()
    assert run.load_config().runtime.loop_count == follower.training.config.runtime.loop_count == 4
    (told,) = switches.load(run)
    assert told.verdict == ("undone" if applied else "cut short")
    follower._undo_what_was_on_trial()
    assert switches.load(run) == [told], "once"


def test_a_candidate_that_failed_is_learnt_as_what_it_was(
    tmp_path: Path, tiny: Config, machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own workload, and no pace."""
    follower = following(tiny.replace({**ENDLESS, "runtime.loop_count": 1}), RunDir(tmp_path), machine)
    learnt: list[Sequence[tuple[tuple[int, ...], Measurement]]] = []

    class Learning(Proposer):
        def learn(self, known: Sequence[tuple[tuple[int, ...], Measurement]]) -> None:
            learnt.append(list(known))
            super().learn(known)

    tried = []

    def fail(changes: dict[str, Any], *_: Any) -> tuple[str, None]:
        tried.append(changes)
        return "failed", None

    monkeypatch.setattr(retune, "Proposer", Learning)
    monkeypatch.setattr(follower, "_try", fail)
    follower._anneal(Reason("speed", "slow", FLAT, FLAT))
    (_, here), (_, failed), *_ = learnt[-1]
    assert (failed.outcome, failed.seconds_per_env_step, failed.env_steps_per_second) == (Outcome.CRASHED, None, None)
    loops = tried[0].get("runtime.loop_count", 1)
    assert (here.workload.loop_count, failed.workload.loop_count) == (1, loops)
    assert failed.workload != here.workload


def test_no_switch_is_given_more_memory_than_was_asked_for(
    tmp_path: Path, tiny: Config, machine: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = tiny.replace({**ENDLESS, "allocation.memory_gib": 0.8})
    asked: dict[float | None, list[dict[str, Any]]] = {None: [], 1.1: []}
    for most, found in asked.items():
        follower = following(little, RunDir(tmp_path), machine, most)
        follower.taught = RuntimePredictor.pretrained()
        monkeypatch.setattr(follower.training, "change", lambda changes, found=found: found.append(changes) or "ended")
        follower._try({"runtime.num_envs": 512}, Reason("speed", "slow", FLAT, FLAT), 1.5, 1e-3)
    assert asked[None][0]["allocation.memory_gib"] > 1.1, "the test asks for too little"
    assert asked[1.1] == [{"runtime.num_envs": 512, "allocation.memory_gib": 1.1}]


def test_a_damaged_history_does_not_end_a_training(
    tmp_path: Path, tiny: Config, machine: Hardware, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUZEROX_HOME", str(tmp_path / "home"))
    follower = following(tiny.replace(ENDLESS), RunDir(tmp_path / "run"), machine)
    follower.quiet = False
    assert follower._history() == []
    assert capsys.readouterr().err == "", "a machine that has measured nothing is no damage"
    folder = tmp_path / "home" / "measurements" / machine.id
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("no row\n{}\n")
    assert follower._history() == []
    (said,) = capsys.readouterr().err.splitlines()
    assert "goes on without" in said
    assert str(folder) in said


def test_a_signal_for_who_has_just_ended_is_nothing() -> None:
    for _ in range(5):
        child = Child(["--help"], as_json=False)
        os.kill(child._process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while child.wait(0.0) is None:
            child.send(signal.SIGCONT)
            assert time.monotonic() < deadline
        child.send(signal.SIGCONT)
        assert child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_stopped_before_its_training_heeds_signals_it_has_stopped(number: int, tmp_path: Path, tiny: Config) -> None:
    (tmp_path / "start.toml").write_text(toml(tiny.replace(ENDLESS)))
    command = [sys.executable, "-c", FOLLOW, str(tmp_path / "start.toml"), str(tmp_path / "run")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children, deadline = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 120.0
    while process.poll() is None and time.monotonic() < deadline:
        if any("muzerox" in Path(f"/proc/{child}/cmdline").read_text() for child in children.read_text().split()):
            break  # it imports for a second or more
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert not (tmp_path / "run").exists(), "it was still importing"


def test_what_lies_where_it_is_run_is_not_taken_for_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("random", "signal", "copy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the library')\n")
    training = Child(["--help"], as_json=False)
    assert training.wait(120.0) == 0
    assert "--resume" in training.said()


def begun(training: Training, seconds: float = 120.0) -> None:
    """Waits for its first report."""
    deadline = time.monotonic() + seconds
    while not training.reports():
        assert training.wait(0.1) is None, training.said()
        assert time.monotonic() < deadline


class Disturbed(Child):
    """A process of a training; ``disturb`` is called with its number, from 1, and the process, in a thread of its own."""

    made = 0
    disturb: Callable[[int, int], None]

    def __init__(self, arguments: Sequence[str], *, as_json: bool):
        super().__init__(arguments, as_json=as_json)
        Disturbed.made += 1
        threading.Thread(target=Disturbed.disturb, args=(Disturbed.made, self._process.pid), daemon=True).start()


Tried = tuple[tuple[str, Level | None] | None, int | None, Switch, int]


@pytest.fixture
def try_split(tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], None]], Tried]:
    """Trains, tries ``search.split=2``, and takes it for slower by far, while something disturbs one process or another.

    The training that was is the first process, the candidate the second, the way back the third. What trying said, the exit
    code where the training has ended, the switch, and the split that the run would go on with.
    """

    def run_it(disturb: Callable[[int, int], None]) -> Tried:
        config, run = concrete(tiny.replace(ENDLESS), "cpu"), RunDir(tmp_path / "run")
        (tmp_path / "start.toml").write_text(toml(config))
        Disturbed.made, Disturbed.disturb = 0, staticmethod(disturb)
        monkeypatch.setattr("tuner.following.process.Child", Disturbed)
        follower = _Phases(config, run, fingerprint(), Goal(), as_json=True, quiet=True)
        training = follower.training
        with training.signals():
            training.start(["--config", str(tmp_path / "start.toml"), "--out", str(run.path)])
            begun(training)
            follower.state = follower.state._replace(simulations=2)
            said = follower._try({"search.split": 2}, Reason("speed", "slow", FLAT, FLAT), 1.5, 1e-7)
            code = training.wait(0.0)
            if code is None:
                training._child.stop()
                assert training.wait(60.0) == 130
        (switch,) = switches.load(run)
        return said, code, switch, get(run.load_config(), "search.split")

    return run_it


def once_written(file: Path, old: str, act: Callable[[], None]) -> None:
    """Acts when a file holds something else."""
    while file.read_text() == old:
        time.sleep(0.001)
    act()


def stop_us() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow(40)
def test_stopped_on_the_way_back_the_verdict_is_what_the_run_is_left_with(try_split: Callable[..., Tried]) -> None:
    said, code, switch, split = try_split(lambda number, _: stop_us() if number == 3 else None)  # it imports
    assert (said, code, switch.verdict, split) == (None, 130, "left", 2)
    assert switch.measured_gain is not None
    assert switch.measured_gain < 0.5


@pytest.mark.slow(40)
def test_stopped_once_the_way_back_is_written_it_is_undone(try_split: Callable[..., Tried], tmp_path: Path) -> None:
    file = tmp_path / "run" / "config.toml"
    said, code, switch, split = try_split(lambda n, _: once_written(file, file.read_text(), stop_us) if n == 3 else None)
    assert (said, code, switch.verdict, split) == (None, 130, "undone", 1)


@pytest.mark.slow(60)
def test_a_way_back_that_crashes_is_gone_once_more(try_split: Callable[..., Tried]) -> None:
    said, code, switch, split = try_split(lambda number, pid: os.kill(pid, signal.SIGKILL) if number == 3 else None)
    assert (code, switch.verdict, split) == (None, "undone", 1)
    assert said is not None
    assert Disturbed.made == 4, "and the training goes on"


def test_a_candidate_that_fails_is_not_what_a_stopped_run_goes_on_with(try_split: Callable[..., Tried], tmp_path: Path) -> None:
    """It has written its configuration, crashed, and the next process is stopped before it could write its own."""
    file = tmp_path / "run" / "config.toml"

    def disturb(number: int, pid: int) -> None:
        if number == 2:
            once_written(file, file.read_text(), lambda: os.kill(pid, signal.SIGKILL))
        elif number == 3:
            stop_us()

    said, code, switch, split = try_split(disturb)
    assert (said, code, switch.verdict, split) == (None, 130, "failed", 1)


def test_a_candidate_that_is_stopped_has_not_failed(try_split: Callable[..., Tried]) -> None:
    said, code, switch, _ = try_split(lambda number, _: stop_us() if number == 2 else None)  # it imports
    assert (said, code, switch.verdict) == (None, 130, "cut short")
