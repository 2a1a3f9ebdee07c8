"""How right the predictor is on configurations it has not seen, next to what people would use instead, and to the noise.

Reads what ``collect.py`` measured. In distribution: a fifth of the processes are held out, at least ten times, and each learner
is fitted to 16, 32, 64 and all of the others' configurations. Transfer: an environment, a runtime, a family of networks or a
number of cores is held out whole; the predictor learns from the rest and is calibrated by one, or eight, of what it has not seen.
All of that is within one machine (``--machine``, by default the one with the most rows); then every machine is held out in turn.
The simulated pipeline is held against measured ones of threads.
Kendall's tau and slowdowns are within a task. Needs the extra ``muzerox[benchmarks]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from collected import Data, load
from common import DATA, finish, make_console, make_parser, use_device
from rich.progress import track
from rich.table import Table as Lines

SIZES = (16, 32, 64)
HELD_OUT = 5  # one process in so many
console = make_console()


def splits(data: Data, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows to learn from, in the order they become available, and rows to be judged by; no process has both."""
    for seed in range(count):
        order = np.random.default_rng(seed).permutation(data.processes.max() + 1)
        held_out = order[: len(order) // HELD_OUT]
        train = np.concatenate([np.flatnonzero(data.processes == p) for p in order[len(held_out) :]])
        yield train, np.flatnonzero(np.isin(data.processes, held_out))


def by_machine(function: Callable[[Any, Any], Any], measurements: Sequence[Any], *shape: int) -> np.ndarray:
    """``function(workloads, hardware) -> [*shape, C]`` of measurements, machine by machine."""
    from predictor import stack

    found = np.zeros((*shape, len(measurements)))
    for kind in dict.fromkeys(m.hardware for m in measurements):
        rows = [i for i, m in enumerate(measurements) if m.hardware == kind]
        found[..., rows] = np.asarray(function(stack([measurements[i].workload for i in rows]), kind))
    return found


def score(model: Any, measurements: Sequence[Any]) -> np.ndarray:
    """Log seconds that a predictor expects."""
    return by_machine(model.log_seconds, measurements)


def in_distribution(data: Data, count: int, wanted: Callable[[str], bool]) -> dict[str, dict[str, dict[str, float]]]:
    """Figures by learner and number of configurations, means over splits."""
    from predictor import RuntimePredictor
    from predictor.baselines import BASELINES, make_table
    from predictor.metrics import METRICS, coverage

    table = make_table(data.measurements)
    threaded = np.array([m.workload.sebulba > 0 for m in data.measurements])
    found: dict[str, dict[str, list[dict[str, float]]]] = {}

    def judge(name: str, size: str, predicted: np.ndarray, test: np.ndarray, more: dict[str, float] | None = None) -> None:
        tasks, measured = [data.tasks[i] for i in test], table.log_seconds[test]
        figures = {metric: function(predicted, measured, tasks) for metric, function in METRICS.items()}
        some = threaded[test]
        figures["mape_threads"] = METRICS["mape"](predicted[some], measured[some], tasks) if some.any() else float("nan")
        found.setdefault(name, {}).setdefault(size, []).append(figures | (more or {}))

    for pool, test in track(list(splits(data, count)), "splits", console=console):
        unseen = [data.measurements[i] for i in test]
        for size in (*SIZES, len(pool)):
            if size > len(pool):
                continue
            train, label = pool[:size], "all" if size == len(pool) else str(size)
            model = RuntimePredictor().fit([data.measurements[i] for i in train])
            if wanted("shipped"):
                low, high = by_machine(model.log_interval, unseen, 2)
                held = coverage(table.log_seconds[test], low, high)
                more = {"interval_coverage": held, "interval_ratio": float(np.exp(np.median(high - low)))}
                judge("shipped", label, score(model, unseen), test, more)
                judge("shipped, network not heard", label, by_machine(model.base_log_seconds, unseen), test)
            for name, baseline in BASELINES.items():
                if wanted(name):
                    judge(name, label, baseline(table.rows(train), table.rows(test)), test)
    return {
        name: {size: {k: float(np.nanmean([r[k] for r in rows])) for k in rows[0]} for size, rows in sizes.items()}
        for name, sizes in found.items()
    }


def held_out_groups(data: Data) -> dict[str, np.ndarray]:
    """What transfer is judged by: bool [n] each."""
    workloads = [m.workload for m in data.measurements]
    kinds = {
        "environment": [task.split(",")[0] for task in data.tasks],
        "runtime": ["sebulba" if w.sebulba else "anakin" for w in workloads],
        "network": ["grid" if task.split(",")[0] in ("image", "board") else "dense" for task in data.tasks],
        "cores": [f"{w.cores:g}" for w in workloads],
    }
    machines = [m.hardware.id for m in data.measurements]
    if len(set(machines)) > 1:
        kinds = {"machine": machines}
    groups = {f"{kind} {value}": np.array(column) == value for kind, column in kinds.items() for value in sorted(set(column))}
    return {name: rows for name, rows in groups.items() if 8 < rows.sum() < len(rows) - 8}


def transfer(data: Data, count: int) -> dict[str, dict[str, float]]:
    """Mean relative error on each group that was held out, calibrated by none, 1 and 8 of it, and what its 90% intervals hold.

    Means over draws of those.
    """
    from predictor import RuntimePredictor
    from predictor.metrics import coverage, relative_errors

    measured = np.log([m.seconds_per_env_step for m in data.measurements])
    found: dict[str, dict[str, float]] = {}
    for name, held_out in track(list(held_out_groups(data).items()), "transfer", console=console):
        model = RuntimePredictor().fit([data.measurements[i] for i in np.flatnonzero(~held_out)])
        errors: dict[str, list[float]] = {"0": [], "1": [], "8": []}
        held: dict[str, list[float]] = {number: [] for number in errors}
        for seed in range(count):
            rows = np.random.default_rng(seed).permutation(np.flatnonzero(held_out))
            for number in errors:
                seen, unseen = rows[: int(number)], rows[8:]
                ready = model.fit([data.measurements[i] for i in seen]) if len(seen) else model
                others = [data.measurements[i] for i in unseen]
                errors[number].append(float(np.mean(relative_errors(score(ready, others), measured[unseen]))))
                low, high = by_machine(ready.log_interval, others, 2)
                held[number].append(coverage(measured[unseen], low, high))
        found[name] = {f"mape_after_{number}": float(np.mean(values)) for number, values in errors.items()}
        found[name] |= {f"coverage_after_{number}": float(np.mean(values)) for number, values in held.items()}
    return found


def simulation(data: Data, count: int) -> dict[str, float]:
    """How far the simulated pipeline is from measured ones of threads that were held out, next to the analytic bounds.

    Both have the coefficients of stages that the other configurations teach.
    """
    from predictor import RuntimePredictor, stack
    from predictor.analytic import stack_rates, stages
    from predictor.metrics import METRICS, kendall_within, relative_errors
    from predictor.simulator import simulate

    found: dict[str, list[float]] = {}
    for pool, test in track(list(splits(data, count)), "simulation", console=console):
        chosen = [i for i in test if data.measurements[i].workload.sebulba]
        if not chosen:
            continue
        measurements, tasks = [data.measurements[i] for i in chosen], [data.tasks[i] for i in chosen]
        model = RuntimePredictor().fit([data.measurements[i] for i in pool], train=False)
        workload, rates = stack([m.workload for m in measurements]), stack_rates([m.hardware for m in measurements])
        ran = simulate(stages(workload, rates) * model.params.coefficients, workload, rates)
        measured = np.log([m.seconds_per_env_step for m in measurements])
        expected = {
            "simulated": np.log(np.asarray(ran.seconds_per_env_step)),
            "base": by_machine(model.base_log_seconds, measurements),
        }
        for name, logs in expected.items():
            found.setdefault(f"{name}_mape", []).append(METRICS["mape"](logs, measured, tasks))
            found.setdefault(f"{name}_tau", []).append(kendall_within(logs, measured, tasks))
        busy = np.log([m.cpu_use for m in measurements])
        found.setdefault("cpu_use_mape", []).append(float(np.mean(relative_errors(np.log(np.asarray(ran.cpu_use)), busy))))
    return {name: float(np.mean(values)) for name, values in found.items()}


def memory(data: Data, count: int) -> dict[str, float]:
    """Error of peak memory, and how failures of memory are foreseen, by predictors fitted to the other part.

    Of failures, too, a fifth is judged by each: precision is that of the collection's own share of failures.
    """
    from predictor import RuntimePredictor
    from predictor.metrics import detection

    errors, foreseen, failed = [], [], []
    for number, (pool, test) in enumerate(track(list(splits(data, count)), "memory", console=console)):
        model = RuntimePredictor().fit([data.measurements[i] for i in pool])
        share = round(len(test) / len(data.measurements) * len(data.failures))
        drawn = np.random.default_rng(number).permutation(len(data.failures))[:share]
        for m in [*(data.measurements[i] for i in test), *(data.failures[i] for i in drawn)]:
            expected = model.predict(m.workload, m.hardware)
            if m.outcome == "ok" and m.peak_bytes and not m.from_cache:
                errors.append(abs(expected.peak_bytes / m.peak_bytes - 1.0))
            foreseen.append(expected.outcome != "ok")
            failed.append(m.outcome != "ok")
    found = detection(np.array(foreseen), np.array(failed))
    return {"peak_mape": float(np.mean(errors)), "failure_recall": found.recall, "failure_precision": found.precision}


def show(figures: dict[str, Any]) -> None:
    """Tables for people."""
    lines = Lines(title="in distribution: mean relative error (of threads alone), tau, slowdown of the best of 1 and of 5")
    sizes = list(dict.fromkeys(size for by_size in figures["in_distribution"].values() for size in by_size))
    for column in ("learner", *sizes):
        lines.add_column(column)
    for name, by_size in figures["in_distribution"].items():
        cells = [
            f"{f['mape']:.1%} ({f['mape_threads']:.0%}) {f['kendall_tau']:.2f} {f['top1_slowdown']:.2f} {f['top5_slowdown']:.2f}"
            for f in (by_size[size] for size in sizes)
        ]
        lines.add_row(name, *cells)
    console.print(lines)
    lines = Lines("held out", "as it comes", "after 1", "after 8", title="transfer: mean relative error (held by 90% intervals)")
    for name, found in figures["transfer"].items():
        lines.add_row(name, *(f"{found[f'mape_after_{n}']:.1%} ({found[f'coverage_after_{n}']:.0%})" for n in (0, 1, 8)))
    console.print(lines)
    simulated = figures["simulation"]
    console.print(
        f"pipelines of threads: simulated {simulated['simulated_mape']:.1%}, tau {simulated['simulated_tau']:.2f}, cores busy "
        f"{simulated['cpu_use_mape']:.1%}; by the base {simulated['base_mape']:.1%}, {simulated['base_tau']:.2f}"
    )
    floor = (
        f"measuring again differs by {figures['noise_floor']:.1%} ({figures['repeated']} configurations), so that a perfect "
        f"prediction of means of two is off by {figures['noise_floor_of_means']:.1%}"
    )
    console.print(
        f"{floor if figures['repeated'] else 'nothing was measured again: the noise floor is not known'}; "
        f"peak memory {figures['memory']['peak_mape']:.1%}, failures: recall {figures['memory']['failure_recall']:.2f}, "
        f"precision {figures['memory']['failure_precision']:.2f}"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--data", type=Path, default=DATA / "collected", help="folder of what was measured")
    parser.add_argument("--only", metavar="TEXT", help="learners whose name has it")
    parser.add_argument("--machine", metavar="ID", help="of what lies in the folder (default: that with the most rows)")
    args = parser.parse_args()
    if args.splits < 1:
        parser.error(f"--splits ({args.splits}) must be at least 1")
    use_device(args.device)
    from predictor.metrics import floor_of_means, noise_floor

    everywhere = load(args.data)
    machines = Counter(m.hardware.id for m in everywhere.measurements)
    machine = args.machine or machines.most_common(1)[0][0]
    if machine not in machines:
        parser.error(f"--machine ({machine}) must be one of {', '.join(machines)}")
    data = load(args.data, machine)
    try:
        found = in_distribution(data, args.splits, lambda name: not args.only or args.only in name)
    except ImportError as error:
        raise SystemExit(str(error)) from None
    figures = {
        "measured_on": machine,
        "configurations": len(data.measurements),
        "failures": len(data.failures),
        "splits": args.splits,
        "repeated": len(data.repeated),
        "noise_floor": noise_floor(data.repeated),
        "noise_floor_of_means": floor_of_means(data.repeated),
        "in_distribution": found,
        "transfer": transfer(data, args.splits) | (transfer(everywhere, args.splits) if len(machines) > 1 else {}),
        "simulation": simulation(data, args.splits),
        "memory": memory(data, args.splits),
    }
    show(figures)
    finish("predictor", figures, record=args.record)


if __name__ == "__main__":
    main()
