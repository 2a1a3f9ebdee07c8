"""Measures configurations drawn by a space-filling design, for the predictor to learn from and to be judged by.

Every task (environment and runtime) has axes, and every axis its choices; scrambled Sobol points choose among them, so that
any first part of a collection covers the space evenly. Processes are measured in pairs, or as many at once as --at-once says,
burst by burst in alternation; under Anakin a process measures a second loop count too. At the end everything that ran is measured
again, in other processes, in the same order: the differences are the noise floor. What failed is a row as well.

Rows go to ``collected/<kind of machine>.jsonl`` as they are measured, with ``--record`` to the one under ``data/``. Run it again
to go on where it was stopped, or with a larger ``--count`` or ``--again`` for more.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import DATA, make_parser, use_device
from measuring import Point, Task, add_options, append, console, measure_all, progress_bar, read, rows_of
from rich.table import Table

_CONTRADICTIONS = 1000  # points in a row that contradict themselves: the axes do


_COMMON: dict[str, tuple[Any, ...]] = {
    "network.width": (16, 32, 64, 128, 256),
    "network.depth": (1, 2, 3),
    "network.num_bins": (21, 101),
    "search.algorithm": ("gumbel", "gumbel", "muzero"),
    "search.num_simulations": (2, 4, 8, 16, 32, 64),
    "search.engine": ("mctx", "fused"),
    "train.batch_size": (32, 64, 128, 256, 512),
    "train.unroll_steps": (1, 3, 5),
    "train.td_steps": (1, 5, 10, 40),
    "train.replay_ratio": (0.5, 1.0, 2.0, 4.0, 8.0),
    "train.reanalyze_fraction": (0.0, 0.0, 0.25, 0.5, 1.0),
    "replay.capacity": (2**16, 2**17, 2**18),
    "replay.kind": ("prioritized", "prioritized", "uniform"),
    "replay.placement": ("device", "host"),
    "precision.level": ("O0", "O0", "O1", "O2"),
}
_ANAKIN = _COMMON | {
    "runtime.num_envs": (8, 16, 32, 64, 128, 256, 512),
    "runtime.loop_count": (1, 2, 4, 8, 16, 32, 64),
    "search.split": (1, 1, 2, 4),
}
_SEBULBA = _COMMON | {
    "runtime.num_envs": (4, 8, 16, 32, 64),
    "runtime.loop_count": (1, 2, 4, 8, 16),
    "runtime.selfplay_workers": (1, 2, 3, 4),
    "runtime.cpu_actors": (1, 2, 4),
    "runtime.search_queue_size": (1, 2, 4, 8),
    "runtime.batch_queue_size": (1, 2, 4, 8, 16),
    "runtime.role_threads": (0, 1, 2),
}
_GRID = {"network.width": (8, 16, 32), "network.depth": (1, 2)}
_MORE = {  # where there is an accelerator
    "network.width": (512, 1024),
    "search.num_simulations": (128,),
    "train.batch_size": (1024, 2048),
    "runtime.num_envs": (1024, 2048, 4096),
}
# GiB: some run out of it, which is to be foreseen. A process that uses a GPU holds a gigabyte, and compiling for it two more.
_MEMORY = {"cpu": (0.8, 1.1, 1.5), "gpu": (2.0, 4.0, 6.0), "tpu": (2.0, 4.0, 6.0)}
TASKS = (
    Task("vector", "gymnax:CartPole-v1", "anakin", _ANAKIN),
    Task("host", "gymnasium:CartPole-v1", "sebulba", _SEBULBA | {"runtime.step_in": ("thread", "process")}),
    Task("image", "gymnax:Breakout-MinAtar", "anakin", _ANAKIN | _GRID),
    Task("vector, threads", "gymnax:CartPole-v1", "sebulba", _SEBULBA),
    Task("board", "pgx:connect_four", "anakin", _ANAKIN | _GRID),
    Task("image, threads", "gymnax:Breakout-MinAtar", "sebulba", _SEBULBA | _GRID),
)


def choices_of(task: Task, hardware: Any) -> dict[str, tuple[Any, ...]]:
    """The axes of a task on a machine."""
    axes = dict(task.axes)
    if hardware.platform != "cpu":
        axes |= {name: axes[name] + more for name, more in _MORE.items()}
    fewest = 1 if hardware.platform == "cpu" else 2  # one would compile for an accelerator for long
    cores = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if fewest <= n <= hardware.cores]
    return axes | {"allocation.cores": tuple(cores), "allocation.memory_gib": (None,) * 6 + _MEMORY[hardware.platform]}


def points_of(task: Task, hardware: Any, most_seconds: float, first: int) -> Iterator[Point]:
    """The task's processes from its ``first`` Sobol point on, without end.

    Those that contradict themselves or would take too long are left out.
    """
    from scipy.stats import qmc

    from predictor import RuntimePredictor
    from tuner.bridge import Config, ConfigError, concrete
    from tuner.measuring.session import cycle_of
    from tuner.measuring.workload import describe

    axes, model = choices_of(task, hardware), RuntimePredictor()
    sobol = qmc.Sobol(len(axes), seed=TASKS.index(task))
    if first:  # by none it overflows
        sobol.fast_forward(first)
    base = Config.preset(task.env).replace("runtime.kind", task.kind)
    contradictions = 0  # in a row
    for index in itertools.count(first):
        drawn = sobol.random(1)[0]
        changes = {name: choices[int(x * len(choices))] for (name, choices), x in zip(axes.items(), drawn, strict=True)}
        try:
            config = concrete(base.replace(changes), hardware.platform)
        except ConfigError:  # choices that exclude one another, such as a split that does not divide the environments
            contradictions += 1
            if contradictions == _CONTRADICTIONS:
                raise
            continue
        contradictions = 0
        expected = model.predict(describe(config), hardware)
        # No burst is shorter than what all environments' next row is learnt from, nor a process warm before its queues are full.
        if max(cycle_of(config) / expected.updates_per_second, expected.warmup_seconds) > most_seconds:
            continue
        further: tuple[int, ...] = ()
        if task.kind == "anakin":
            loop_count = config.runtime.loop_count
            further = (max(axes["runtime.loop_count"], key=lambda n: abs(math.log(n / loop_count))),)
        yield Point(task, index, 0, config, further)


def design(rows: Sequence[dict[str, Any]], count: int, hardware: Any, most_seconds: float) -> Iterator[Point]:
    """Processes that are missing for ``rows`` to be of ``count`` configurations, from the tasks that have the fewest."""
    own = [{row["index"] for row in rows if row["task"] == task.name} for task in TASKS]
    streams = [points_of(task, hardware, most_seconds, max(seen, default=-1) + 1) for task, seen in zip(TASKS, own, strict=True)]
    processes, configurations = [len(seen) for seen in own], sum(row["repeat"] == 0 for row in rows)
    while configurations < count:
        fewest = processes.index(min(processes))
        point = next(streams[fewest])
        processes[fewest] += 1
        configurations += 1 + len(point.loop_counts)
        yield point


def measured_again(rows: Sequence[dict[str, Any]], times: int) -> Iterator[Point]:
    """Processes of ``rows`` that ran, all once more before any of them twice, until each was measured again ``times``."""
    from tuner.bridge import Config

    tasks = {task.name: task for task in TASKS}
    processes: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        processes.setdefault((row["task"], row["index"], row["repeat"]), []).append(row)
    first = {key: own for key, own in processes.items() if key[2] == 0}
    for repeat in range(1, times + 1):
        for (name, index, _), own in first.items():
            ran = all(row["measurement"]["outcome"] == "ok" for row in own)
            if ran and (name, index, repeat) not in processes:
                further = tuple(row["config"]["runtime"]["loop_count"] for row in own[1:])
                yield Point(tasks[name], index, repeat, Config.from_dict(own[0]["config"]), further)


def describe_again(rows: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """The rows of an older schema in today's: their workloads are counted anew from their configurations.

    What was measured stays, and what is of the code that was: the seconds of a step of an environment on the host, and how many
    rows were learnt from at a time.
    """
    from rich.progress import track

    from predictor.schema import SCHEMA
    from tuner.bridge import Config
    from tuner.measuring.workload import describe

    for row in track(rows, "configurations", console=console):
        old = row["measurement"]
        if old["schema"] == SCHEMA:
            continue
        workload = describe(Config.from_dict(row["config"]))
        kept = {"host_step_seconds": old["workload"]["host_step_seconds"], "cached_rows": old["workload"].get("cached_rows", 0.0)}
        old["workload"] = dataclasses.replace(workload, **kept).to_dict()
        old["schema"] = SCHEMA
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    append(part, rows)
    part.replace(file)
    return rows


def collect(rows: list[dict[str, Any]], hardware: Any, args: Any, file: Path) -> None:
    """Measures what ``rows`` lack of the design, and what is to be measured again; adds it to them, and to the file."""
    with progress_bar() as progress:
        missing = args.count - sum(row["repeat"] == 0 for row in rows)
        points = design(rows, args.count, hardware, args.most)
        measure_all(points, missing, rows, hardware, args, file, progress, "configurations")
        again = list(measured_again(rows, args.again))
        measure_all(again, rows_of(again), rows, hardware, args, file, progress, "measured again")


def differences(rows: Sequence[dict[str, Any]]) -> list[float]:
    """|log| of the ratio of seconds, of every configuration's first two measurements."""
    seconds: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if (value := row["measurement"].get("seconds_per_env_step")) is not None:
            key = row["task"], row["index"], row["config"]["runtime"]["loop_count"]
            seconds.setdefault(key, []).append(value)
    return [abs(math.log(values[1] / values[0])) for values in seconds.values() if len(values) > 1]


