"""Following a training and switching it: reports across processes, rows of switches, what may move; kills on the way (slow)."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from muzerox.cli import main
from predictor import Hardware, Outcome
from tuner.bridge import RESUMABLE, Config, RunDir, UserError, concrete, get, toml
from tuner.following import switches
from tuner.following.phases import Level
from tuner.following.process import Follower
from tuner.following.retune import measured
from tuner.following.switches import Switch
from tuner.following.train_tuned import tuning_folder
from tuner.neighbourhood import resumable_space

ROW: dict[str, Any] = {"kind": "train", "episodes": 0, "num_simulations": 2, "skipped_updates": 0}


def rows(*updates: int, seconds: float = 1.0) -> str:
    made = ({**ROW, "updates": n, "env_steps": 100 * n, "train_seconds": seconds * i} for i, n in enumerate(updates))
    return "".join(json.dumps(row) + "\n" for row in made)


def test_reports_are_followed_over_a_restart(tmp_path: Path, tiny: Config) -> None:
    run = RunDir(tmp_path)
    follower = Follower(run)
    follower.restart()
    assert follower.read(tiny) == []  # nothing there yet
    text = rows(2, 4, 6)
    run.metrics_file.write_text(text[:-10])  # the last line is being written
    first = follower.read(tiny)
    assert [report.env_steps for report in first] == [400]
    steps = 2 * float(tiny.train.batch_size / tiny.replay_ratio)  # of two updates
    assert first[0].seconds_per_env_step == pytest.approx(1.0 / steps)
    with run.metrics_file.open("a") as file:
        file.write(text[-10:] + json.dumps({"kind": "saved", "updates": 6, "seconds": 3.0}) + "\n")
    assert [report.env_steps for report in follower.read(tiny)] == [600]
    (run.checkpoints / "6").mkdir(parents=True)
    assert run.last_saved() == 6
    follower.restart()
    assert follower.read(tiny) == []  # the process has not begun
    run.rewind_metrics(6)
    with run.metrics_file.open("a") as file:
        file.write(rows(8, 10, 12, seconds=2.0))
    again = follower.read(tiny)
    assert [report.env_steps for report in again] == [1000, 1200], "what the other process did is not a report of this one"
    assert {report.seconds for report in again} == {2.0}


def switch(number: int, **changes: Any) -> Switch:
    values = {"env_steps": 10, "kind": "speed", "reason": "slow", "how": "restart", "before": {}, "after": {"a": 1}}
    return Switch(**{**values, "number": number, "expected_gain": 1.5, **changes})


def test_a_switch_is_a_row_when_made_and_again_when_judged(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert switches.load(run) == []
    switches.append(run, switch(0))
    switches.append(run, switch(0, verdict="kept", measured_gain=1.4))
    switches.append(run, switch(1))
    with (tmp_path / "switches.jsonl").open("a") as file:
        file.write('{"number": 2, "env')  # killed while it was written
    first, second = switches.load(run)
    assert (first.verdict, first.measured_gain) == ("kept", 1.4)
    assert second.verdict == switches.ON_TRIAL
    for row in map(json.loads, (tmp_path / "switches.jsonl").read_text().splitlines()[:-1]):
        assert {"time", "env_steps", "reason", "before", "after", "expected_gain", "measured_gain", "verdict"} <= set(row)
    switches.append(run, switch(2))
    assert [found.number for found in switches.load(run)] == [0, 1, 2], "what follows a row that was cut short is whole"
    with (tmp_path / "switches.jsonl").open("a") as file:
        file.write('{"number": 3}\n')
    with pytest.raises(UserError, match="is not a switch"):
        switches.load(run)


@pytest.mark.parametrize("which", ["tiny", "tiny_threads"])
def test_only_what_a_resume_may_change_moves(which: str, machine: Hardware, request: pytest.FixtureRequest) -> None:
    config = concrete(request.getfixturevalue(which), "cpu")
    space = resumable_space(config, "cpu", 2e-4)
    assert {knob.path for knob in space.knobs} <= set(RESUMABLE)
    assert {"runtime.loop_count", "search.engine", "search.split"} <= {knob.path for knob in space.knobs}
    found = measured(space, space.start, Level(1e-3, 1e-3, (1.0,) * 3, 10.0, 1.0, 16), machine)
    assert (found.outcome, found.env_steps_per_second) == (Outcome.OK, pytest.approx(1e3))
    assert found.workload.loop_count == config.runtime.loop_count
    if which == "tiny_threads":
        assert "runtime.step_in" in {knob.path for knob in space.knobs}
        assert found.workload.host_step_seconds > 2e-4, "what steps were seen to take beyond what was measured"


def test_a_tuning_lies_beside_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tuning_folder(Path("runs/a")) == tmp_path / "runs" / "a-tuning"
    assert tuning_folder(Path(".")) == tmp_path.with_name(tmp_path.name + "-tuning")


def test_phases_need_a_training_that_is_tuned_or_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", "gymnax:CartPole-v1", "--phases", "--out", str(tmp_path / "run")]) == 2
    assert "needs --tune" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "absent"), "--phases"]) == 2
    said = capsys.readouterr().err
    assert "no such directory" in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


SETTINGS = {
    "network.width": 16,
    "network.depth": 1,
    "train.unroll_steps": 1,
    "search.num_simulations": 2,
    "replay.capacity": 65_536,
    "replay.min_size": 512,
    "runtime.num_envs": 4,
    "runtime.loop_count": 8,
    "train.batch_size": 32,
    "train.replay_ratio": 1.0,
    "train.eval_period": 1_000_000_000,
    "train.eval_episodes": 2,
    "train.max_env_steps": 5_000_000,  # whatever the machine, enough is left for a switch to pay
    "train.target_return": None,  # nothing is left of a training whose return may be reached at any moment
}
BEFORE_SECONDS = 20.0  # of training until the regime changes: it has been seen what a phase costs
# Of tuner.following.phases, where it does not matter how surely a switch is the right one.
SHORTER = {"SETTLE_SECONDS": 1, "REFERENCE_SECONDS": 4, "REFERENCE_REPORTS": 4, "WINDOW_SECONDS": 3, "WINDOW_REPORTS": 3}
CHANGE = 32_000_000  # steps, which no machine makes meanwhile
SIMULATORS = Path(__file__).parents[2] / "benchmarks" / "simulators"
FOLLOW = """
import sys
from pathlib import Path
from tuner.following import phases
from tuner.bridge import RunDir, load_config
from tuner.measuring.fingerprint import fingerprint
from tuner.following.retune import train_in_phases
out = Path(sys.argv[1])
for name, value in zip(sys.argv[2::2], map(float, sys.argv[3::2])):
    setattr(phases, name, value)
