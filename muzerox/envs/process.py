"""Simulators in a process of their own: one that hangs or dies takes nothing with it.

The process is a fresh interpreter, not a fork (JAX runs threads, and a fork of those may never wake up) and not
multiprocessing's ``spawn`` (which imports the parent's main module again, and with it JAX, in every child). Arrays travel
through anonymous shared memory that vanishes with its last user; a byte each way over a socket says whose turn it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from muzerox.envs.exchange import DONE, RESET, STEP, map_fields
from muzerox.errors import EnvironmentUnavailable
from muzerox.types import HostBatch, TimeStep

START_SECONDS = 300.0  # for a process to start and make its simulators, which may import and compile a lot
_GRACE_SECONDS = 2.0  # for a process to end by itself, and again after being asked
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from muzerox.envs.child import main; main(*map(int, sys.argv[2:]))"
)


class SimulatorError(RuntimeError):
    """A simulator in a process of its own raised an exception; the message ends with its traceback."""


def _shared_memory() -> int:
    """File descriptor of memory without a name: nothing is left behind, however its users end."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("muzerox")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _signal_group(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)  # with whatever processes the simulator itself started


def _end(process: subprocess.Popen, connection: Connection, descriptors: list[int], grace: float) -> None:
    """Ends the process, if it has not ended, and frees what it took."""
    # An idle process takes this as its end, and a thread of ours that waits for an answer wakes up.
    with socket.socket(fileno=os.dup(connection.fileno())) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        if number is not None:
            _signal_group(process, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(None if number == signal.SIGKILL else grace)
    connection.close()
    while descriptors:
        os.close(descriptors.pop())


class _Child:
    """A process and the parent's end of its channels."""

    def __init__(self, name: str, timeout: float, request: dict[str, Any]):
        self.name, self.timeout = name, timeout
        ours, theirs = Pipe()
        lifeline, held = os.pipe()
        memory = _shared_memory()
        passed = (theirs.fileno(), memory, lifeline)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                process_group=0,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # an accelerator is the networks'
            )
        except BaseException:
            ours.close()
            os.close(held)
            os.close(memory)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.process, self.connection, self.memory = process, ours, memory
        self.ready = select.poll()
        self.ready.register(ours.fileno(), select.POLLIN)
        self.arrays: dict[str, np.ndarray] = {}
        self.end = weakref.finalize(self, _end, process, ours, [held, memory], _GRACE_SECONDS)
        self._exchange(pickle.dumps(request), "start", START_SECONDS)

    def kill(self) -> None:
        """Ends the process at once; harmless when it has ended."""
        if self.end.alive:
            if self.process.poll() is None:
                _signal_group(self.process, signal.SIGKILL)
            self.end()

    def _exchange(self, request: bytes, what: str, seconds: float) -> bytes:
        if not self.end.alive:
            raise RuntimeError(f"{self.name}: closed")
        try:
            self.connection.send_bytes(request)
            answered = self.ready.poll(None if math.isinf(seconds) else seconds * 1000.0)
            reply = self.connection.recv_bytes() if answered else b""
        except (EOFError, OSError):
            if not self.end.alive:  # by another thread, meanwhile
                raise RuntimeError(f"{self.name}: closed") from None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_SECONDS)
            self.kill()
            raise RuntimeError(f"{self.name}: its process {_ending(self.process.returncode)} during {what}") from None
        except BaseException:  # such as an interrupt: the answer to this request must not be taken for that to the next
            self.kill()
            raise
        if not answered:
            self.kill()
            raise TimeoutError(f"{self.name}: {what} took longer than {seconds:g} seconds; its process was killed")
        if reply != DONE:
            self._take(pickle.loads(reply))
        return reply

    def _take(self, message: Any) -> None:
        """The layout of the shared memory, or a failure."""
        if isinstance(message, list):
            self.arrays = map_fields(self.memory, message)
            return
        self.end()
        if "unavailable" in message:
            raise EnvironmentUnavailable(*message["unavailable"])
        raise SimulatorError(f"{self.name}: {message['error']}\n\nIn the simulator's process:\n{message['traceback']}")

    def _read(self) -> TimeStep:
        kept = {name: array.copy() for name, array in self.arrays.items() if name not in ("action", "final_observation")}
        final = kept["observation"].copy()
        ended = kept["terminated"] | kept["truncated"]
        if ended.any():
            final[ended] = self.arrays["final_observation"][ended]
        return TimeStep(**kept, final_observation=final)

    def reset(self) -> TimeStep:
        self._exchange(RESET, "reset", self.timeout)
        return self._read()

    def step(self, action: Any) -> TimeStep:
        if not self.arrays:
            raise RuntimeError(f"{self.name}: step before reset")
        self.arrays["action"][...] = action
        self._exchange(STEP, "step", self.timeout)
        return self._read()


def _ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by signal {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def in_process(env_id: str, num_envs: int, seed: int, timeout: float, *, evaluation: bool = False) -> HostBatch:
    """E environments of ``env_id`` in a child process of their own, under the contract of ``HostBatch``.

    ``close()`` ends the process, by force if need be. The process also ends when this one does, however that ends; an
    interrupt from the terminal leaves it alone. Use a batch from one thread at a time; ``close()`` may come from another, and
    ends a wait.

    Args:
      env_id: also of a JAX suite, which is then stepped in the child on its CPU. A simulator registered with gymnasium by the
        calling script is not known to the child: name its module, as in ``gymnasium:my_module:MyEnv-v0``.
      timeout: seconds that a reset or a step may take; the first start may take ``START_SECONDS``.
      evaluation: the environments of ``HostEnvironment.make_evaluation``.

    Raises:
      EnvironmentUnavailable: as ``make_env``.
      TimeoutError: from ``reset`` and ``step``, which took longer; the child has been killed.
      SimulatorError: the simulator raised an exception; the child has ended.
      RuntimeError: the child died, by an exit code or signal that the message names; or a use after ``close``.
    """
    name = f"{env_id} ({num_envs} environments)"
    child = _Child(name, timeout, {"env_id": env_id, "num_envs": num_envs, "seed": seed, "evaluation": evaluation})
    return HostBatch(child.reset, child.step, child.end)