def show(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """The table at the end."""
    table = Table(title=f"{file}: {len(rows)} rows")
    for column in ("task", "measured", "failed", "again", "steps/s, median", "least", "most", "noise, median"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for name in [*(task.name for task in TASKS), None]:
        own = [row for row in rows if name in (None, row["task"])]
        rates = [row["measurement"]["env_steps_per_second"] for row in own if row["measurement"]["outcome"] == "ok"]
        noise = differences(own)
        spread = (statistics.median(rates), min(rates), max(rates)) if rates else ()
        table.add_row(
            name or "all",
            str(sum(row["repeat"] == 0 for row in own)),
            str(len(own) - len(rates)),
            str(sum(row["repeat"] > 0 for row in own)),
            *(f"{x:,.0f}" for x in spread),
            *[""] * (3 - len(spread)),
            f"{statistics.median(noise):.1%}" if noise else "",
        )
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=240, help="configurations, those measured again not counted")
    parser.add_argument("--again", type=int, default=1, help="how many times more each process that ran is measured")
    add_options(parser)
    parser.add_argument(
        "--most", type=float, default=2.0, help="seconds the shortest burst may take by the predictor; above, left out"
    )
    parser.add_argument("--describe-again", action="store_true", help="bring rows of an older schema up to date first")
    parser.add_argument("--out", type=Path, help="folder of the rows (default: collected, here or with --record under data)")
    args = parser.parse_args()
    if args.count < 1 or args.again < 0:
        parser.error(f"--count ({args.count}) must be at least 1, --again ({args.again}) at least 0")
    use_device(args.device)

    from tuner.measuring.fingerprint import fingerprint

    hardware = fingerprint()
    import jax

    jax.config.update("jax_platforms", "cpu")  # the device is for those who are measured
    file = (args.out or (DATA if args.record else Path()) / "collected") / f"{hardware.id}.jsonl"
    rows = read(file)
    if args.describe_again:
        rows = describe_again(rows, file)
    try:
        collect(rows, hardware, args, file)
    except KeyboardInterrupt:
        console.print("stopped; run it again to go on")
    show(rows, file)


if __name__ == "__main__":
    main()
