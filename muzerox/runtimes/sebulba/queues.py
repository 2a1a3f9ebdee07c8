"""Bounded queues that block, are measured and can be closed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from muzerox.runtimes.sebulba.meter import Meter

T = TypeVar("T")


class Closed(Exception):
    """The pipeline is coming to rest: who waits goes home."""


class Interrupted(Exception):
    """The caller asked to stop waiting."""


class Replaced(Exception):
    """A worker given up for hung came back: another has taken its place, and what it makes is not wanted."""


class BoundedQueue(Generic[T]):
    """First in, first out, at most ``capacity`` items; nothing put is ever dropped.

    Waits are metered as ``<name>_put`` and ``<name>_get``, the depth found by each get as ``<name>_depth``.
    """

    def __init__(self, name: str, capacity: int, meter: Meter):
        self.name, self.capacity, self._meter = name, capacity, meter
        self._items: deque[T] = deque()
        lock = threading.RLock()  # reentrant: a signal handler may wake the thread it interrupts
        self._not_full, self._not_empty = threading.Condition(lock), threading.Condition(lock)
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Waits for room. Raises Closed."""
        with self._meter.wait(f"{self.name}_put"), self._not_full:
            self._not_full.wait_for(lambda: self._closed or len(self._items) < self.capacity)
            if self._closed:
                raise Closed
            self._items.append(item)
            self._not_empty.notify()

    def get(self, interrupted: Callable[[], bool] = lambda: False) -> T:
        """Waits for an item. Raises Closed, or Interrupted once ``interrupted()`` holds; :meth:`wake` has it looked at."""
        with self._meter.wait(f"{self.name}_get"), self._not_empty:
            self._meter.observe(f"{self.name}_depth", len(self._items))
            self._not_empty.wait_for(lambda: self._closed or self._items or interrupted())
            if self._closed:
                raise Closed
            if not self._items:
                raise Interrupted
            item = self._items.popleft()
            self._not_full.notify()
            return item

    def wake(self) -> None:
        """Has everyone who waits look again."""
        with self._not_empty:
            self._not_empty.notify_all()
            self._not_full.notify_all()

    def close(self) -> None:
        """Everyone who waits, now or later, gets Closed."""
        with self._not_empty:
            self._closed = True
            self.wake()
