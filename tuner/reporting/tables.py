"""What people see of a tuning at its end: a table of trials, a plot of the history, closing tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from predictor import Hardware, Outcome
from tuner.bridge import Config, answer, make_console, print_table, tell
from tuner.history import Trial

if TYPE_CHECKING:
    from tuner.result import TuneResult


_COLORS = {
    "baseline": "black",
    "annealed": "tab:blue",
    "random": "tab:orange",
    "varied": "tab:olive",
    "switched": "tab:pink",
    "shared": "tab:cyan",
    "balanced": "tab:purple",
}


def trial_line(trial: Trial, baseline: Trial) -> str:
    """A trial in one line."""
    return f"{trial.elapsed:6.1f} s  trial {trial.number:2d}  {_result(trial, baseline)}  {trial.role} {moved(trial, baseline)}"


def _result(trial: Trial, baseline: Trial) -> str:
    if trial.seconds is None:
        return f"{trial.measurement.outcome}: {trial.measurement.error}"
    ratio = (baseline.seconds or trial.seconds) / trial.seconds
    return f"{1 / trial.seconds:9,.0f} steps/s ({ratio:4.2f}x; expected {1 / trial.foreseen:,.0f})"


def moved(trial: Trial, baseline: Trial) -> str:
    """What a trial changed of the starting configuration, in short."""
    return " ".join(f"{p.rpartition('.')[2]}={v}" for p, v in trial.changes.items() if v != baseline.changes[p])


def error(predicted: float, trial: Trial) -> float | None:
    """Relative error of a predicted time; None for a trial that failed."""
    return abs(predicted / trial.seconds - 1.0) if trial.seconds else None


def median_errors(trials: Sequence[Trial]) -> dict[str, float | None]:
    """Median relative errors over trials after the baseline, by what predicted."""
    rows = [trial for trial in trials if trial.seconds and trial.number > 0]
    columns = {
        "base, uncalibrated": [error(t.predicted_uncalibrated, t) for t in rows],
        "base, calibrated": [error(t.predicted_base, t) for t in rows],
        "base and graph network": [error(t.predicted, t) for t in rows],
        "base, network and own trials": [error(t.foreseen, t) for t in rows],
    }
    return {name: float(np.median([e for e in errors if e is not None])) if errors else None for name, errors in columns.items()}


def print_trials(trials: Sequence[Trial]) -> None:
    """Every trial on stdout: what it was, what was expected, what came."""
    title = (
        "trials: error of the seconds predicted before each ran, by the base as it comes, calibrated, with the graph network, "
        "and with what the trials before it said"
    )
    table = Table(title=title, title_justify="left")
    columns = ("", "role", "steps/s", "base", "calibrated", "graph", "trials", "B", "moved from the start")
    for name in columns:
        table.add_column(name, justify="left" if name in ("role", "moved from the start") else "right", overflow="fold")
    baseline = trials[0]
    for trial in trials:
        predictions = trial.predicted_uncalibrated, trial.predicted_base, trial.predicted, trial.foreseen
        errors = [error(seconds, trial) for seconds in predictions]
        table.add_row(
            str(trial.number),
            trial.role,
            f"{1 / trial.seconds:,.0f}" if trial.seconds else str(trial.measurement.outcome),
            *(f"{e:.0%}" if e is not None else "" for e in errors),
            f"{trial.balance:.2f}" if trial.balance is not None else "",
            moved(trial, baseline),
        )
    # Lines that a pipe does not break: a file is wider than a terminal that is not there.
    console = make_console()
    (console if console.is_terminal else make_console(width=160)).print(table)


def pipeline_row(config: Config) -> dict[str, str]:
    """What threads there are and what room is between them; nothing where one program does everything."""
    r = config.runtime
    if r.kind != "sebulba":
        return {}
    threads = f"{r.role_threads} a role" if r.role_threads else "shared"
    return {
        "pipeline": f"self-play {r.selfplay_workers} x {r.num_envs} environments (in a {r.step_in}), cpu actors {r.cpu_actors}, "
        f"search queue {r.search_queue_size}, batch queue {r.batch_queue_size}, {r.loop_count} updates a dispatch, "
        f"threads of XLA {threads}"
    }


def wait_rows(waits: Mapping[str, float], most: int = 5) -> dict[str, str]:
    """The longest waits of a pipeline, in threads that are waiting on average."""
    longest = sorted(waits.items(), key=lambda item: -item[1])[:most]
    return {"threads waiting": ", ".join(f"{name} {share:.2f}" for name, share in longest)} if waits else {}


def precision_rows(result: TuneResult) -> dict[str, str]:
    """The chosen precision level, and what was found of those that were faster than the start's."""
    level, before = result.config.precision.level, result.start.precision.level
    rows = {"precision": f"{level}, as before" if level == before else f"{level} instead of {before}"}
    return rows | {f"drift of {drift.level}": drift.explain() for drift in result.drifts}


