"""What a tuning ends with: the best of its trials, compared with the start, and the files that tell of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from predictor import Measurement, Outcome
from tuner import balance, comparison, corrections, resources
from tuner.bridge import Config
from tuner.comparison import MIN_GAIN, Schedule
from tuner.disk import saving
from tuner.history import Trial
from tuner.levels import Levels
from tuner.measuring.anchor import Anchor
from tuner.measuring.measure import paired_ratio, patience
from tuner.measuring.workload import describe
from tuner.proposer import Proposer
from tuner.reporting.html_report import write_report
from tuner.reporting.tables import draw_history
from tuner.result import TuneResult
from tuner.task import Task


class Ending:
    """Ends a tuning.

    Args:
      most: [R], what a training can be given, as :func:`tuner.corrections.begin` tells.
      anchor: has the start's process, where it stayed.
      elapsed: tells the seconds spent on the tuning so far.
    """

    def __init__(
        self, task: Task, proposer: Proposer, levels: Levels, most: np.ndarray, anchor: Anchor, elapsed: Callable[[], float]
    ):
        self._task, self._proposer, self._levels, self._most = task, proposer, levels, most
        self._anchor, self._elapsed = anchor, elapsed

    def value(self, trial: Trial) -> float:
        """Seconds an environment step as they count; infinite where it failed."""
        return (trial.seconds or math.inf) * self._proposer.rent(trial.measurement)

    def best(self, trials: Sequence[Trial]) -> Trial:
        """The best of those whose precision is trusted; the start, which is the first, where none is better by ``MIN_GAIN``."""
        best = min(self._levels.trusted(trials), key=lambda trial: self._proposer.cost(trial.measurement))
        return best if self.value(trials[0]) / self.value(best) >= MIN_GAIN else trials[0]

    def reserved(self, trials: Sequence[Trial], budget: float | None = None) -> float:
        """Seconds to keep for comparing the best of ``trials`` with the start; of another ``budget`` where one is given."""
        return self._schedule(budget).reserved([trials[0], *self._finalists(trials)])

    def _schedule(self, budget: float | None = None) -> Schedule:
        return Schedule(self._task.burst, self._task.budget if budget is None else budget)

    def _finalists(self, trials: Sequence[Trial]) -> list[Trial]:
        trusted, space = self._levels.trusted(trials), self._task.space
        return comparison.finalists(trusted, lambda trial: space.program(trial.changes), self._proposer.cost)

    def compare(self, trials: Sequence[Trial]) -> TuneResult:
        """The best trials against the start, which wins unless it is clearly beaten."""
        task, start, finalists = self._task, trials[0], self._finalists(trials)
        if not finalists:
            ran = any(trial.seconds is not None for trial in trials[1:])
            fits_not = "the start stays: there is no memory for it and another side by side, and nothing was compared"
            return self._start_stays(trials, fits_not if ran else "nothing ran beside the start; a larger budget may find more")
        measured, left = [start, *finalists], task.budget - self._elapsed()
        rivals, fewest = self._schedule().plan(measured, left)
        task.progress.say(f"comparing the best {rivals} with the start in alternation, at least {fewest} rounds")
        # In a process of its own, as young as its rivals': one that stood still for minutes may be slower, and they seem faster.
        self._anchor.close()
        # The start as it was measured: with every core and all the memory it asked for.
        configs = [Config.from_dict(trial.config) for trial in measured[: 1 + rivals]]
        found = comparison.compare(
            configs[0],
            configs[1:],
            hardware=task.hardware,
            fewest=fewest,
            left=left,
            seconds=task.burst,
            timeout=patience(start.measurement.wall_seconds, max(self._compile_seconds(config) for config in configs)),
            price=self._proposer.price,
            rent=self._proposer.rent,
            say=task.progress.say,
        )
        if found.base.outcome != Outcome.OK:
            why = f"{found.base.outcome}: {found.base.error}"
            return self._start_stays(trials, f"the start stays: it failed in the comparison, and nothing was compared ({why})")
        if math.isinf(self._proposer.rent(found.base)):
            return self._start_stays(trials, "the start stays: its energy could not be read in the comparison")
        best = start if found.chosen is None else finalists[found.chosen]
        return self._result(trials, best, found.base, found.ours, finished=True)

    def _compile_seconds(self, config: Config) -> float:
        return self._proposer.predictor.predict(describe(config), self._task.hardware).compile_seconds

    def _start_stays(self, trials: Sequence[Trial], why: str) -> TuneResult:
        """The start, as it was measured first; ``why`` it was compared with nothing is said."""
        self._task.progress.say(why)
        start = trials[0]
        return self._result(trials, start, start.measurement, start.measurement, finished=True)

    def interrupted(self, trials: Sequence[Trial]) -> TuneResult:
        """The best so far, which was not compared with the start; what an earlier comparison chose, where there was one."""
        if (verified := self._kept(trials)) is not None:
            self._task.progress.say("tuned.toml stays what the last comparison chose, until the next one")
            return dataclasses.replace(verified, finished=False)
        return self._result(trials, self.best(trials), None, None, finished=False)

    def _result(
        self, trials: Sequence[Trial], best: Trial, base: Measurement | None, ours: Measurement | None, *, finished: bool
    ) -> TuneResult:
        """The outcome ``best``; when it is finished it is on disk, whatever becomes of the files that tell of it.

        Args:
          base: the start, and ``ours`` the best, as they were compared; None where they were not.
          finished: the budget is spent, and the same command has nothing to go on with.
        """
        task, predictor = self._task, self._proposer.predictor
        known = ours or best.measurement
        config = corrections.for_training(Config.from_dict(best.config), known, predictor, task.hardware, self._most)
        factor = resources.balance_of_run(config, known, task.hardware)
        speedup = gain = None
        if base is not None and ours is not None:
            speedup = 1.0 if ours is base else paired_ratio(ours, base)
            rents = self._proposer.rent(base), self._proposer.rent(ours)
            gain = speedup * rents[0] / rents[1] if all(map(math.isfinite, rents)) else None  # joules that could not be read
        result = TuneResult(
            out=str(task.folder.path),
            finished=finished,
            start=task.start,
            config=config,
            speedup=speedup,
            objective=task.goal.name,
            gain=gain,
            start_measurement=base,
            measurement=ours,
            predicted=predictor.predict(describe(config), task.hardware).to_dict(),
            balance=factor,
            verdict=str(balance.verdict(factor)) if factor is not None else None,
            seconds=self._elapsed(),
            hardware=task.hardware,
            history=tuple(trials),
            drifts=self._levels.drifts,
        )
        if finished:
            task.folder.save_result(result.to_dict())
        return result

    def told(self, trials: Sequence[Trial]) -> TuneResult | None:
        """How it ended already with just these trials; None where it did not."""
        told = self._task.folder.result()
        return self._kept(trials) if told is not None and told.get("trials") == len(trials) else None

    def _kept(self, trials: Sequence[Trial]) -> TuneResult | None:
        """How it ended when it did last, maybe with fewer trials; None where it never did."""
        task = self._task
        kept = task.folder.result()
        if kept is None:
            return None
        kept["out"] = str(task.folder.path)  # it may have been moved since
        return TuneResult.from_dict(
            kept, start=task.start, hardware=task.hardware, history=trials, source=task.folder.result_file
        )

    def write(self, result: TuneResult) -> None:
        """``tuned.toml``, the plot and the report. What is finished is in ``result.json`` before: a kill costs no comparison."""
        folder = self._task.folder
        folder.save_tuned(result.config)
        with saving("--out", folder.path):
            draw_history(folder.plot_file, result.history, result.config.env)
            write_report(folder.report_file, result, self._proposer.predictor, self._task.space)