config = load_config(out / "start.toml")
run = RunDir(out / "run")
how = train_in_phases(config, run, ["--config", str(out / "start.toml"), "--out", str(run.path)], fingerprint(), as_json=True)
sys.exit(how.code)
"""


def with_simulators() -> dict[str, str]:
    """The environment of a process that trains on them."""
    path = os.pathsep.join([str(SIMULATORS), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path}


def follow(folder: Path, **shorter: float) -> subprocess.Popen[bytes]:
    """A training in phases whose simulators grow dear on the way; with ``shorter`` constants of ``phases``."""
    environment = with_simulators() | {"REGIME_COUNTER": str(folder / "steps"), "REGIME_CHANGE": str(CHANGE)}
    config = Config.preset("gymnasium:CartPole-v1").replace(SETTINGS)
    folder.mkdir(exist_ok=True)
    (folder / "start.toml").write_text(toml(config).replace("gymnasium:CartPole-v1", "gymnasium:regimes:Growing-v0"))
    with (folder / "log").open("ab") as log:
        constants = [str(part) for pair in shorter.items() for part in pair]
        return subprocess.Popen([sys.executable, "-c", FOLLOW, str(folder), *constants], stderr=log, stdout=log, env=environment)


def change_regime(folder: Path, process: subprocess.Popen[bytes], after: float = BEFORE_SECONDS) -> None:
    """Once the training has gone on for so many seconds: simulators count in the size of a file."""
    run, deadline = RunDir(folder / "run"), time.monotonic() + 300.0
    while process.poll() is None and time.monotonic() < deadline:
        rows = run.metrics() if run.metrics_file.exists() else []
        if max((row.get("train_seconds", 0.0) for row in rows), default=0.0) > after:
            os.truncate(folder / "steps", CHANGE)
            return
        time.sleep(0.2)
    raise AssertionError((folder / "log").read_text())


def wait_for_switch(folder: Path, process: subprocess.Popen[bytes], verdicts: tuple[str, ...], seconds: float = 300.0) -> None:
    """Until one has one of these verdicts."""
    run, deadline = RunDir(folder / "run"), time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        if any(switch.verdict in verdicts for switch in switches.load(run)):
            return
        time.sleep(0.02)
    raise AssertionError((folder / "log").read_text())


def busy(run: RunDir) -> bool:
    """Whether a process is at work on it."""
    try:
        run.lock().close()
    except UserError:
        return True
    return False


def stopped(pid: int | str) -> bool:
    """Whether a process is, as by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("whom", ["the tuner alone", "all of its terminal"])