def closing_rows(result: TuneResult) -> dict[str, Any]:
    """The rows of the closing table: default against tuned, predicted against measured, allocation, balance."""
    start, ours = result.start_measurement, result.measurement
    rows: dict[str, Any] = {}
    if start is not None and ours is not None and start.seconds_per_env_step and ours.seconds_per_env_step:
        rows["default"] = f"{1 / start.seconds_per_env_step:,.0f} environment steps/s"
        sure = "" if result.interval is None else " (90%: {:.2f} to {:.2f})".format(*result.interval)
        tuned = f"{1 / ours.seconds_per_env_step:,.0f} environment steps/s, {result.speedup:.2f}x{sure}, in alternation"
        tuned = tuned if result.compared else "the default: nothing was compared with it"
        rows["tuned"] = tuned if len(result.history) > 1 else "the default: there was no time to measure another; give it more"
        predicted = result.predicted["env_steps_per_second"]
        rows["predicted"] = f"{predicted:,.0f} environment steps/s, {predicted * ours.seconds_per_env_step - 1:+.0%} of measured"
    if result.objective != "time" and result.gain is not None:
        rows["objective"] = f"{result.objective}: {result.gain:.2f} times as good"
    if start is not None and ours is not None and start.joules_per_env_step and ours.joules_per_env_step:
        joules = start.joules_per_env_step, ours.joules_per_env_step
        rows["energy"] = f"{1e3 * joules[1]:,.1f} J for 1,000 environment steps; {1e3 * joules[0]:,.1f} by default"
    rows |= precision_rows(result)
    rows |= pipeline_row(result.config)
    if start is not None and ours is not None and start.batch_staleness is not None and ours.batch_staleness is not None:
        rows["age of targets"] = f"{ours.batch_staleness:.1f} updates; {start.batch_staleness:.1f} by default"
    allocation = result.config.allocation
    rows["allocation"] = f"{allocation.cores} of {result.hardware.cores} cores"
    if allocation.memory_gib is not None:
        rows["allocation"] += f", {allocation.memory_gib:g} of {result.hardware.memory_bytes / 2**30:.0f} GiB"
    if allocation.device_memory is not None:
        rows["allocation"] += f", {allocation.device_memory:.1%} of the accelerator's memory"
    if result.balance is not None:
        rows["balance factor"] = f"{result.balance:.2f} ({result.verdict})"
    for name, value in median_errors(result.history).items():
        if value is not None:
            rows[f"median error: {name}"] = f"{value:.0%}"
    failed = [trial for trial in result.history if trial.measurement.outcome != Outcome.OK]
    rows["trials"] = f"{len(result.history)}, {len(failed)} failed, in {result.seconds:.0f} s"
    return rows


def print_tuning(result: TuneResult, out: object, *, as_json: bool) -> int:
    """How a tuning ended, on stdout; on stderr, where it was stopped, that the same command with ``--out`` continues it.

    Returns:
      The command's exit code.
    """
    best = f"{result.out}/tuned.toml"
    if as_json:
        answer(result.to_dict())
    else:
        print_trials(result.history)
        files = {"tuned configuration": best, "report": f"{result.out}/report.html"}
        print_table(f"muzerox tune: {result.out}", closing_rows(result) | files)
    if result.finished:
        return 0
    tell(f"stopped; the best so far is in {best}; the same command with --out {out} continues")
    return 130


def machine_rows(hardware: Hardware) -> dict[str, Any]:
    """A fingerprint for people."""
    return {
        "processor": hardware.cpu,
        "cores": hardware.cores,
        "memory": f"{hardware.memory_bytes / 2**30:.1f} GiB",
        "device": f"{hardware.devices} x {hardware.device} ({hardware.platform})",
        "device memory": f"{hardware.device_memory_bytes / 2**30:.1f} GiB",
        "float32 products": f"{hardware.float32_flops / 1e9:,.0f} GFLOP/s",
        "float32 products, one core": f"{hardware.one_core_flops / 1e9:,.0f} GFLOP/s",
        "bfloat16 products": f"{hardware.bfloat16_flops / 1e9:,.0f} GFLOP/s",
        "copies": f"{hardware.copy_bytes_per_second / 1e9:,.1f} GB/s",
        "dispatch": f"{hardware.dispatch_seconds * 1e6:,.0f} microseconds",
        "small operation in a loop": f"{hardware.operation_seconds * 1e6:,.2f} microseconds",
        "an element in 16 bits": f"{hardware.narrowing_seconds * 1e9:,.2f} nanoseconds more, in cache",
    }


def draw_history(path: Path, trials: Sequence[Trial], title: str) -> None:
    """``tuning.png``: measured and expected speed by trial, and the fastest so far."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ran = [trial for trial in trials if trial.seconds]
    numbers = [trial.number for trial in ran]
    speed = [1 / trial.seconds for trial in ran if trial.seconds]
    axes.vlines(numbers, speed, [1 / trial.foreseen for trial in ran], color="tab:gray", alpha=0.5, linewidth=1)
    axes.plot(numbers, [1 / trial.foreseen for trial in ran], "x", color="tab:gray", label="expected before it ran")
    for role, color in _COLORS.items():
        chosen = [(n, v) for n, v, trial in zip(numbers, speed, ran, strict=True) if trial.role == role]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), "o", color=color, label=role)
    axes.step(numbers, np.maximum.accumulate(speed), where="post", color="tab:green", label="fastest so far")
    for trial in trials:
        if trial.seconds is None:
            axes.axvline(trial.number, color="tab:red", linestyle=":", label="failed")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # each label once
    axes.legend(handles.values(), handles.keys(), fontsize="small")
    axes.set(xlabel="trial", ylabel="environment steps/s", title=f"tuning of {title}", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
