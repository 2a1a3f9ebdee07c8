"""The tuner next to what people would use instead, on grids of which every configuration was measured (``grids.py``).

Played back offline: each searcher, from the same random start for each seed, asks for one configuration after the other and is
told what was measured. Shown are the best found over the best there is, by number of configurations measured (medians over
seeds), how many it takes to come within 1.10 of it, and the seconds: of compiling and timing as measured, and the searcher's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from collected import at_reference_speed
from common import DATA, finish, make_parser, use_device
from grids import GRIDS, base_of
from measuring import Task
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Lines
from searchers import SEARCHERS, Point, Problem, Spent, Trial

MARKS = (4, 8, 16, 24, 32)
NEAR = 1.10
BURST, START = 0.4, 2.0  # seconds that a burst takes at least, and that a process takes until it compiles
console = Console(stderr=True)


class Grid:
    """A grid of which everything was measured."""

    def __init__(self, task: Task, rows: list[dict[str, Any]]):
        from predictor import Measurement
        from tuner.bridge import Config
        from tuner.space import knobs_up_to, make_space
        from tuner.workload import describe

        measured: dict[Point, list[tuple[Any, float]]] = {}
        own = [(row, factor) for row, factor in zip(rows, at_reference_speed(rows), strict=True) if row["task"] == task.name]
        first = Measurement.from_dict(own[0][0]["measurement"])
        self.name, self.hardware = task.name, first.hardware
        base = base_of(task, self.hardware.platform)
        knobs = [knob for knob in knobs_up_to("neutral", task.kind) if knob.path in task.axes]
        knobs = [dataclasses.replace(knob, choices=task.axes[knob.path]) for knob in knobs]
        start = {knob.path: knob.choices[0] for knob in knobs}
        self.space = make_space(knobs, start, describe(base), lambda *_: True, 2**30, np.inf)
        self.target_period = base.train.target_period
        for row, factor in own:
            measurement = Measurement.from_dict(row["measurement"])
            config = Config.from_dict(row["config"])
            point = self.space.encode({knob.path: _value(config, knob.path) for knob in knobs})
            measured.setdefault(point, []).append((measurement, factor))
        self.seconds: dict[Point, float] = {}
        self._measurements: dict[Point, Any] = {}
        for point, several in measured.items():
            times = [m.seconds_per_env_step * factor for m, factor in several if m.outcome == "ok"]
            self._measurements[point] = several[0][0]
            if times and several[0][0].outcome == "ok":
                self.seconds[point] = statistics.geometric_mean(times)
                self._measurements[point] = dataclasses.replace(several[0][0], seconds_per_env_step=self.seconds[point])
        self.best, self.worst = np.log(min(self.seconds.values())), np.log(max(self.seconds.values()))
        self.missing = self.space.size - len(self._measurements)

    def measurement(self, point: Point) -> Any:
        """What was measured at a point."""
        return self._measurements[point]

    def burst_seconds(self, point: Point) -> float:
        """Seconds that timing it took, its process being up."""
        m = self._measurements[point]
        return len(m.repeats) * max(BURST, m.warmup_seconds or 0.0)

    def wall_seconds(self, point: Point) -> float:
        """Seconds that measuring it took by itself."""
        m = self._measurements[point]
        return START + (m.compile_seconds or 0.0) + (m.warmup_seconds or 0.0) + self.burst_seconds(point)


def _value(config: Any, path: str) -> Any:
    from tuner.bridge import get

    return get(config, path)


def load(folder: Path) -> list[Grid]:
    """The grids that were measured everywhere. Raises SystemExit where there is none."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise SystemExit(f"{folder}: nothing measured; run benchmarks/grids.py --record")
    rows = [json.loads(line) for line in files[-1].read_text().splitlines()]
    grids = [Grid(task, rows) for task in GRIDS if any(row["task"] == task.name for row in rows)]
    for grid in grids:
        if grid.missing:
            console.print(f"{grid.name}: {grid.missing} of {grid.space.size} are not measured yet: left out")
    return [grid for grid in grids if not grid.missing] or sys.exit(f"{folder}: no grid is whole; go on with benchmarks/grids.py")


def play(grid: Grid, name: str, seed: int, budget: int) -> list[Trial]:
    """One search, from a start drawn by the seed."""
    points = sorted(grid.seconds)
    problem = Problem(grid, points[int(np.random.default_rng(seed).integers(len(points)))], budget)
    with contextlib.suppress(Spent):
        SEARCHERS[name](problem, seed)
    return problem.trials


def judge(grid: Grid, trials: list[Trial], budget: int) -> dict[str, float]:
    """Figures of one search: the best so far over the best there is, at each mark and to come within ``NEAR``."""
    ratios = np.minimum.accumulate([trial.seconds for trial in trials]) / np.exp(grid.best)
    ratios = np.concatenate([ratios, np.full(budget - len(ratios), ratios[-1])])  # one that only repeated itself
    near = np.flatnonzero(ratios <= NEAR)
    return {
        **{f"after_{mark}": float(ratios[mark - 1]) for mark in MARKS if mark <= budget},
        "trials_to_near": float(near[0] + 1) if len(near) else float("inf"),
        "seconds_to_near": trials[near[0]].elapsed if len(near) and near[0] < len(trials) else float("inf"),
    }


def show(figures: dict[str, Any]) -> None:
    """Tables for people."""
    for name, grid in figures["grids"].items():
        size = f"{grid['configurations']} configurations, best/worst {grid['spread']:.1f}"
        title = f"{name}: {size}, {grid['near']:.1%} within {NEAR:.2f}"
        lines = Lines(title=title)
        lines.add_column("searcher", no_wrap=True)
        for header in (*(f"{mark}" for mark in MARKS), f"to {NEAR:.2f}", "seconds"):
            lines.add_column(header, justify="right", no_wrap=True)
        for searcher, found in grid["searchers"].items():
            cells = [f"{found[f'after_{mark}']:.2f}" if f"after_{mark}" in found else "" for mark in MARKS]
            lines.add_row(searcher, *cells, f"{found['trials_to_near']:.0f}", f"{found['seconds_to_near']:.0f}")
        console.print(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budget", type=int, default=48, help="configurations that a search may measure")
    parser.add_argument("--data", type=Path, default=DATA / "grids", help="folder of what was measured")
    parser.add_argument("--only", metavar="TEXT", help="searchers whose name has it")
    args = parser.parse_args()
    if args.seeds < 1 or args.budget < 1:
        parser.error(f"--seeds ({args.seeds}) and --budget ({args.budget}) must be at least 1")
    use_device(args.device)
    figures: dict[str, Any] = {"seeds": args.seeds, "budget": args.budget, "grids": {}}
    names = [name for name in SEARCHERS if not args.only or args.only in name]
    with Progress(console=console) as progress:
        for grid in load(args.data):
            near = sum(value <= NEAR * np.exp(grid.best) for value in grid.seconds.values()) / len(grid.seconds)
            found: dict[str, dict[str, float]] = {}
            for name in progress.track(names, description=grid.name):
                searches = [judge(grid, play(grid, name, seed, args.budget), args.budget) for seed in range(args.seeds)]
                found[name] = {key: float(np.median([figure[key] for figure in searches])) for key in searches[0]}
            figures["grids"][grid.name] = {
                "configurations": len(grid.seconds),
                "spread": float(np.exp(grid.worst - grid.best)),
                "near": float(near),
                "searchers": found,
            }
    show(figures)
    finish("tuner", figures, record=args.record)


if __name__ == "__main__":
    main()
