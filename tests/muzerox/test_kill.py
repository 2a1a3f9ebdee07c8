"""kill -9 at random moments: every resume continues, and nothing reported as saved is lost. Signals that ask: all is kept."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muzerox.run_dir import RunDir

pytestmark = pytest.mark.slow

SETTINGS = {
    "network.width": 16,
    "network.depth": 1,
    "train.unroll_steps": 1,
    "search.num_simulations": 4,
    "replay.capacity": 8192,
    "replay.min_size": 256,
    "runtime.num_envs": 16,
    "runtime.loop_count": 8,
    "train.batch_size": 64,
    "train.target_return": "none",
    "train.eval_episodes": 4,
    "train.checkpoint_period": 0.3,
    "train.max_env_steps": 2_000_000_000,  # no process gets there before it is killed
}
# Environment, changes, kills.
ANAKIN = "gymnax:CartPole-v1", {}, 20
SEBULBA = "gymnasium:CartPole-v1", {"runtime.step_in": "process", "train.reanalyze_fraction": 0.25}, 10


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("muzerox")), "train", *arguments]
    # What one process compiled, the next need not: the starts are what takes long here.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(log.parent / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    with log.open("wb") as stderr:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=os.environ | cache)


def descendants(pid: int) -> list[int]:
    children = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return [pid for child in children for pid in [child, *descendants(child)]]


def options(changes: dict[str, Any]) -> list[str]:
    return [part for key, value in {**SETTINGS, **changes}.items() for part in ("--set", f"{key}={value}")]


def last_saved(text: str) -> int:
    return max((int(n.replace(",", "")) for n in re.findall(r"saved update ([\d,]+)", text)), default=0)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 600
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.slow(250)
@pytest.mark.parametrize(("env", "changes", "kills"), [ANAKIN, SEBULBA])
def test_kills_lose_nothing(env: str, changes: dict[str, Any], kills: int, tmp_path: Path) -> None:
    chance = random.Random(0)
    out, log = tmp_path / "run", tmp_path / "stderr"
    arguments = ["--env", env, "--out", str(out), *options(changes)]
    reported = 0
    resumed_from: list[int] = []
    for kill in range(kills):
        process = start(arguments, log)
        if kill % 2:  # while it starts, compiles or resumes, or before its first save
            wait_until((out / "config.toml").exists, process)
            time.sleep(chance.uniform(0.0, 6.0))
        else:  # between saves or within one, however slow the machine
            wait_until(lambda: last_saved(log.read_text()) > 0, process)
            time.sleep(chance.uniform(0.0, 1.5))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, log.read_text()
        text = log.read_text()
        found = re.search(r"resumed at update ([\d,]+)", text)
        if found:
            resumed_from.append(int(found[1].replace(",", "")))
            assert resumed_from[-1] >= reported, (
                f"update {reported} was reported as saved, the run went on from {resumed_from[-1]}"
            )
        reported = max(reported, last_saved(text))
        arguments = ["--resume", str(out)]
    assert reported > 0, "no process lived long enough to save"
    assert resumed_from == sorted(resumed_from)

    steps = RunDir(out).metrics()[-1].get("env_steps", 0)
    process = start(["--resume", str(out), "--set", f"train.max_env_steps={steps + 20_000}"], log)
    assert process.wait(timeout=300) == 0, log.read_text()
    assert int(re.search(r"resumed at update ([\d,]+)", log.read_text())[1].replace(",", "")) >= reported  # type: ignore[index]
    assert RunDir(out).result() is not None
    assert not list((out / "checkpoints").glob("*tmp*"))


@pytest.mark.parametrize(("env", "changes"), [ANAKIN[:2], SEBULBA[:2]])
@pytest.mark.parametrize(
    "asked",
    [[signal.SIGINT], [signal.SIGTERM], [signal.SIGUSR1], [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]],
    ids=lambda asked: " ".join(number.name for number in asked),
)
def test_a_signal_saves_draws_and_says_how_to_go_on(
    asked: list[signal.Signals], env: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    out, log = tmp_path / "run", tmp_path / "stderr"
    process = start(["--env", env, "--out", str(out), *options(changes)], log)
    wait_until(lambda: last_saved(log.read_text()) > 0, process)
    for number in asked:  # by a scheduler to its simulators, too
        for pid in [process.pid, *(descendants(process.pid) if number != signal.SIGINT else [])]:
            with contextlib.suppress(ProcessLookupError):  # a simulator that has ended already
                os.kill(pid, number)
        time.sleep(0.05)  # or the system makes one of two
    assert process.wait(timeout=10) == 130, log.read_text()
    text = log.read_text()
    assert f"stopped and saved; continue with: muzerox train --resume {out}" in text
    assert max(int(p.name) for p in (out / "checkpoints").iterdir()) == last_saved(text) == RunDir(out).metrics()[-1]["updates"]
    assert (out / "return_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "result.json").exists()
