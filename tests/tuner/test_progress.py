"""What a terminal shows while a tuning runs, and that it is whole afterwards."""

from __future__ import annotations

import io
import os
import pty
import threading
import time

import pytest
from rich.console import Console
from trials import EXPECTED

from predictor import Hardware, Measurement, Outcome, Workload
from tuner.history import Trial
from tuner.reporting.progress import Progress, Running, live_table, shown_trials

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


def make_trial(number: int, seconds: float | None, workload: Workload, machine: Hardware) -> Trial:
    ran = seconds is not None
    outcome, error = (Outcome.OK, None) if ran else (Outcome.CRASHED, "[red]it broke[/red]")
    return Trial(
        number=number,
        role="annealed" if number else "baseline",
        changes={"runtime.num_envs": 64 + number},
        config={},
        measurement=Measurement(
            hardware=machine, workload=workload, outcome=outcome, error=error, seconds_per_env_step=seconds, wall_seconds=7.0
        ),
        elapsed=10.0 * (number + 1),
        **EXPECTED,
    )


@pytest.fixture
def trials(workload: Workload, machine: Hardware) -> list[Trial]:
    """Twenty: the third is the fastest, the last failed."""
    seconds = [1e-4, 9e-5, 5e-5, *[8e-5] * 16, None]
    return [make_trial(number, value, workload, machine) for number, value in enumerate(seconds)]


def drawn(*arguments: object, width: int = 110, **named: object) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(live_table(*arguments, **named))  # type: ignore[arg-type]
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_long_history_shows_the_newest_and_the_best(trials: list[Trial]) -> None:
    assert [trial.number for trial in shown_trials(trials, trials[2], 12)] == [2, *range(9, 20)]
    assert [trial.number for trial in shown_trials(trials[:5], trials[2], 12)] == [0, 1, 2, 3, 4]
    assert [trial.number for trial in shown_trials(trials[:4], trials[2], 2)] == [2, 3]
    assert [trial.number for trial in shown_trials(trials[:4], None, 2)] == [2, 3]
    running = Running(20, "random", "num_envs=512 level=O1", 2e-4, 200.0)
    lines = drawn(trials, running, trials[2], elapsed=203.4, rows=12)
    assert sum("x best" in line for line in lines) == 1
    best = next(line for line in lines if "x best" in line)
    assert "20,000" in best
    assert "2.00x" in best
    assert "num_envs=66" in best
    assert any("[red]it broke[/red]" in line and "crashed" in line for line in lines)
    now = next(line for line in lines if "num_envs=512 level=O1" in line)
    assert "5,000" in now
    assert "random" in now
    assert " 3 " in now  # seconds it has been running
    assert "8 earlier ones are not shown" in lines[-1]


def test_it_fits_a_narrow_terminal(trials: list[Trial]) -> None:
    running = Running(20, "random", "num_envs=512 " * 20, 2e-4, 200.0)
    lines = drawn(trials, running, trials[2], elapsed=203.4, rows=12, width=80)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 12 + 1 + 5  # one line a trial, however much it says


class Terminal:
    """A pseudo-terminal whose output is kept."""

    def __init__(self) -> None:
        self._reading, writing = pty.openpty()
        self.console = Console(file=os.fdopen(writing, "w"), width=100, height=30)
        self._bytes = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._reading, 65536):
                self._bytes += part
        except OSError:  # the other side was closed: how a terminal ends
            return

    def said(self) -> str:
        self.console.file.close()
        self._thread.join(10.0)
        os.close(self._reading)
        return self._bytes.decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    return Terminal()


@pytest.mark.parametrize("how", [None, KeyboardInterrupt, RuntimeError])
def test_the_terminal_is_whole_however_a_tuning_ends(
    terminal: Terminal, trials: list[Trial], how: type[BaseException] | None
) -> None:
    try:
        with Progress(60.0, quiet=False, console=terminal.console) as progress:
            progress.resume(trials[:2])
            progress.trial(2, "annealed", "num_envs=66", 1e-4, 20.0)
            time.sleep(0.1)
            progress.measured(trials[2], trials[0])
            progress.choose(trials[2])
            progress.say("a line of [its] own")
            time.sleep(0.1)
            if how is not None:
                raise how
    except (KeyboardInterrupt, RuntimeError):
        assert how is not None
    said = terminal.said()
    assert said.count(HIDE) == said.count(SHOW) == 1
    assert said.rindex(SHOW) > said.rindex(HIDE)
    assert "a line of [its] own" in said
    assert "x best" in said
    assert "left of 1:00" in said
    assert "\x1b[?1049" not in said  # never the other screen: what was there before stays


def test_a_file_gets_a_line_a_trial(trials: list[Trial]) -> None:
    console = Console(file=io.StringIO(), width=80)
    with Progress(60.0, quiet=False, console=console) as progress:
        for trial in (trials[0], trials[2], trials[-1]):
            progress.trial(trial.number, trial.role, "what", 1e-4, trial.elapsed - 5.0)
            progress.measured(trial, trials[0])
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "  10.0 s  trial  0     10,000 steps/s (1.00x; expected 10,000)  baseline ",
        "  30.0 s  trial  2     20,000 steps/s (2.00x; expected 10,000)  annealed num_envs=66",
        " 200.0 s  trial 19  crashed: [red]it broke[/red]  annealed num_envs=83",
    ]


def test_quiet_is_quiet(trials: list[Trial], terminal: Terminal) -> None:
    terminal.console.quiet = True
    with Progress(60.0, quiet=True, console=terminal.console) as progress:
        progress.say("nothing")
        progress.measured(trials[0], trials[0])
    assert terminal.said() == ""
