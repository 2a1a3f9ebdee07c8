"""A training in processes of its own, one after another, and what they report while they run."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from predictor import Hardware
from tuner.bridge import Config, RunDir, ask_live, can_change_live, toml, write_atomically
from tuner.following import phases

POLL_SECONDS = 0.25
START_SECONDS = 60.0  # and ten times what a start took before: after these a change has failed
STOPPED = 130  # exit code of a training that was told to stop
# The same, of a process that did not heed signals yet, or was told to hurry.
_UNHEEDED = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)

# Before the training's own interpreter: a killed tuner has the training save and stop, so that it can be resumed at once. The
# request outlives exec. Linux only; elsewhere the training goes on by itself.
_DIE_POLITELY = """
import ctypes, os, signal, sys
prctl = getattr(ctypes.CDLL(None), "prctl", None)
if prctl is not None:
    prctl(1, signal.SIGUSR1)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(130)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A process of ``muzerox train``. Its stderr is ours; what it prints is kept. A terminal's signals are ours to pass on."""

    def __init__(self, arguments: Sequence[str], *, as_json: bool):
        # -P, as for whoever measures: what lies in the working directory must not hide a module of the standard library.
        command = [sys.executable, "-P", "-m", "muzerox", "train", *arguments, *(["--json"] if as_json else [])]
        self._stdout, self._said = tempfile.TemporaryFile(), ""
        environment = dict(os.environ)
        if sys.stdout.isatty():  # its tables are for this terminal
            environment["COLUMNS"] = str(shutil.get_terminal_size().columns)
        self._asked = False
        starter = [sys.executable, "-S", "-P", "-c", _DIE_POLITELY, str(os.getpid())]
        # In a session of its own: whether Ctrl-C came to all of a terminal or to us alone, it hears of it once.
        self._process = subprocess.Popen([*starter, *command], stdout=self._stdout, env=environment, start_new_session=True)
        # Waiting for a process for so many seconds is looking at it twenty times a second, on the cores that it trains on.
        self._ending = threading.Thread(target=self._process.wait, daemon=True)
        self._ending.start()

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code; None while it lives, after so many seconds."""
        self._ending.join(seconds)
        if self._ending.is_alive():
            return None
        code = self._process.returncode
        if not self._stdout.closed:
            with self._stdout:
                self._stdout.seek(0)
                self._said = self._stdout.read().decode(errors="replace")
        return code

    def stop(self) -> None:
        """Asks it to save and stop, once."""
        if not self._asked:
            self._asked = True
            self._process.terminate()

    def hurry(self) -> None:
        """Asks it as a second Ctrl-C does: it ends without saving."""
        self._process.send_signal(signal.SIGINT)

    def send(self, number: int) -> None:
        """Sends it a signal, and what it started in its own group, which simulators in processes are not: they wait for it."""
        if self._ending.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Ends it as it is."""
        self._process.kill()
        self.wait()

    def said(self) -> str:
        """What it has printed, once it has ended."""
        return self._said


class Follower:
    """The reports of a run's newest process, from metrics.jsonl, while they are written."""

    def __init__(self, run: RunDir):
        self._run = run
        self._before: dict[str, Any] | None = None
        self._replaced: int | None = None  # the file that the process is yet to replace
        self._after, self._offset, self._rest = 0, 0, b""

    def restart(self) -> None:
        """Another process will go on with the run. Call it while none is at work on it."""
        exists = self._run.metrics_file.exists()
        self._replaced = self._run.metrics_file.stat().st_ino if exists else None
        self._after, self._before, self._offset, self._rest = self._run.last_saved(), None, 0, b""

    def read(self, config: Config) -> list[phases.Report]:
        """What was reported since the last call."""
        try:
            with open(self._run.metrics_file, "rb") as file:
                if os.fstat(file.fileno()).st_ino == self._replaced:
                    return []
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(text)
        *lines, self._rest = (self._rest + text).split(b"\n")  # the last line may still be being written
        reports = []
        for line in lines:
            row = json.loads(line)
            if row["kind"] != "train" or row["updates"] <= self._after:
                continue
            if self._before is not None:
                report = phases.read(
                    row,
                    self._before,
                    steps_an_update=float(config.train.batch_size / config.replay_ratio),
                    capacity=config.replay.capacity,
                    last=config.train.max_env_steps,
                )
                reports += [report] if report is not None else []
            self._before = row
        return reports


