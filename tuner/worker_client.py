"""The tuner's side of a worker: starts its process, asks, and turns whatever ends it into an outcome and one line."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from predictor import Outcome
from tuner.bridge import RunFailed

TIMEOUT = 180.0  # seconds that an answer may take


class WorkerFailed(RunFailed):
    """A worker that has no more answers: ``outcome`` and one line."""

    def __init__(self, outcome: Outcome, error: str):
        self.outcome, self.error = outcome, error
        super().__init__(error)


class Worker:
    """A subprocess of ``tuner.worker``. Use as a context manager; it is dead after the block.

    From an answer to the next request it is stopped, as by SIGSTOP: its threads, at whatever they were, disturb nobody who is
    timed meanwhile, and go on from there. Simulators in processes of their own wait for it.

    Args:
      request: the first request.
      timeout: seconds an answer may take.
    """

    command: tuple[str, ...] = ("-P", "-m", "tuner.worker")  # -P: what lies in the user's folder is no package of ours

    def __init__(self, request: dict[str, Any], *, timeout: float = TIMEOUT):
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile()
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self._process = subprocess.Popen(
            [sys.executable, *self.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to answer
        )
        assert self._process.stdout is not None
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        try:
            self._send(request)
        except WorkerFailed:  # it has ended already
            self.stop()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the process; it may have ended before."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            try:
                stream.close()  # type: ignore[union-attr]
            except BrokenPipeError:  # what was still to be sent has nobody to go to
                continue

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended; it may be stopped."""
        return self._process.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends the worker a signal."""
        os.killpg(self._process.pid, number)

    def _signal(self, number: int) -> None:
        if self.is_alive:
            self.kill(number)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._died()
        self._signal(signal.SIGCONT)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer. Raises WorkerFailed."""
        self._send(request)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises WorkerFailed when there is none in time, or it is a failure."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise WorkerFailed(Outcome.TIMEOUT, f"no answer within {self._timeout:g} s")
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                self._died()
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise WorkerFailed(Outcome.CRASHED, f"its answer is none: {line[:80]!r}")
        if "outcome" in fields:
            raise WorkerFailed(Outcome(fields["outcome"]), fields["error"])
        self._signal(signal.SIGSTOP)
        return fields

    def _died(self) -> None:
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        memory = code == -signal.SIGKILL or any("bad_alloc" in line or "out of memory" in line.lower() for line in said[-20:])
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise WorkerFailed(Outcome.OUT_OF_MEMORY if memory else Outcome.CRASHED, f"{how}: {said[-1][:200]}" if said else how)