def test_ctrl_c_saves_whoever_it_is_sent_to(whom: str, tmp_path: Path, tiny: Config) -> None:
    """As by ``kill -INT`` or an editor's stop button, and as by a terminal: the training hears of it once.

    Ctrl-Z stops and continues both.
    """
    endless = {"train.max_env_steps": 1_000_000_000, "train.eval_period": 1_000_000_000, "train.target_return": None}
    (tmp_path / "start.toml").write_text(toml(tiny.replace(endless)))
    run = RunDir(tmp_path / "run")
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-c", FOLLOW, str(tmp_path)]
        process = subprocess.Popen(command, stderr=log, stdout=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120.0
        while not run.metrics_file.exists() or not any(row["kind"] == "train" for row in run.metrics()):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        send = os.kill if whom == "the tuner alone" else os.killpg
        (training,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        send(process.pid, signal.SIGTSTP)  # Ctrl-Z
        while not (stopped(process.pid) and stopped(training)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        send(process.pid, signal.SIGCONT)
        while stopped(process.pid) or stopped(training):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        send(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, (tmp_path / "log").read_text()
    finally:
        process.kill()  # which ends a training that has not heard
    assert run.last_saved() >= max(row["updates"] for row in run.metrics()), "what was learnt is saved"
    assert not busy(run)


@pytest.mark.slow(120)
def test_a_regime_change_is_met_with_a_switch_that_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SIMULATORS)
    folder = tmp_path / "t"
    process = follow(folder)
    change_regime(folder, process)
    changed_at = max(row.get("env_steps", 0) for row in RunDir(folder / "run").metrics())
    wait_for_switch(folder, process, ("kept", "undone", "left"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 130, (folder / "log").read_text()
    run = RunDir(folder / "run")
    made = switches.load(run)
    assert all(switch.verdict in ("kept", "undone", "left", "failed", "cut short") for switch in made)
    assert all(switch.env_steps > changed_at for switch in made)
    judged = [switch for switch in made if switch.verdict in ("kept", "undone", "left")]
    assert all(switch.measured_gain for switch in judged)
    config = concrete(run.load_config(), "cpu")  # before its first restart a run has "auto" where a switch says what that means
    last = made[-1]
    either = [last.before, last.after]
    allowed = {"kept": either[1:], "left": either[1:], "undone": either[:1]}.get(last.verdict, either)
    assert {path: get(config, path) for path in last.after} in allowed
    rows = [row for row in run.metrics() if row["kind"] == "train"]
    assert [row["updates"] for row in rows] == sorted({row["updates"] for row in rows}), "no update was lost or made twice"
    assert run.last_saved() >= rows[-1]["updates"]


@pytest.mark.slow(200)
def test_killed_during_a_switch_the_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    """``kill -9`` of the tuner, at random moments from the request to stop to the measurement of what followed."""
    chance = random.Random(0)
    for number in range(3):
        folder = tmp_path / str(number)
        process = follow(folder, **SHORTER)
        run = RunDir(folder / "run")
        change_regime(folder, process, after=7.0)
        wait_for_switch(folder, process, (switches.ON_TRIAL,))
        time.sleep(chance.uniform(0.0, 8.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 60.0
        while busy(run) and time.monotonic() < deadline:  # it saves and stops by itself
            time.sleep(0.1)
        assert not busy(run), (folder / "log").read_text()
        seen = max(row["updates"] for row in run.metrics())
        assert run.last_saved() >= seen, "what was learnt is saved"
        last = max(row.get("env_steps", 0) for row in run.metrics()) + 5_000
        command = [sys.executable, "-m", "muzerox", "train", "--resume", str(run.path), "--set", f"train.max_env_steps={last}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=with_simulators())
        assert done.returncode == 0, done.stderr
        result = run.result()
        assert result is not None
        assert result["env_steps"] >= last
