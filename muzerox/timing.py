"""Phase clocks and totals: where wall seconds go, and how many updates may go by before anyone is heard."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_REPORT_SECONDS = 0.5  # wall time of the dispatches between two reports


def portion(updates: int, loop_count: int, seconds_an_update: float) -> tuple[int, int]:
    """What a training asks its runtime for at once of so many ``updates`` that are due: ``n`` dispatches of ``count`` updates.

    Reports and signals wait for no more than half a second of them. Where that is less than ``loop_count`` updates, as one that
    was never timed (``seconds_an_update`` is infinite) is taken to be, it is one dispatch, a shorter one.
    """
    most = max(1, min(updates, math.floor(_REPORT_SECONDS / max(seconds_an_update, 1e-9))))
    return (most // loop_count, loop_count) if most >= loop_count else (1, most)


def seconds_since_process_start() -> float:
    """Wall seconds since the operating system started this process, imports included."""
    try:
        with open("/proc/self/stat", errors="replace") as stat, open("/proc/uptime") as uptime:
            ticks = float(stat.read().rpartition(")")[2].split()[19])
            return float(uptime.read().split()[0]) - ticks / _ticks_per_second()
    except OSError:  # no /proc on this system: count from the import of this module
        return time.perf_counter() - _IMPORTED


def _ticks_per_second() -> float:
    import os

    return float(os.sysconf("SC_CLK_TCK"))


_IMPORTED = time.perf_counter()


class PhaseClock:
    """Sums wall seconds by phase; phases do not nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the block towards ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        """Wall seconds since the clock was made."""
        return time.perf_counter() - self.started


class PipelineTotals:
    """What a runtime with threads reported (``Report.pipeline``), over a whole training."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._reports: dict[str, int] = {}

    def add(self, pipeline: Mapping[str, float]) -> None:
        """Another report."""
        for name, value in pipeline.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._reports[name] = self._reports.get(name, 0) + 1

    def result(self) -> dict[str, float]:
        """Sums; of distributions (mean, p50, p90), means over the reports."""

        def total(name: str) -> float:
            return self._sums[name] / (self._reports[name] if name.endswith(("_mean", "_p50", "_p90")) else 1)

        return {name: round(total(name), 4) for name in sorted(self._sums)}
