"""What people see of a run: progress on stderr, metrics.jsonl, TensorBoard, a return curve, closing tables on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from muzerox.config import Config
from muzerox.run_dir import RunDir
from muzerox.streams import discard

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

    from muzerox.types import Report

# Metrics that are above 0 where the network cannot represent what it is to learn, and the key of ``network`` that is too small.
_CLIPPED = {"reward_clipped": "reward_bound", "value_clipped": "value_bound"}


class Reporter:
    """Writes what happens as it happens. Use as a context manager.

    Args:
      quiet: no progress on stderr.
      start: environment steps already done.
    """

    def __init__(self, run: RunDir, config: Config, *, quiet: bool, start: int):
        self._run, self._network, self._simulations = run, config.network, config.search.num_simulations
        self._unwarned = dict(_CLIPPED)
        self._file: IO[str] = open(run.metrics_file, "a", encoding="utf-8")
        self._board = _summary_writer(run.tensorboard)
        self._console = make_console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[result]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=quiet or not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._progress.add_task(
            config.env, total=config.train.max_env_steps, completed=start, rate="compiling", result=""
        )
        self._last_line = 0.0

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._file.close()
        self._board.close()

    def say(self, text: str) -> None:
        """One line on stderr."""
        self._console.print(text, soft_wrap=True)

    def deepened(self, simulations: int) -> None:
        """What is reported from now on is of searches with so many simulations."""
        self._simulations = simulations
        self.say(f"from now on: {simulations:,} simulations a search")

    def training(self, report: Report, seconds: float, env_steps: int, train_seconds: float) -> None:
        """A training report.

        Args:
          seconds: wall seconds since the start of this process's training.
          env_steps: made in ``train_seconds``.
          train_seconds: of ``seconds``, those spent acting and learning, but for dispatches that compiled; 0 before the second.
        """
        steps_per_second = env_steps / max(train_seconds, 1e-9)
        row: dict[str, Any] = {
            "kind": "train",
            "env_steps": report.env_steps,
            "updates": report.updates,
            "seconds": round(seconds, 3),
            "episodes": report.episodes,
            "num_simulations": self._simulations,
            "skipped_updates": report.skips.total,
            **report.metrics,
            **{name: round(value, 6) for name, value in report.pipeline.items()},
        }
        if train_seconds:
            row["env_steps_per_second"] = round(steps_per_second, 1)
            row["train_seconds"] = round(train_seconds, 4)  # of this process, acting and learning: rows tell what lies between
        if report.mean_return is not None:
            row.update(mean_return=report.mean_return, mean_length=report.mean_length)
        self._write(row)
        for name in [name for name in self._unwarned if report.metrics.get(name)]:
            self._warn_clipped(name, self._unwarned.pop(name), report.metrics[name])
        result = f"return {report.mean_return:.1f}" if report.mean_return is not None else ""
        # The first dispatch compiles and counts as no time of training: it has no rate.
        rate = f"{steps_per_second:,.0f} steps/s" if train_seconds else "compiled"
        self._progress.update(self._task, completed=report.env_steps, rate=rate, result=result)
        if self._progress.disable and seconds - self._last_line >= 10.0:  # no terminal: a line now and then
            self._last_line = seconds
            self.say(f"{report.env_steps:,} steps, {rate}, {result}".removesuffix(", "))

    def _warn_clipped(self, name: str, bound: str, share: float) -> None:
        self.say(
            f"warning: {100 * share:.3g}% of {name.removesuffix('_clipped')} targets lie beyond network.{bound} = "
            f"{getattr(self._network, bound):g} and are clipped to it; train again with a larger one"
        )

    def evaluation(self, env_steps: int, updates: int, seconds: float, summary: Mapping[str, Any]) -> None:
        """The summary of an evaluation."""
        self._write({"kind": "evaluation", "env_steps": env_steps, "updates": updates, "seconds": round(seconds, 3), **summary})
        self.say(
            f"evaluation at {env_steps:,} steps: return {summary['mean_return']:.2f} ± {summary['std_return']:.2f} "
            f"over {summary['episodes']} episodes ({seconds:.1f} s)"
        )

    def saved(self, updates: int, seconds: float) -> None:
        """A checkpoint that is now safely on disk."""
        self._write({"kind": "saved", "updates": updates, "seconds": round(seconds, 3)})
        self.say(f"saved update {updates:,}")

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in row.items():
            if isinstance(value, int | float) and "env_steps" in row and name not in ("env_steps", "updates"):
                self._board.add_scalar(f"{row['kind']}/{name}", value, row["env_steps"])


def _summary_writer(folder: Path) -> SummaryWriter:
    """TensorBoard's, of tensorboardX, which where torch is installed would import it for tensors that it is never given."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails at once, as where it is not installed
    try:
        from tensorboardX import SummaryWriter
    finally:
        if hidden:
            del sys.modules["torch"]
    return SummaryWriter(str(folder))


