"""Threads that work until told to stop: what fails is logged and replaced, what hangs is given up and replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from muzerox.errors import RunFailed
from muzerox.runtimes.sebulba.meter import Meter
from muzerox.runtimes.sebulba.queues import Closed, Replaced

log = logging.getLogger("muzerox.sebulba")
_JOIN_SECONDS = 5.0  # a thread that stopping finds inside a simulator is left to end with the process


class Worker:
    """One thread's place in the crew; handed to its body."""

    def __init__(self, role: str, index: int, meter: Meter):
        self.role, self.index, self._meter = role, index, meter
        self.failures_in_a_row = 0
        self.deadline: float | None = None  # by time.monotonic, while something that may hang is under way
        self.late = ""  # what to say of it if it does
        self.given_up = False
        self._cpu_seconds = 0.0
        self.thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Role and number."""
        return f"{self.role} {self.index}"

    def done(self) -> None:
        """Something was finished: failures before it no longer count."""
        self.failures_in_a_row = 0
        now = time.thread_time()
        self._meter.add(f"cpu_{self.role}_seconds", now - self._cpu_seconds)
        self._meter.add(f"{self.role}_count")
        self._cpu_seconds = now

    @contextmanager
    def within(self, seconds: float, doing: str = "") -> Iterator[None]:
        """The block has failed when its environments take longer for ``doing``; the crew then gives this thread up."""
        self.late = f"its environments took longer than {seconds:g} seconds {doing}"
        self.deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self.deadline = None


class Crew:
    """The worker threads of a pipeline.

    Args:
      max_failures: failures of one worker in a row that end everything.
      on_end: called once, when they do, with what to tell the user.
    """

    def __init__(self, meter: Meter, *, max_failures: int, on_end: Callable[[RunFailed], None]):
        self._meter, self._max_failures, self._on_end = meter, max_failures, on_end
        self._lock = threading.RLock()
        self._workers: dict[tuple[str, int], tuple[Worker, Callable[[Worker], None]]] = {}
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self.failures = 0

    def start(self, role: str, index: int, body: Callable[[Worker], None]) -> None:
        """Runs ``body(worker)`` in a thread, again after each failure, until it raises Closed."""
        with self._lock:
            self._start(role, index, body, failures_in_a_row=0)

    def watch(self, period: float) -> None:
        """Gives up workers that overrun their deadline; looks every ``period`` seconds."""
        self._watcher = threading.Thread(target=self._watch, args=(period,), name="sebulba watcher", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """Joins every thread. What they wait for must have been closed before."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        end = time.monotonic() + _JOIN_SECONDS
        with self._lock:
            workers = [worker for worker, _ in self._workers.values()]
        for worker in workers:
            assert worker.thread is not None
            worker.thread.join(max(0.0, end - time.monotonic()))
            if worker.thread.is_alive():
                log.warning("%s did not stop; it ends with the process", worker.name)

    def _start(self, role: str, index: int, body: Callable[[Worker], None], *, failures_in_a_row: int) -> None:
        worker = Worker(role, index, self._meter)
        worker.failures_in_a_row = failures_in_a_row
        worker.thread = threading.Thread(target=self._run, args=(worker, body), name=f"sebulba {worker.name}", daemon=True)
        self._workers[role, index] = (worker, body)
        worker.thread.start()

    def _run(self, worker: Worker, body: Callable[[Worker], None]) -> None:
        while not self._stopping.is_set():
            try:
                body(worker)
                return
            except (Closed, Replaced):
                return
            except BaseException as error:  # a simulator may also call sys.exit, and would end this thread and no other
                with self._lock:  # the watcher gives up under it: a worker has failed, or hangs and has a successor, not both
                    if self._stopping.is_set() or worker.given_up:
                        return
                    log.exception("%s failed and is replaced", worker.name)
                    self._count_failure(worker, f"{type(error).__name__}: {error}")

    def _count_failure(self, worker: Worker, what: str) -> None:
        self._meter.add("failures")
        worker.failures_in_a_row += 1
        with self._lock:
            self.failures += 1
        if worker.failures_in_a_row >= self._max_failures:
            self._stopping.set()
            line = " ".join(what.split())[:300]
            self._on_end(RunFailed(f"{worker.name} failed {worker.failures_in_a_row} times in a row; the last: {line}"))

    def _watch(self, period: float) -> None:
        while not self._stopping.wait(period):
            now = time.monotonic()
            with self._lock:
                late = [pair for pair in self._workers.values() if pair[0].deadline is not None and pair[0].deadline < now]
                for worker, body in late:
                    if self._stopping.is_set():  # the one before ended everything
                        return
                    worker.given_up = True
                    log.error("%s hangs and is replaced", worker.name)
                    self._count_failure(worker, worker.late)
                    if not self._stopping.is_set():
                        self._start(worker.role, worker.index, body, failures_in_a_row=worker.failures_in_a_row)
