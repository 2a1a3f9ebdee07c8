"""Rows of measured configurations: what is measured, how, and the files that keep it. See ``collect.py`` and ``grids.py``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterable, Sequence
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
    from tuner.measure import Bursts, measure_group

    group = [(point.config, point.loop_counts) for point in together]
    before = probe()
    measured = measure_group(group, Bursts(args.rounds, args.seconds), hardware=hardware, timeout=args.timeout)
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

    Points are taken as they are needed: to draw one can take longer than to measure it.
    """
    points, bar = iter(points), progress.add_task(description, total=total)
    while group := list(itertools.islice(points, args.at_once)):
        new = measure(group, hardware, args)
        append(file, new)
        rows.extend(new)
        progress.advance(bar, len(new))


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
    parser.add_argument("--at-once", type=_count, default=2, help="processes that compile together, and are timed in alternation")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that compiling, or a burst, may take")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number
