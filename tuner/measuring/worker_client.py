"""The tuner's side of a worker: starts its process, asks, and turns whatever ends it into an outcome and one line."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import IO, Any, NamedTuple

from predictor import Outcome
from tuner.bridge import RunFailed

TIMEOUT = 180.0  # seconds that an answer may take
_COMMAND = ("-P", "-m", "tuner.measuring.worker")  # -P: what lies in the user's folder is no package of ours


class _Process(NamedTuple):
    """A worker's, with what it writes on stderr."""

    popen: subprocess.Popen[bytes]
    errors: IO[bytes]

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended; it may be stopped."""
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        """Sends it a signal, and what it started, unless it has ended."""
        if self.is_alive:
            os.killpg(self.popen.pid, number)

    def end(self) -> None:
        """It may have ended before."""
        self.signal(signal.SIGKILL)
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout, self.errors):
            with contextlib.suppress(BrokenPipeError):  # what was still to be sent has nobody to go to; it is closed all the same
                stream.close()  # type: ignore[union-attr]


def _start(command: tuple[str, ...]) -> _Process:
    errors = tempfile.TemporaryFile()
    popen = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        start_new_session=True,  # Ctrl-C is ours to answer
    )
    return _Process(popen, errors)


class _Spare:
    """The process of the next worker, which imports what that needs while the one before compiles, and waits for a request."""

    def __init__(self) -> None:
        self._process = _start(_COMMAND)

    def take(self) -> _Process:
        """It, or a new one where it has ended; the next one is begun."""
        ahead, self._process = self._process, _start(_COMMAND)
        if ahead.is_alive:
            return ahead
        ahead.end()
        return _start(_COMMAND)

    def pause(self) -> None:
        """Stops it, so that it disturbs nobody who is timed; its first request wakes it."""
        self._process.signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends it."""
        self._process.end()


_spare: ContextVar[_Spare | None] = ContextVar("_spare", default=None)


@contextlib.contextmanager
def started_ahead() -> Iterator[None]:
    """Inside the block the process of a worker is started before there is a request for it: a second or two less to wait for.

    One is always ready, stopped while others are timed; the last, which nobody needs, ends with the block.
    """
    spare = _Spare()
    token = _spare.set(spare)
    try:
        yield
    finally:
        _spare.reset(token)
        spare.close()


class WorkerFailed(RunFailed):
    """A worker that has no more answers: ``outcome`` and one line."""

    def __init__(self, outcome: Outcome, error: str):
        self.outcome, self.error = outcome, error
        super().__init__(error)


class Worker:
    """A subprocess of ``tuner.measuring.worker``. Use as a context manager; it is dead after the block.

    From an answer to the next request it is stopped, as by SIGSTOP: its threads, at whatever they were, disturb nobody who is
    timed meanwhile, and go on from there. Simulators in processes of their own wait for it.

    Args:
      request: the first request.
      timeout: seconds an answer may take.
    """

    command: tuple[str, ...] = _COMMAND

    def __init__(self, request: dict[str, Any], *, timeout: float = TIMEOUT):
        self._timeout = timeout
        self._spare = _spare.get() if self.command == _COMMAND else None
        self._process = _start(self.command) if self._spare is None else self._spare.take()
        assert self._process.popen.stdout is not None
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.popen.stdout, selectors.EVENT_READ)
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
        self._process.end()
        self._selector.close()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended; it may be stopped."""
        return self._process.is_alive

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends the worker a signal, unless it has ended."""
        self._process.signal(number)

    def _send(self, request: dict[str, Any]) -> None:
        stdin = self._process.popen.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self._died()
        self._process.signal(signal.SIGCONT)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer. Raises WorkerFailed."""
        self._send(request)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next answer. Raises WorkerFailed when there is none in time, or it is a failure."""
        stdout = self._process.popen.stdout
        assert stdout is not None
        deadline = time.monotonic() + self._timeout
        while b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            # Interrupted (Ctrl-Z, and gone on with) once its time is over, select says nothing is there without having looked.
            if not (self._selector.select(left) or self._selector.select(0.0)):
                raise WorkerFailed(Outcome.TIMEOUT, f"no answer within {self._timeout:g} s")
            part = os.read(stdout.fileno(), 65536)
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
        self._process.signal(signal.SIGSTOP)
        if self._spare is not None:
            self._spare.pause()
        return fields

    def _died(self) -> None:
        code, errors = self._process.popen.wait(), self._process.errors
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
        memory = code == -signal.SIGKILL or any("bad_alloc" in line or "out of memory" in line.lower() for line in said[-20:])
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise WorkerFailed(Outcome.OUT_OF_MEMORY if memory else Outcome.CRASHED, f"{how}: {said[-1][:200]}" if said else how)