class _Console(Console):
    """Whose reader may leave: rich would end the process, and with it the work that is told of."""

    def on_broken_pipe(self) -> None:
        """From now on nothing is printed."""
        self.quiet = True
        discard(self.file)


def make_console(**options: Any) -> Console:
    """Prints text as it is: a path may hold what rich takes for its markup."""
    return _Console(markup=False, emoji=False, highlight=False, **options)


def draw_return_curve(run: RunDir, config: Config) -> None:
    """``return_curve.png``: mean return of training episodes and of evaluations against environment steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = run.metrics()
    training = [(r["env_steps"], r["mean_return"]) for r in rows if r["kind"] == "train" and "mean_return" in r]
    evaluation = [(r["env_steps"], r["mean_return"], r["std_return"]) for r in rows if r["kind"] == "evaluation"]
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), color="tab:blue", alpha=0.6, label="self-play, exploring")
    if evaluation:
        steps, mean, std = zip(*evaluation, strict=True)
        axes.errorbar(steps, mean, std, color="tab:orange", marker="o", capsize=3, label="evaluation (± std)")
    if config.train.target_return is not None:
        axes.axhline(config.train.target_return, color="gray", linestyle="--", label="target")
    axes.set(xlabel="environment steps", ylabel="episode return", title=f"{config.env}, seed {config.seed}")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(run.curve_file, dpi=120)


_WAITS = {
    "step_put": "self-play, held back by the replay ratio",
    "action": "self-play, for its search",
    "environment": "self-play, for its environments",
    "context_put": "cpu actors, until another context is due",
    "search_put": "cpu actors, for room in the search queue",
    "search_get": "search workers, for a context",
    "targets": "search workers, for targets and reanalysis",
    "batch_put": "search workers, for room in the batch queue",
    "batch_get": "learner, for a batch",
    "learner": "learner, for its updates",
    "parameters_get": "all, for parameters",
}


def pipeline_rows(pipeline: Mapping[str, float]) -> dict[str, str]:
    """What a runtime with threads waited for, and how deep its queues and how old its parameters were, for people."""
    rows = {}
    for name, meaning in _WAITS.items():
        count = int(pipeline.get(f"wait_{name}_count", 0))
        if count:
            rows[f"waits: {name}"] = f"{pipeline[f'wait_{name}_seconds']:.1f} s in {count:,}: {meaning}"
    for name, meaning in (
        ("search_depth", "contexts waiting"),
        ("batch_depth", "batches waiting"),
        ("batch_staleness", "age of targets, updates"),
        ("acting_staleness", "age when acting, updates"),
    ):
        if f"{name}_mean" in pipeline:
            mean, p50, p90 = (pipeline[f"{name}_{what}"] for what in ("mean", "p50", "p90"))
            rows[meaning] = f"mean {mean:.1f}, median {p50:.1f}, 90th percentile {p90:.1f}"
    if pipeline.get("failures"):
        rows["workers replaced"] = f"{int(pipeline['failures']):,}"
    return rows


def print_table(title: str, rows: Mapping[str, Any]) -> None:
    """Two columns on stdout, as wide as they need."""
    console = make_console()
    console.print(title, style="italic", soft_wrap=True)  # a title of the table's would be as narrow as it is
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, _readable(value))
    console.print(table)


def _readable(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return str(value)
