"""Progress on stderr while a tuning runs: on a terminal a live table above a bar, elsewhere a line a trial."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from tuner.bridge import make_console
from tuner.history import Trial
from tuner.reporting.tables import moved, trial_line

Held = TypeVar("Held")

_ROWS = 12  # of trials shown; of a longer history the newest, and the best
_OTHER_LINES = 7  # of the table's frame, the running trial and the bar: what is higher than a terminal cannot be drawn over


class Running(NamedTuple):
    """A trial that is being measured."""

    number: int
    role: str
    what: str
    expected: float  # seconds an environment step
    began: float  # seconds of tuning


class Progress:
    """Shows a tuning on stderr. Use as a context manager: the terminal is whole again after it, however it ends.

    Args:
      budget: seconds.
      quiet: nothing is written.
      console: where to write; stderr if None.
    """

    def __init__(self, budget: float, *, quiet: bool, console: Console | None = None):
        self._console = console or make_console(stderr=True, quiet=quiet)
        self._stack, self._budget = ExitStack(), budget
        self._trials: list[Trial] = []
        self._running: Running | None = None
        self._best: Trial | None = None
        self._elapsed, self._at = 0.0, time.monotonic()  # seconds of tuning at a moment of the clock
        self._bar = Bar(
            TextColumn("tuning"), BarColumn(), TextColumn("{task.fields[left]}"), console=self._console, auto_refresh=False
        )
        self._task = self._bar.add_task("tuning", total=budget, left="")
        drawn = not quiet and self._console.file.isatty() and not self._console.is_dumb_terminal
        # Nothing of it stays: the table of all trials that a tuning ends with takes its place.
        self._live = (
            Live(console=self._console, get_renderable=self._render, transient=True, refresh_per_second=2) if drawn else None
        )

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._stack.close()
        finally:
            if self._live is not None:
                self._live.stop()

    def enter(self, held: AbstractContextManager[Held]) -> Held:
        """Closes ``held`` when the tuning ends."""
        return self._stack.enter_context(held)

    def say(self, text: str) -> None:
        """One line; above the table where there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def resume(self, trials: Sequence[Trial]) -> None:
        """The trials that an earlier process measured."""
        self._trials = list(trials)
        self._set_elapsed(trials[-1].elapsed)

    def trial(self, number: int, role: str, what: str, expected: float, elapsed: float) -> None:
        """A trial that begins; ``expected`` seconds an environment step, ``elapsed`` seconds of tuning."""
        self._set_elapsed(elapsed)
        self._running = Running(number, role, what, expected, elapsed)

    def measured(self, trial: Trial, baseline: Trial) -> None:
        """A trial that is safely kept."""
        self._running = None
        self._trials.append(trial)
        self._set_elapsed(trial.elapsed)
        if self._live is None:
            self.say(trial_line(trial, baseline))

    def choose(self, best: Trial) -> None:
        """The best so far, as the tuning counts: the fastest may be of a precision that is refused, or dear."""
        self._best = best

    def _set_elapsed(self, elapsed: float) -> None:
        self._elapsed, self._at = elapsed, time.monotonic()

    def _render(self) -> Group | Bar:
        """What is to be seen now; the thread that draws asks for it."""
        elapsed = self._elapsed + time.monotonic() - self._at
        left = max(0.0, self._budget - elapsed)
        whole = _clock(self._budget)
        shown = f"{_clock(left)} left of {whole}" if left else f"ending, {_clock(elapsed)} of {whole}"
        self._bar.update(self._task, completed=min(elapsed, self._budget), left=shown)
        trials, running = list(self._trials), self._running
        if not trials and running is None:
            return self._bar
        rows = max(1, min(_ROWS, self._console.height - _OTHER_LINES))
        return Group(live_table(trials, running, self._best, elapsed=elapsed, rows=rows), self._bar)


def _clock(seconds: float) -> str:
    """``4:05`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def shown_trials(trials: Sequence[Trial], best: Trial | None, rows: int) -> list[Trial]:
    """The newest ``rows`` of ``trials``; the best one in place of the oldest of these where it is older still."""
    newest = list(trials[-rows:])
    return newest if best is None or best in newest else [best, *newest[1:]]


def live_table(trials: Sequence[Trial], running: Running | None, best: Trial | None, *, elapsed: float, rows: int) -> Table:
    """The trials so far, at most ``rows`` of them, and the one that is being measured at ``elapsed`` seconds of tuning."""
    shown = shown_trials(trials, best, rows)
    hidden = len(trials) - len(shown)
    table = Table(caption=f"{hidden} earlier ones are not shown" if hidden else None, caption_justify="left", expand=True)
    for name in ("trial", "chosen", "moved from the start", "expected", "steps/s", "to the start", "s"):
        left = name in ("chosen", "moved from the start")
        table.add_column(
            name,
            justify="left" if left else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if name == "moved from the start" else None,
        )
    for trial in shown:
        is_best = best is not None and trial.number == best.number
        table.add_row(*map(Text, _cells(trial, trials[0], is_best)), style="bold green" if is_best else None)
    if running is not None:
        expected = f"{1 / running.expected:,.0f}"
        cells = (str(running.number), running.role, running.what, expected, "...", "", f"{elapsed - running.began:.0f}")
        table.add_row(*map(Text, cells), style="dim")
    return table


def _cells(trial: Trial, baseline: Trial, is_best: bool) -> tuple[str, ...]:
    what, took = moved(trial, baseline) or "the start", f"{trial.measurement.wall_seconds:.0f}"
    expected = f"{1 / trial.foreseen:,.0f}"
    if trial.seconds is None:
        what, outcome = f"{what}: {trial.measurement.error}", str(trial.measurement.outcome)
        return str(trial.number), trial.role, what, expected, outcome, "", took
    ratio = f"{(baseline.seconds or trial.seconds) / trial.seconds:.2f}x{' best' if is_best else ''}"
    return str(trial.number), trial.role, what, expected, f"{1 / trial.seconds:,.0f}", ratio, took
