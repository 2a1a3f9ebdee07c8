"""A training in a process of its own, and what it reports while it runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from tuner import phases
from tuner.bridge import Config, RunDir

# Before the training's own interpreter: a killed tuner has the training save and stop, so that it can be resumed at once. Not by
# SIGTERM, which a switch may have sent already: a second one ends it without saving. The request outlives exec. Linux only;
# elsewhere the training goes on by itself.
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
    """A process of ``muzerox train``. Its stderr is ours; what it prints is kept."""

    def __init__(self, arguments: Sequence[str], *, as_json: bool):
        command = [sys.executable, "-m", "muzerox", "train", *arguments, *(["--json"] if as_json else [])]
        self._stdout = tempfile.TemporaryFile()
        environment = dict(os.environ)
        if sys.stdout.isatty():  # its tables are for this terminal
            environment["COLUMNS"] = str(shutil.get_terminal_size().columns)
        self.began, self._asked = time.monotonic(), False
        starter = [sys.executable, "-S", "-c", _DIE_POLITELY, str(os.getpid())]
        self._process = subprocess.Popen([*starter, *command], stdout=self._stdout, env=environment)

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code; None while it lives, after so many seconds."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Asks it to save and stop, once: a second request would end it before it has saved."""
        if not self._asked:
            self._asked = True
            self._process.terminate()

    def kill(self) -> None:
        """Ends it as it is."""
        self._process.kill()
        self._process.wait()

    def said(self) -> str:
        """What it has printed, once it has ended."""
        self._stdout.seek(0)
        return self._stdout.read().decode(errors="replace")


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
