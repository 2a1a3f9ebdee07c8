"""Rows of measured configurations: what is measured, how, and the files that keep it. See ``collect.py`` and ``grids.py``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import make_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = make_console()


@dataclasses.dataclass(frozen=True)
class Task:
    """An environment under a runtime."""

    name: str
    env: str
    kind: str
    axes: dict[str, tuple[Any, ...]]  # beside those of its runtime, or instead
    base: dict[str, Any] = dataclasses.field(default_factory=dict)  # what of the environment's defaults it changes


@dataclasses.dataclass(frozen=True)
class Point:
    """One process to be measured."""

    task: Task
    index: int  # among all points of the task, those left out counted
    repeat: int  # how many times it was measured before
    config: Any
    loop_counts: tuple[int, ...]  # further ones of the same process


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of a collection; a last line that a kill cut short is left out, and cut off."""
    if not file.exists():
        return []
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(file, len(whole))
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise SystemExit(f"{file}:{number}: not a row: {line[:80]!r}") from None
    return rows


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Adds rows and returns when they are on disk."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
        out.flush()
        os.fsync(out.fileno())


def probe() -> float:
    """Seconds of the same little work every time, the least of several: how fast the machine is at the moment."""
    import numpy as np

    matrix, array, times = np.ones((384, 384), np.float32), np.ones(2**22, np.float32), []
    for _ in range(7):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0] + (array * 2.0)[0])
        times.append(time.perf_counter() - start)
    return min(times)


def measure(together: Sequence[Point], hardware: Any, args: Any) -> list[dict[str, Any]]:
    """The rows of processes that are measured in alternation."""
    from tuner.measuring.measure import Bursts, Timing, measure_timings

    before, timings, first = probe(), [], 0
    try:
        for point in together:
            cores = point.config.allocation.cores or hardware.cores
            with _cores_from(first, cores) if args.spare_cores else contextlib.nullcontext():
                timings.append(Timing(point.config, hardware=hardware, timeout=args.timeout))
            first += cores
            if not args.spare_cores:
                timings[-1].wait()  # two compilations at once would fight for the cores
        for timing in timings if args.spare_cores else ():
            timing.wait()
            timing.ready.pop("compile_seconds", None)
        bursts = Bursts(args.rounds, args.seconds, enough=args.enough)
        measured = measure_timings(timings, [point.loop_counts for point in together], bursts)
    finally:
        for timing in timings:
            timing.worker.stop()
    probes = [before, probe()]
    return [
        {
            "task": point.task.name,
            "index": point.index,
            "repeat": point.repeat,
            "probe_seconds": probes,
            "config": point.config.replace("runtime.loop_count", int(found.workload.loop_count)).to_dict(),
            "measurement": found.to_dict(),
        }
        for point, several in zip(together, measured, strict=True)
        for found in several
    ]


@contextlib.contextmanager
def _cores_from(first: int, count: int) -> Iterator[None]:
    """Processes started meanwhile run on so many cores from the ``first`` on, round and round: each would take the first ones."""
    every = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {every[(first + index) % len(every)] for index in range(min(count, len(every)))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def measure_all(
    points: Iterable[Point],
    total: int,
    rows: list[dict[str, Any]],
    hardware: Any,
    args: argparse.Namespace,
    file: Path,
    progress: Progress,
    description: str,
) -> None:
    """Measures points, so many at once; adds what it finds, ``total`` rows, to the rows and to the file.

    Points are taken as they are needed: to draw one can take longer than to measure it. Where cores are to spare the next are
    drawn meanwhile.
    """
    points, bar = iter(points), progress.add_task(description, total=total)
    with ThreadPoolExecutor(1) as drawing:

        def draw() -> Future[list[Point]]:
            return drawing.submit(lambda: list(itertools.islice(points, args.at_once)))

        following = draw()
        while group := following.result():
            if args.spare_cores:
                following = draw()
            new = measure(group, hardware, args)
            append(file, new)
            rows.extend(new)
            progress.advance(bar, len(new))
            if not args.spare_cores:
                following = draw()


def rows_of(points: Sequence[Point]) -> int:
    """How many rows measuring them makes."""
    return sum(1 + len(point.loop_counts) for point in points)


def progress_bar() -> Progress:
    """Of so many rows, with the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How a process is measured."""
    parser.add_argument("--rounds", type=_count, default=7, help="timed bursts of each")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a burst, about")
    parser.add_argument(
        "--enough", type=float, default=math.inf, help="seconds of a configuration's bursts, after which none follows"
    )
    parser.add_argument("--at-once", type=_count, default=2, help="processes that are timed in alternation")
    parser.add_argument(
        "--spare-cores", action="store_true", help="they compile at the same time, on cores of their own; no row tells how long"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that compiling, or a burst, may take")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number
