"""The tuner next to what people would use instead, on grids of which every configuration was measured (``grids.py``).

Played back offline: each searcher, from the same random start for each seed, asks for one configuration after the other and is
told what was measured. Shown are the best found over the best there is, by number of configurations measured (medians over
seeds), how many it takes to come within 1.10 of it, and the seconds: of compiling and timing as measured, and the searcher's own.
``--plot`` draws both courses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from collected import at_reference_speed
from common import DATA, finish, make_console, make_parser, use_device
from grids import GRIDS, base_of
from measuring import Task
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table as Lines
from searchers import NEEDS, SEARCHERS, Point, Problem, Spent, Trial

MARKS = (4, 8, 16, 24, 32)
SECONDS = (60, 120, 240, 480)
NEAR = 1.10
BURST, START = 0.4, 2.0  # seconds that a burst takes at least, and that a process takes until it compiles
console = make_console()


class Grid:
    """A grid of which everything was measured."""

    def __init__(self, task: Task, rows: list[dict[str, Any]]):
        from predictor import Measurement
        from tuner.bridge import Config
        from tuner.measuring.workload import describe
        from tuner.space import knobs_up_to, make_space

        measured: dict[Point, list[tuple[Any, float]]] = {}
        own = [(row, factor) for row, factor in zip(rows, at_reference_speed(rows), strict=True) if row["task"] == task.name]
        first = Measurement.from_dict(own[0][0]["measurement"])
        self.name, self.hardware = task.name, first.hardware
        # What it was measured with, wherever it is played back: on as many cores, with an environment that took as long.
        base = base_of(task, self.hardware.platform).replace("allocation.cores", self.hardware.cores)
        about = dataclasses.replace(describe(base), host_step_seconds=first.workload.host_step_seconds)
        knobs = [knob for knob in knobs_up_to("neutral", task.kind) if knob.path in task.axes]
        knobs = [dataclasses.replace(knob, choices=task.axes[knob.path]) for knob in knobs]
        start = {knob.path: knob.choices[0] for knob in knobs}
        self.space = make_space(knobs, start, about, lambda *_: True, 2**30, np.inf)
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


class Course(NamedTuple):
    """The best found over the best there is, after so many trials and so many seconds; infinite before anything was measured."""

    by_trial: np.ndarray  # [budget]
    elapsed: np.ndarray  # [budget] seconds

    def at(self, seconds: np.ndarray) -> np.ndarray:
        """By time instead."""
        done = np.searchsorted(self.elapsed, seconds, side="right")
        return np.concatenate([[np.inf], self.by_trial])[done]


def course_of(grid: Grid, trials: list[Trial], budget: int) -> Course:
    """The course of one search; one that only repeated itself stays where it was."""
    ratios = np.minimum.accumulate([trial.seconds for trial in trials]) / np.exp(grid.best)
    elapsed = [trial.elapsed for trial in trials]
    left = budget - len(trials)
    return Course(np.concatenate([ratios, np.full(left, ratios[-1])]), np.concatenate([elapsed, np.full(left, elapsed[-1])]))


def judge(course: Course) -> dict[str, float]:
    """Figures of one search: at each mark, and what it takes to come within ``NEAR``."""
    near = np.flatnonzero(course.by_trial <= NEAR)
    return {
        **{f"after_{mark}": float(course.by_trial[mark - 1]) for mark in MARKS if mark <= len(course.by_trial)},
        **{f"after_{mark}_seconds": float(course.at(np.array(mark))) for mark in SECONDS},
        "trials_to_near": float(near[0] + 1) if len(near) else math.inf,
        "seconds_to_near": float(course.elapsed[near[0]]) if len(near) else math.inf,
    }


def draw(path: Path, courses: dict[str, dict[str, list[Course]]]) -> None:
    """Medians over seeds, by trial and by time; a row of plots for each grid."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5 * len(courses)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(courses), 2, squeeze=False)
    colors = (*colormaps["tab10"].colors, "black", "gold", "navy", "magenta")
    for (name, searchers), (left, right) in zip(courses.items(), rows, strict=True):
        for color, (searcher, several) in zip(itertools.cycle(colors), searchers.items(), strict=False):
            style = {"linewidth": 2.5 if searcher == "ours" else 1.2, "linestyle": ":" if searcher.startswith("ours,") else "-"}
            style |= {"color": color}
            trials = np.arange(1, len(several[0].by_trial) + 1)
            left.plot(trials, np.median([course.by_trial for course in several], axis=0), label=searcher, **style)
            seconds = np.linspace(0.0, float(np.median([course.elapsed[-1] for course in several])), 400)
            right.plot(seconds, np.median([course.at(seconds) for course in several], axis=0), label=searcher, **style)
        for axes, what in ((left, "configurations measured"), (right, "seconds, compiling and searching included")):
            axes.axhline(NEAR, color="tab:gray", linewidth=0.8)
            axes.set(xlabel=what, ylabel="best found / best there is", title=name, yscale="log", ylim=(0.98, 3.0))
            axes.set_yticks([1.0, 1.1, 1.25, 1.5, 2.0, 3.0], labels=["1.0", "1.1", "1.25", "1.5", "2", "3"], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        right.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _plain(value: float) -> float | None:
    """As JSON has it: None where it never came so far."""
    return value if math.isfinite(value) else None


def show(figures: dict[str, Any]) -> None:
    """Tables for people."""
    for name, grid in figures["grids"].items():
        size = f"{grid['configurations']} configurations, best/worst {grid['spread']:.1f}"
        title = f"{name}: {size}, {grid['near']:.1%} within {NEAR:.2f}"
        lines = Lines(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fits into 80 columns
        lines.add_column("searcher", no_wrap=True)
        for header in (*(f"{mark}" for mark in MARKS), f"to {NEAR:.2f}", "seconds"):
            lines.add_column(header, justify="right", no_wrap=True)
        for searcher, found in grid["searchers"].items():
            cells = [f"{found[f'after_{mark}']:.2f}" if f"after_{mark}" in found else "" for mark in MARKS]
            trials, seconds = found["trials_to_near"], found["seconds_to_near"]
            needed = ["never"] * 2 if trials is None or seconds is None else [f"{trials:g}", f"{seconds:.0f}"]
            lines.add_row(searcher, *cells, *needed)
        console.print(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budget", type=int, default=48, help="configurations that a search may measure")
    parser.add_argument("--data", type=Path, default=DATA / "grids", help="folder of what was measured")
    parser.add_argument("--only", metavar="NAME", action="append", choices=list(SEARCHERS), help="a searcher; again for more")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the courses of all searchers")
    args = parser.parse_args()
    if args.seeds < 1 or args.budget < 1:
        parser.error(f"--seeds ({args.seeds}) and --budget ({args.budget}) must be at least 1")
    use_device(args.device)
    figures: dict[str, Any] = {"seeds": args.seeds, "budget": args.budget, "grids": {}}
    names = [name for name in SEARCHERS if not args.only or name in args.only]
    for name, packages in NEEDS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if name in names and missing:
            console.print(f"{name}: left out, it needs {', '.join(missing)}: pip install 'muzerox\\[searchers]'")
            names.remove(name)
    courses: dict[str, dict[str, list[Course]]] = {}
    with Progress(console=console) as progress:
        for grid in load(args.data):
            near = sum(value <= NEAR * np.exp(grid.best) for value in grid.seconds.values()) / len(grid.seconds)
            found: dict[str, dict[str, float | None]] = {}
            for name in progress.track(names, description=grid.name):
                played = [course_of(grid, play(grid, name, seed, args.budget), args.budget) for seed in range(args.seeds)]
                courses.setdefault(grid.name, {})[name] = played
                searches = [judge(course) for course in played]
                medians = {key: float(np.median([figure[key] for figure in searches])) for key in searches[0]}
                found[name] = {key: _plain(value) for key, value in medians.items()}
                if not console.is_terminal:  # where no bar is seen
                    console.print(f"{grid.name}: {name}: {found[name]['trials_to_near']} to {NEAR:.2f}")
            figures["grids"][grid.name] = {
                "configurations": len(grid.seconds),
                "spread": float(np.exp(grid.worst - grid.best)),
                "near": float(near),
                "searchers": found,
            }
    show(figures)
    if args.plot:
        draw(args.plot, courses)
        console.print(f"drawn: {args.plot}")
    finish("tuner", figures, record=args.record)


if __name__ == "__main__":
    main()
