"""Threads that a test left behind."""

from __future__ import annotations

import threading
import time


def threads_beside(before: list[threading.Thread], seconds: float = 0.0) -> list[threading.Thread]:
    """The threads that live and are not in ``before``, once there are none or ``seconds`` have passed.

    Numbers of threads do not tell: one of ``before`` (a checkpointer's, of an earlier test) may end at any moment.
    """
    deadline = time.monotonic() + seconds
    while (beside := [thread for thread in threading.enumerate() if thread not in before]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return beside