class Training:
    """A run while it is trained: its process, what that says, and changes of its configuration, with a restart or without."""

    def __init__(self, config: Config, run: RunDir, hardware: Hardware, *, as_json: bool):
        self.config = config  # of the process
        self.cost = math.nan  # seconds that a restart takes
        self.last: phases.Report | None = None
        self.stopping = False  # Ctrl-C, SIGTERM or SIGUSR1 has come
        self._run, self._hardware, self._as_json = run, hardware, as_json
        self._follower = Follower(run)
        self._process: Child | None = None
        self._began, self._suspended = 0.0, 0.0  # when the process did, by our clock; seconds that we and it stood still
        self._started_cores = config.allocation.cores

    @property
    def _child(self) -> Child:
        assert self._process is not None, "not started"
        return self._process

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGUSR1 have the child save and stop, a second Ctrl-C at once; Ctrl-Z stops it with us."""

        def terminate(*_: Any) -> None:
            self.stopping = True
            if self._process is not None:
                self._process.stop()

        def interrupt(*_: Any) -> None:
            if self.stopping and self._process is not None:
                self._process.hurry()
            terminate()

        def pause(*_: Any) -> None:
            before = time.monotonic()
            if self._process is not None:
                self._process.send(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            if self._process is not None:
                self._process.send(signal.SIGCONT)
            self._suspended += time.monotonic() - before

        handlers = {
            signal.SIGINT: interrupt,
            signal.SIGTERM: terminate,
            signal.SIGUSR1: terminate,
            signal.SIGTSTP: pause,
        }
        previous = {number: signal.signal(number, how) for number, how in handlers.items()}
        try:
            yield
        finally:
            for number, how in previous.items():
                signal.signal(number, how)

    def _clock(self) -> float:
        """Seconds, which stand still while we do."""
        return time.monotonic() - self._suspended

    def start(self, arguments: Sequence[str]) -> None:
        """A process of ``muzerox train``, with the configuration that is ours."""
        self._follower.restart()
        self._began = self._clock()
        self._started_cores = self.config.allocation.cores
        self._process = Child(arguments, as_json=self._as_json)
        if self.stopping:  # asked for between two processes
            self._child.stop()

    def resume(self, changes: Mapping[str, Any]) -> None:
        """The next process, with ``changes``."""
        self.config = self.config.replace(changes)
        self.start(["--resume", str(self._run.path), *_set(changes)])

    def restore(self, changes: Mapping[str, Any]) -> None:
        """Writes ``changes`` into the run's configuration, at which no process is at work: whatever becomes of the next one."""
        write_atomically(self._run.config_file, toml(self._run.load_config().replace(changes)))

    def wait(self, seconds: float | None = None) -> int | None:
        """The process's exit code, ``STOPPED`` however it stopped when it was told to; None while it lives, after so long."""
        code = self._child.wait(seconds)
        return STOPPED if self.stopping and code in _UNHEEDED else code

    def said(self) -> str:
        """What the last process has printed, once it has ended."""
        return self._child.said()

    def reports(self) -> list[phases.Report]:
        """What was reported since the last call."""
        found = self._follower.read(self.config)
        if found:
            if math.isnan(self.cost):  # a start, with what it compiled, is about what a restart will take
                self.cost = self._clock() - self._began - sum(report.seconds for report in found)
            self.last = found[-1]
        return found

    def gather(
        self, simulations: int, *, settle: float = phases.SETTLE_SECONDS, seconds: float = phases.MEASURE_SECONDS
    ) -> list[phases.Report] | None:
        """Reports of so many seconds once it has settled, or the first whose searches have other than so many ``simulations``.

        None when the training ends before.
        """
        settled, kept = 0.0, deque[phases.Report]()
        while self.wait(POLL_SECONDS) is None:
            for report in self.reports():
                if report.simulations != simulations:
                    return [report]
                if settled < settle:
                    settled += report.seconds
                else:
                    kept.append(report)
            if len(kept) >= phases.WINDOW_REPORTS and sum(report.seconds for report in kept) >= seconds:
                return list(kept)
        return None

    @property
    def now(self) -> Config:
        """The configuration, with searches as deep as they are by now."""
        return self.config.searching(self.last.simulations) if self.last else self.config

    def seconds_left(self, seconds_per_env_step: float) -> float:
        """Of the training, at this pace; more where searches are yet to deepen."""
        assert self.last is not None
        train = self.config.train
        return phases.steps_left(self.last.env_steps, train.max_env_steps, train.target_return) * seconds_per_env_step

    def is_live(self, changes: Mapping[str, Any]) -> bool:
        """Whether the training takes all of it as it runs; cores up to those its process was started with."""
        most = self._started_cores or self._hardware.cores
        enough = (changes.get("allocation.cores") or 1) <= most
        return enough and all(can_change_live(self.config, path) for path in changes)

    def change(self, changes: Mapping[str, Any]) -> str:
        """``running`` with the changes, ``failed``, or ``ended``: the training was done, or was told to stop.

        Raises:
          ConfigError: they make no configuration; nothing was asked of the training.
        """
        config = self.config.replace(changes)
        if self.is_live(changes):
            ask_live(self._run, dict(changes))
            while self._run.live_file.exists():  # it takes them between two dispatches
                if self.wait(POLL_SECONDS) is not None:
                    return "ended"
            self.config = config
            return "running"
        began = self._clock()
        self._child.stop()
        if self.wait() != STOPPED or self.stopping:
            return "ended"
        limit = START_SECONDS + 10.0 * (0.0 if math.isnan(self.cost) else self.cost)
        self.resume(changes)
        while (code := self.wait(POLL_SECONDS)) is None:
            reports = self.reports()
            if reports:
                self.cost = self._clock() - began - sum(report.seconds for report in reports)
                return "running"
            if not self.stopping and self._clock() - began > limit:
                self._child.kill()
                return "failed"
        return "ended" if code in (0, STOPPED) else "failed"


def _set(changes: Mapping[str, Any]) -> list[str]:
    """Options of ``muzerox train --resume``."""
    return [part for path, value in changes.items() for part in ("--set", f"{path}={'none' if value is None else value}")]
