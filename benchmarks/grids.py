"""Measures every configuration of two grids, so that a search over them can be replayed offline by any method.

A grid is an environment under a runtime; its axes are knobs of the tuner that leave learning as it is. The rest is the
environment's defaults, with more search and less learning: with the defaults learning takes most of the time, and no
configuration is even three times as fast as another. Its processes are measured in an order drawn once, in pairs that alternate
burst by burst, so that a machine that slows down does not look like a knob; under Anakin a process measures every loop count.
What then is within 1.3 times the best is measured twice more: the optimum of hundreds of noisy figures would be luck.

Rows go to ``grids/<kind of machine>.jsonl`` as they are measured, with ``--record`` to the one under ``data/``. Run it again
to go on where it was stopped. Nothing that ships was fitted to these rows, or chosen by them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import DATA, make_parser, use_device
from measuring import Point, Task, add_options, console, measure_all, progress_bar, read, rows_of
from rich.table import Table

NEAR = 1.3  # times the best: measured again
AGAIN = 2  # so many times
GRIDS = (
    Task(
        "anakin",
        "gymnax:Acrobot-v1",
        "anakin",
        {
            "runtime.num_envs": (2, 8, 32, 128),
            "search.engine": ("mctx", "fused"),
            "search.split": (1, 2),
            "precision.level": ("O0", "O1", "O2"),
            "allocation.cores": (1, 2),
            "runtime.loop_count": (1, 8, 64),
        },
        {"network.width": 256, "search.num_simulations": 50, "train.batch_size": 64, "train.replay_ratio": 1.0},
    ),
    Task(
        "sebulba",
        "gymnasium:Acrobot-v1",
        "sebulba",
        {
            "runtime.num_envs": (1, 4, 16, 64),
            "runtime.selfplay_workers": (1, 2, 4),
            "runtime.loop_count": (1, 4, 16),
            "runtime.role_threads": (0, 1),
            "runtime.step_in": ("thread", "process"),
            "search.engine": ("mctx", "fused"),
        },
        {"search.num_simulations": 32, "train.batch_size": 64, "train.replay_ratio": 1.0},
    ),
)


def base_of(grid: Task, platform: str) -> Any:
    """The configuration that a grid's axes change."""
    from tuner.bridge import Config, concrete

    return concrete(Config.preset(grid.env).replace({"runtime.kind": grid.kind, **grid.base}), platform)


def points_of(grid: Task, platform: str) -> list[Point]:
    """The grid's processes, in an order drawn once."""
    base = base_of(grid, platform)
    axes = dict(grid.axes)
    first, *further = axes.pop("runtime.loop_count") if grid.kind == "anakin" else (None,)
    points = []
    for index, values in enumerate(itertools.product(*axes.values())):
        changes = dict(zip(axes, values, strict=True)) | ({} if first is None else {"runtime.loop_count": first})
        points.append(Point(grid, index, 0, base.replace(changes), tuple(further)))
    return [points[i] for i in np.random.default_rng(0).permutation(len(points))]


def missing(points: Sequence[Point], rows: Sequence[dict[str, Any]]) -> list[Point]:
    """Points that no row tells of."""
    done = {(row["task"], row["index"], row["repeat"]) for row in rows}
    return [point for point in points if (point.task.name, point.index, point.repeat) not in done]


def near_the_best(points: Sequence[Point], rows: Sequence[dict[str, Any]], repeat: int) -> list[Point]:
    """Processes with the loop counts at which they came near the best of their grid, to be measured once more."""
    ran = [row for row in rows if row["task"] == points[0].task.name and row["measurement"]["outcome"] == "ok"]
    first = [row for row in ran if row["repeat"] == 0]
    best = min(row["measurement"]["seconds_per_env_step"] for row in first)
    counts: dict[int, list[int]] = {}
    for row in first:
        if row["measurement"]["seconds_per_env_step"] < NEAR * best:
            counts.setdefault(row["index"], []).append(row["config"]["runtime"]["loop_count"])
    again = []
    for point in points:
        if point.index in counts:
            main, *further = counts[point.index]
            config = point.config.replace("runtime.loop_count", main)
            again.append(Point(point.task, point.index, repeat, config, tuple(further)))
    return missing(again, rows)


def show(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """The table at the end."""
    table = Table(title=f"{file}: {len(rows)} rows")
    for column in ("grid", "measured", "failed", "best, steps/s", "worst", "best/worst", "within 1.10 of the best"):
        table.add_column(column, justify="left" if column == "grid" else "right")
    for grid in GRIDS:
        seconds: dict[tuple[int, int], list[float]] = {}
        own = [row for row in rows if row["task"] == grid.name]
        for row in own:
            if row["measurement"]["outcome"] == "ok":
                key = row["index"], row["config"]["runtime"]["loop_count"]
                seconds.setdefault(key, []).append(row["measurement"]["seconds_per_env_step"])
        if not seconds:
            continue
        found = sorted(statistics.geometric_mean(values) for values in seconds.values())
        near = sum(value < 1.1 * found[0] for value in found) / len(found)
        failed = sum(row["repeat"] == 0 for row in own) - len(found)
        figures = f"{1 / found[0]:,.0f}", f"{1 / found[-1]:,.0f}", f"{found[-1] / found[0]:.1f}", f"{near:.1%}"
        table.add_row(grid.name, str(len(found)), str(failed), *figures)
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    add_options(parser)
    parser.add_argument("--only", choices=[grid.name for grid in GRIDS], help="one of the grids")
    parser.add_argument("--out", type=Path, help="folder of the rows (default: grids, here or with --record under data)")
    args = parser.parse_args()
    use_device(args.device)

    from tuner.measuring.fingerprint import fingerprint

    hardware = fingerprint()
    import jax

    jax.config.update("jax_platforms", "cpu")  # the device is for those who are measured
    file = (args.out or (DATA if args.record else Path()) / "grids") / f"{hardware.id}.jsonl"
    rows = read(file)
    try:
        with progress_bar() as progress:
            for grid in GRIDS:
                if args.only not in (None, grid.name):
                    continue
                points = points_of(grid, hardware.platform)
                first = missing(points, rows)
                measure_all(first, rows_of(first), rows, hardware, args, file, progress, grid.name)
                for repeat in range(1, AGAIN + 1):
                    again = near_the_best(points, rows, repeat)
                    measure_all(again, rows_of(again), rows, hardware, args, file, progress, f"{grid.name}: near the best")
    except KeyboardInterrupt:
        console.print("stopped; run it again to go on")
    show(rows, file)


if __name__ == "__main__":
    main()
