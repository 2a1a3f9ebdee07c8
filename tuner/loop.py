"""The outer loop: measure, predict, anneal, allocate, measure again, balance; then tuned against start, in alternation.

Rounds follow the method: the calibrated predictor is the annealer's energy; the best point that was not measured yet gets an
allocation and is measured; its balance factor shapes the next round's allocation; the predictor learns from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from predictor import Measurement, Outcome, RuntimePredictor
from tuner import comparison, corrections, resources
from tuner.bridge import Config, UserError, allocation_checked, concrete, enable_cache, get
from tuner.ending import Ending
from tuner.goal import Goal
from tuner.history import HISTORY, Trial, TuneDir, share, shared_measurements, shared_store
from tuner.levels import Levels
from tuner.measuring.anchor import Anchor
from tuner.measuring.fingerprint import fingerprint
from tuner.measuring.measure import BURST_SECONDS, ENOUGH_SECONDS, measure_beside, measure_config, patience
from tuner.measuring.worker_client import started_ahead
from tuner.measuring.workload import describe
from tuner.neighbourhood import space_around
from tuner.objective import STALENESS_PRICE, every_point_with
from tuner.proposer import COLDEST, NOTHING, Proposer, temperature_of
from tuner.reporting.progress import Progress
from tuner.result import TuneResult, parse_budget
from tuner.task import Task

AHEAD = 10  # trials: what none of so many more is expected to gain anything by is not begun
HOPELESS = 3.0  # times the seconds of the best: a trial that is slower is not timed to the end


def tune(
    config: Config,
    *,
    budget: str | float = "5m",
    out: str | Path = "runs/tuning",
    max_trials: int | None = None,
    effect: str = "neutral",
    burst: float = BURST_SECONDS,
    staleness_price: float = STALENESS_PRICE,
    goal: Goal | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> TuneResult:
    """Searches for the configuration that trains fastest on this machine, and leaves it in ``out/tuned.toml``.

    A folder that already holds a tuning from the same configuration is continued: nothing is measured twice.

    Args:
      budget: time to spend, such as ``"5m"``; what an interrupted tuning spent counts.
      max_trials: end after this many processes measured, the baseline's included, if the budget lasts that long.
      effect: which knobs may move: ``exact`` ones, ``neutral`` ones too (the same learning), or ``learning`` ones as well.
      burst: seconds of a timed burst.
      staleness_price: share of time that learning from what is a period of the target network old must be worth; sebulba only.
      goal: what is minimised, and what may not be exceeded; by default seconds, on all there is.
      quiet: nothing on stderr.

    Raises:
      UserError: bad input, or a baseline that does not run: nothing can be compared with it.
    """
    began, seconds, goal = time.monotonic(), parse_budget(budget), goal or Goal()
    if max_trials is not None and max_trials < 1:
        raise UserError("max_trials", max_trials, "must be at least 1", 1)
    if not 0.0 <= staleness_price <= 10.0:
        raise UserError("staleness_price", staleness_price, "must be from 0 to 10", STALENESS_PRICE)
    served = concrete(allocation_checked(config), "cpu")
    corrections.check_memory(served, describe(served))  # what cannot be served is refused before anything is written
    folder = TuneDir(out)
    folder.check()
    enable_cache()  # annealer and predictor are programs, too
    with _stopped_as_by_ctrl_c(), Progress(seconds, quiet=quiet) as progress, _on_cpu():
        hardware = fingerprint(say=progress.say)
        progress.enter(started_ahead())
        goal.check(hardware.platform)
        start = goal.bounded(concrete(config, hardware.platform), hardware)
        if start.search.final_simulations is not None:
            progress.say(
                f"tuned for searches of {start.search.num_simulations} simulations; train --tune looks again as they deepen"
            )
        folder.create(start)
        progress.enter(folder.lock())
        task = Task(
            start=start,
            space=space_around(start, effect, hardware.platform, goal.max_cores),
            hardware=hardware,
            folder=folder,
            progress=progress,
            budget=seconds,
            max_trials=max_trials or sys.maxsize,
            burst=burst,
            goal=goal,
            staleness_price=staleness_price,
            seed=seed,
        )
        tuning = _Tuning(task, began)
        folder.keep_goal(goal.terms | {"--staleness-price": staleness_price})  # not before what is known of it is compared
        return tuning.run()


@contextlib.contextmanager
def _stopped_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGUSR1 keep the best so far, too; where they would end the process: who tunes may have handlers of its own."""
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in (signal.SIGTERM, signal.SIGUSR1) if main and signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _on_cpu() -> Any:
    """Annealing and predicting stay off the accelerator, which belongs to what is measured."""
    try:
        return jax.default_device(jax.devices("cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the host out
        return contextlib.nullcontext()


def trial_seconds(measured: Sequence[Measurement]) -> float:
    """Wall seconds that another trial is expected to take, by those before it, the start first.

    The median; what is tried after the start alone compiles for as long and is faster, so that a slow start leaves time for it.
    """
    start, *others = measured
    if not others:
        compiling = start.compile_seconds or 0.0
        return compiling + comparison.RIVAL * max(0.0, start.wall_seconds - compiling)
    return float(np.median([one.wall_seconds for one in measured]))


class _Tuning:
    """One process's share of a tuning, whose task's other processes may have left trials."""

    def __init__(self, task: Task, began: float):
        """``began`` is when this process began with it, of ``time.monotonic``."""
        self.task, self.space, self.hardware, self.progress = task, task.space, task.hardware, task.progress
        start, folder, most_cores = task.start, task.folder, task.goal.max_cores
        folder.check_same({knob.path: self.space.options(knob.path) for knob in self.space.knobs}, task.goal.name)
        kept = folder.trials()
        self.trials = kept if kept and kept[0].seconds is not None else []  # a start that failed is measured anew
        self._began = began
        self._spent_before = max(self.trials[-1].elapsed, folder.ended_after()) if self.trials else 0.0
        self.store = shared_store(self.hardware.id)
        seen = [trial.measurement for trial in self.trials]
        elsewhere = [m for m in shared_measurements(self.hardware.id, self.progress.say)[-HISTORY:] if m not in seen]
        self.most, self.state = corrections.begin(start, self.trials, self.hardware, most_cores)
        # By other machines, then by other work on this one; a tuning's own runs are what is learnt again and again.
        taught = RuntimePredictor.pretrained().fit(elsewhere)
        an_update = task.staleness_price / start.train.target_period
        key, goal = jax.random.key(task.seed), task.goal.kept_to(start)
        self.proposer = Proposer(self.space, self.hardware, taught, key, an_update, goal)
        levels = self.space.options("precision.level")
        self.levels = Levels(start, self.hardware, folder, self.progress.say, choices=levels)
        self.anchor = self.progress.enter(Anchor(hardware=self.hardware, say=self.progress.say))
        self.ending = Ending(task, self.proposer, self.levels, self.most, self.anchor, self.elapsed)

    @property
    def predictor(self) -> RuntimePredictor:
        """What is known of costs so far."""
        return self.proposer.predictor

    # Time ------------------------------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds spent on this tuning by all processes."""
        return self._spent_before + time.monotonic() - self._began

    def _trials_left(self) -> int:
        """How many more there is time for, about."""
        seconds = self.task.budget - self.elapsed() - self.ending.reserved(self.trials)
        return max(0, min(math.floor(seconds / self._trial_seconds()), self.task.max_trials - len(self._own())))

    def _own(self) -> list[Measurement]:
        """One of each process measured."""
        return [trial.measurement for trial in self.trials if trial.role != "shared"]

    def _trial_seconds(self) -> float:
        """What another trial must have."""
        return 1.2 * trial_seconds(self._own())

    def _least_budget(self) -> float:
        """Seconds of a budget that leaves time for another trial. More is kept of a larger one for comparing, up to a bound."""
        spent, budget = self.elapsed() + self._trial_seconds(), 0.0
        while (needed := spent + self.ending.reserved(self.trials, budget)) > budget:
            budget = needed
        return budget

    # Rounds ----------------------------------------------------------------------------------------------------------

    def run(self) -> TuneResult:
        """Baseline, rounds, comparison, and the files that tell of them. Ctrl-C, SIGTERM and SIGUSR1 keep the best so far."""
        try:
            result = self._search()
        except KeyboardInterrupt:
            if not self.trials or self.trials[0].seconds is None:
                raise
            result = self.ending.interrupted(self.trials)
        self.ending.write(result)
        return result

    def _search(self) -> TuneResult:
        """How it ends, by what is measured until the budget is spent; by what is known, where it has been."""
        if not self.trials:
            self._baseline()
        else:
            self.progress.say(f"continuing after {len(self.trials)} trials and {self._spent_before:.0f} s")
            self.progress.resume(self.trials)
        self._require_baseline()
        self._learn()
        number, left = len(self._own()), self._trials_left()
        while left and self._round(number, left):
            number, left = number + 1, self._trials_left()
        if (told := self.ending.told(self.trials)) is not None:
            self.progress.say(f"{self.task.folder.path} ends as it did before: {self._why_no_more(left)}")
            return told
        return self.ending.compare(self.trials)

    def _why_no_more(self, left: int) -> str:
        """Why no other trial was measured, and what would have one measured; ``left``: for how many there was time."""
        if left:
            return "nothing that is left to try is expected to gain anything"
        if len(self._own()) >= self.task.max_trials:
            return f"{len(self._own())} processes are measured; go on with more --trials"
        # Another process takes a little longer or shorter until it is here.
        return f"there is no time for another trial; go on with --budget {10 * math.ceil(self._least_budget() / 10 + 1)}s"

    def _baseline(self) -> None:
        self.progress.say("measuring the initial configuration")
        # It has the whole machine: nothing is known of it yet.
        use = resources.use_of(self.predictor.predict(describe(self.task.start), self.hardware))
        self._measure(self.task.start, use, "baseline", temperature=1.0)

    def _require_baseline(self) -> None:
        first = self.trials[0].measurement
        if first.outcome != Outcome.OK:
            fits = corrections.would_run(self.task.start, first, self.predictor, self.hardware)
            raise UserError("configuration", None, f"the initial one does not run here: {first.outcome}: {first.error}", fits)
        if self.task.goal.energy and first.joules_per_env_step is None:
            raise UserError("objective", self.task.goal.name, "its energy was not measured", "cost")

    def _learn(self) -> None:
        """The predictor, by this tuning's own runs beside what it knew."""
        self.proposer.learn([(self.space.encode(trial.changes), trial.measurement) for trial in self.trials])
        for level in self.levels.newly_refused(self.trials, self.ending.value, self.task.budget - self.elapsed()):
            self.proposer.cover(every_point_with(self.space, "precision.level", level))
        self.progress.choose(self.ending.best(self.trials))

    def _round(self, number: int, left: int) -> bool:
        """Proposes, allocates, measures, balances, learns. False when nothing is left, or no gain expected of what is.

        ``left``: trials that there is time for, this one included, which may gain together what none does alone.
        """
        temperature = temperature_of(number)
        if number % corrections.EVERY == 0:
            best, cores = self.ending.best(self.trials), self.space.options("allocation.cores")
            config, use, last = corrections.rebalanced(self.trials, best, self.predictor, self.hardware, self.most, cores)
            if self._fresh(config):
                self._measure(config, use, corrections.ROLE, temperature=temperature, beside=last)
                self._learn()
                return True
        while (point := self.proposer.propose(number)) is not None:
            cold = temperature == COLDEST and self.proposer.role_of(number) == "annealed"  # what it teaches few trials would use
            if cold and min(left, AHEAD) * self.proposer.expected_gain(point) < NOTHING:
                self.progress.say("no further trial is expected to gain anything")
                return False
            config, use = self._allocate(self.task.start.replace(self.space.decode(point)), temperature)
            if self._fresh(config):
                self._measure(config, use, self.proposer.role_of(number), temperature=temperature)
                self._learn()
                return True
            self.proposer.cover(point)  # with the cores it would be given, it is a point that was measured
        return False

    def _fresh(self, config: Config) -> bool:
        """Nothing was measured yet with its program and its cores."""
        changes = {knob.path: get(config, knob.path) for knob in self.space.knobs}
        return self.space.program(changes) not in {self.space.program(trial.changes) for trial in self.trials}

    def _measure(
        self,
        config: Config,
        use: np.ndarray,
        role: str,
        *,
        temperature: float,
        beside: tuple[Config, Measurement] | None = None,
    ) -> None:
        """Measures a configuration under its allocation, and keeps it, together with what shares its compiled program.

        A correction is measured ``beside`` the run that it corrects, and alone.
        """
        changes = {knob.path: get(config, knob.path) for knob in self.space.knobs}
        number = len(self.trials)
        first = self.trials[0] if self.trials else None
        predicted = self.predictor.predict(describe(config), self.hardware)
        expected = self._expected(changes, predicted.seconds_per_env_step)
        self.progress.trial(number, role, self._describe_changes(changes), expected, self.elapsed())
        before = time.monotonic()
        timeout = patience(first.measurement.wall_seconds if first else 60.0, predicted.compile_seconds)
        hardware, counts = self.hardware, self.proposer.further_loop_counts(self.space.encode(changes))
        limits: dict[str, Any] = {"seconds": self.task.burst, "enough": ENOUGH_SECONDS, "timeout": timeout}
        if beside is not None:
            measurements = [measure_beside(config, *beside, hardware=hardware, say=self.progress.say, **limits)]
        elif first is None:
            measurements = self.anchor.measure(config, loop_counts=counts, **limits)
        else:
            measurements = measure_config(
                config,
                hardware=hardware,
                **limits,
                loop_counts=counts,
                hopeless=HOPELESS * min(trial.seconds for trial in self.trials if trial.seconds),
                reference=self.anchor.beside(Config.from_dict(first.config), first.measurement, timeout),
                compile_cores=max(self.space.options("allocation.cores"), default=None),
                say=self.progress.say,
            )
        each = (time.monotonic() - before) / len(measurements)
        for index, measurement in enumerate(measurements):
            looped = config.replace("runtime.loop_count", int(measurement.workload.loop_count))
            uncalibrated, base, full, interval = self._predictions(looped)
            point = changes | ({"runtime.loop_count": looped.runtime.loop_count} if index else {})
            trial = Trial(
                number=len(self.trials),
                role=role if index == 0 else "shared",
                changes=point,
                config=looped.to_dict(),
                measurement=dataclasses.replace(measurement, wall_seconds=measurement.wall_seconds if index == 0 else each),
                predicted_uncalibrated=uncalibrated,
                predicted_base=base,
                predicted=full,
                predicted_use=tuple(float(x) for x in use),
                temperature=temperature,
                elapsed=self.elapsed(),
                balance=resources.balance_of_run(looped, measurement, self.hardware),
                predicted_interval=interval,
                expected=self._expected(point, full),
            )
            self.task.folder.append(trial)
            share(trial.measurement, self.store)
            self.trials.append(trial)
            self.progress.measured(trial, self.trials[0])

    def _expected(self, changes: dict[str, Any], predicted: float) -> float:
        """Seconds an environment step of a point, by the predictor and by what this tuning's trials say beyond it."""
        if self.task.goal.energy:  # they say it of seconds and power together
            return predicted
        return float(np.exp(self.proposer.log_seconds(np.array([self.space.encode(changes)])))[0])

    def _predictions(self, config: Config) -> tuple[float, float, float, tuple[float, ...]]:
        """Seconds an environment step: uncalibrated base, calibrated base, base and residual; the interval of these last."""
        workload = describe(config)
        plain, full = RuntimePredictor(), self.predictor.predict(workload, self.hardware)
        return (
            float(np.exp(plain.base_log_seconds(workload, self.hardware))),
            float(np.exp(self.predictor.base_log_seconds(workload, self.hardware))),
            full.seconds_per_env_step,
            full.interval,
        )

    def _allocate(self, config: Config, temperature: float) -> tuple[Config, np.ndarray]:
        """The configuration under its allocation, and the use [R] predicted of it."""
        use = resources.use_of(self.predictor.predict(describe(config), self.hardware))
        # By what is predicted of them now: what was predicted before they ran knew less, and what is learnt since counts once.
        measured = [trial.measurement for trial in self.trials]
        expected = [self.predictor.predict(one.workload, self.hardware) for one in measured]
        correction = resources.correction(zip(measured, map(resources.use_of, expected), strict=True))
        worth = corrections.marginal(self.predictor, describe(config), self.hardware)
        needs, most = use * correction, self.most
        self.state, given = resources.next_allocation(self.state, needs, temperature, self.hardware, most, worth)
        return resources.with_allocation(config, given, self.hardware, self.space.options("allocation.cores"), most), use

    def _describe_changes(self, changes: dict[str, Any]) -> str:
        moved = [f"{path.rpartition('.')[2]}={value}" for path, value in changes.items() if value != get(self.task.start, path)]
        return " ".join(moved) or "the start"
