"""What the pipeline says of itself: seconds waited, counts, and distributions, added from any thread."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import numpy as np

_KEPT = 4096  # newest values of a distribution


class _Wait:
    """A block whose seconds are counted. A class: a generator's context costs thrice as much, thousands of times a second."""

    __slots__ = ("_meter", "_names", "_start")

    def __init__(self, meter: Meter, *names: str):
        self._meter, self._names = meter, names

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._meter._waited(self._names[0], self._names[1], self._start)


class Meter:
    """Sums and distributions by name, since the last :meth:`take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = time.perf_counter()  # the last take
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._values: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, amount: float = 1.0) -> None:
        """Adds to a sum."""
        with self._lock:
            self._sums[name] += amount

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a distribution."""
        with self._lock:
            values = self._values[name]
            if len(values) >= _KEPT:
                del values[: _KEPT // 2]
            values.append(value)

    def wait(self, name: str) -> _Wait:
        """Counts the seconds inside a ``with`` block since the last :meth:`take`, and that there was one."""
        return _Wait(self, f"wait_{name}_seconds", f"wait_{name}_count")

    def _waited(self, seconds_name: str, count_name: str, start: float) -> None:
        with self._lock:
            # Who waits while nothing is asked of the pipeline, or its process is stopped, tells nothing of what follows.
            self._sums[seconds_name] += time.perf_counter() - max(start, self._since)
            self._sums[count_name] += 1

    def take(self) -> dict[str, float]:
        """Sums, and mean, median and 90th percentile of the distributions; starts from nothing again."""
        with self._lock:
            sums, values = dict(self._sums), dict(self._values)
            self._since = time.perf_counter()
            self._sums.clear()
            self._values.clear()
        for name, observed in values.items():
            sums[f"{name}_mean"] = float(np.mean(observed))
            sums[f"{name}_p50"], sums[f"{name}_p90"] = (float(x) for x in np.percentile(observed, (50, 90)))
        return sums
