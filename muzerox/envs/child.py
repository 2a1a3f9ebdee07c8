"""The other end of :mod:`muzerox.envs.process`: what runs in a simulator's own process.

It imports no JAX unless the simulator is written in it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import pickle
import select
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from muzerox.envs.exchange import DONE, RESET, lay_out, map_fields
from muzerox.errors import EnvironmentUnavailable


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, EnvironmentUnavailable):
        return {"unavailable": (error.path, error.value, error.rule, error.nearest)}
    return {"error": "".join(traceback.format_exception_only(error)).strip(), "traceback": traceback.format_exc()}


def _die_with_parent(lifeline: int) -> None:
    """Lets the kernel end this process when the last writer of the pipe is gone, whatever it is doing then.

    Nobody ever writes. A parent that is killed closes the pipe, and the signal of that event ends a process which does not
    handle it, even one stuck in foreign code that holds the interpreter's lock.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _parent_left(connection: Connection) -> bool:
    """Whether the parent has closed its end."""
    closed = select.poll()
    closed.register(connection.fileno(), 0)  # errors and hang-ups are told in any case
    return bool(closed.poll(0))


def _outlive_requests(connection: Connection) -> None:
    """Heeds requests to end only once the parent has closed its end: a scheduler sends them to every process of a job, and this
    one is needed until what is learnt is saved. A handler, and not SIG_IGN, which the simulator's own processes would inherit.
    """

    def handle(number: int, _frame: Any) -> None:
        if _parent_left(connection):
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handle)


def _serve(connection: Connection, memory: int) -> None:
    from muzerox.envs.registry import make_simulators
    from muzerox.envs.simulators import closing

    batch = make_simulators(**pickle.loads(connection.recv_bytes()))
    connection.send_bytes(DONE)
    arrays: dict[str, np.ndarray] = {}
    with closing(batch.close):
        while True:
            request = connection.recv_bytes()
            shown = batch.reset() if request == RESET else batch.step(arrays["action"].copy())
            reply = DONE
            if not arrays:
                fields = lay_out(shown, getattr(batch, "num_actions", 0))
                os.ftruncate(memory, fields[-1].end)
                arrays = map_fields(memory, fields)
                arrays["legal"][...] = True  # for simulators without a mask; memory is zeros, as their player
                reply = pickle.dumps(fields)
            ended = shown.terminated | shown.truncated
            for name, array in arrays.items():
                if name == "final_observation":  # elsewhere it is the observation, which the parent has
                    array[ended] = shown.final_observation[ended]
                elif hasattr(shown, name):
                    array[...] = getattr(shown, name)
            connection.send_bytes(reply)


def main(control: int, memory: int, lifeline: int) -> None:
    """Serves simulators until the parent closes its end. The arguments are file descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt from the terminal is the parent's to handle
    faulthandler.enable()
    for descriptor in (control, memory, lifeline):
        os.set_inheritable(descriptor, False)
    _die_with_parent(lifeline)
    connection = Connection(control)
    _outlive_requests(connection)
    code = 0
    try:
        _serve(connection, memory)
    except Exception as error:
        if not _parent_left(connection):  # else that is why, and nobody is there to be told
            code = 1
            connection.send_bytes(pickle.dumps(_failure(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever threads the simulator left behind
