"""Training from a configuration or a run directory: act, learn, evaluate, save, until solved or out of steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from muzerox import allocation, config_io, usage
from muzerox.algorithms import make_algorithm
from muzerox.checkpoint import Checkpoints
from muzerox.compilation import enable_cache
from muzerox.config import RESUMABLE, Config
from muzerox.envs import make_env
from muzerox.errors import CheckpointError, ConfigError, RunFailed
from muzerox.evaluate import HOST_BATCH, Evaluation, Stopped, make_evaluate, solved
from muzerox.live import LiveKnobs
from muzerox.precision import has_diverged, resolve
from muzerox.report import Reporter, draw_return_curve
from muzerox.run_dir import RunDir, write_atomically
from muzerox.runtimes import deepenings_by_updates, make_runtime, offer_cpu_devices, resolve_kind
from muzerox.search import check_room
from muzerox.timing import PhaseClock, PipelineTotals, portion, seconds_since_process_start
from muzerox.types import Environment, HostEnvironment, Params, Skips


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a call of ``train`` or ``resume`` ended. Also the contents of ``result.json`` once the run has finished."""

    out: str
    solved: bool  # an evaluation reached train.target_return
    finished: bool  # False when a signal stopped it; it can be resumed
    env_steps: int
    updates: int
    mean_return: float | None  # of the last evaluation
    std_return: float | None
    episodes: int | None
    seconds: float  # wall seconds of this process, imports and compilation included
    env_steps_per_second: float  # of this process, while acting and learning
    updates_per_second: float
    first_update_seconds: float | None  # from process start to the first completed dispatch; absent when a signal came first
    phases: dict[str, float]  # wall seconds by phase
    peak_memory_gib: float | None = None  # that this process held, with those it had started; absent where nobody tells
    pipeline: dict[str, float] = dataclasses.field(default_factory=dict)  # under sebulba: waits, depths, staleness, failures

    def to_dict(self) -> dict[str, Any]:
        """Plain values, absent ones left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None and v != {}}


_ABSENT = dict.fromkeys(("mean_return", "std_return", "episodes", "first_update_seconds"))  # left out of result.json


def train(config: Config, out: str | Path | None = None, *, quiet: bool = False) -> TrainResult:
    """Trains from scratch in a new run directory.

    Args:
      out: the directory, new or empty; by default one under ``runs/``.
      quiet: nothing on stderr.

    Raises:
      UserError: an environment, device or directory that cannot be used; nothing is written then.
      RunFailed: training diverged.
    """
    with _allocated(config):
        config = config.replace({f"precision.{k}": v for k, v in dataclasses.asdict(resolve(config.precision)).items()})
        run = RunDir(out) if out is not None else RunDir.default(config)
        run.check_new()  # before anything is compiled; create() checks again when the rest is known to be right
        session = _Session(config, run)
        run.create(session.config)
        return session.go(quiet=quiet)


def resume(path: str | Path, *, changes: Mapping[str, Any] | None = None, quiet: bool = False) -> TrainResult:
    """Continues a run from its newest checkpoint, or from its configuration when it was killed before the first.

    Args:
      path: the run directory.
      changes: dotted paths among ``RESUMABLE`` with new values.

    Returns:
      What the run reported, at once, when it has already finished and ``changes`` is empty.

    Raises:
      UserError: not a run, a corrupt checkpoint, another process at work on it, or a change that cannot be made.
    """
    run = RunDir(path)
    config = run.load_config()
    result = run.result()
    if result is not None and not changes:
        try:
            return TrainResult(**{**_ABSENT, **result, "out": str(run.path)})
        except TypeError:
            raise CheckpointError(str(run.result_file), None, "lacks what a result holds; delete it to resume the run") from None
    for name in changes or {}:
        if name not in RESUMABLE:
            raise ConfigError(name, None, f"cannot change when a run is resumed; what can: {', '.join(RESUMABLE)}")
    config = config.replace(changes or {})
    with _allocated(config):
        return _Session(config, run, run.last_saved()).go(quiet=quiet, changed=bool(changes))


@contextmanager
def _allocated(config: Config) -> Iterator[None]:
    """Inside a block this process keeps to its allocation; if JAX starts there, it has the devices that are asked for."""
    with allocation.applied(config.allocation):
        offer_cpu_devices(config.runtime.num_devices)
        yield


class _Session:
    """One process's share of a run, after so many ``updates``. Building it touches no disk."""

    def __init__(self, config: Config, run: RunDir, updates: int = 0):
        enable_cache()
        self.run, self.clock = run, PhaseClock()
        with self.clock.phase("build"):
            self.env: Environment | HostEnvironment = make_env(config.env)
            self.config = resolve_kind(config, self.env)
            _check_searches(self.config, self.env)
            self.deepenings = deepenings_by_updates(self.config)
            self._build(updates)

    def _build(self, updates: int) -> None:
        """What trains after so many updates, with searches as deep as they are then."""
        self.simulations = self._simulations_after(updates)
        config = self.config.searching(self.simulations)
        self.algorithm = make_algorithm(config, self.env.spec)
        self.runtime = make_runtime(config, self.env, self.algorithm)
        vars(self).pop("evaluate", None)

    def close(self) -> None:
        """Ends threads and environments."""
        self.runtime.close()

    def _simulations_after(self, updates: int) -> int:
        return [simulations for first, simulations in self.deepenings if first <= updates][-1]

    @cached_property
    def evaluate(self) -> Callable[[int, Params, Callable[[], bool]], Evaluation]:
        """See ``make_evaluate``; its program starts to compile at the first access."""
        return make_evaluate(self.config, self.env, self.algorithm)

    def go(self, *, quiet: bool, changed: bool = False) -> TrainResult:
        """Restores or initialises, then trains to the end. ``changed``: the configuration on disk is to be replaced."""
        with (
            contextlib.closing(self),
            self.run.lock(),
            _stop_signals(lambda: self.runtime.interrupt()) as stopped,
            allocation.running_out("lower train.batch_size, runtime.num_envs, search.num_simulations or replay.capacity"),
        ):
            with self.clock.phase("restore"):
                checkpoints = Checkpoints(self.run.checkpoints, writable=True)
                begun = [self._begin(checkpoints)]
            updates, start = int(begun[0].learner.updates), begun[0].env_steps
            if changed:  # only now that the run is ours and its checkpoint is sound
                self.run.result_file.unlink(missing_ok=True)
                write_atomically(self.run.config_file, config_io.dumps(self.config))
            self.run.rewind_metrics(updates)
            try:
                now = self.config.searching(self.simulations)
                with Reporter(self.run, now, quiet=quiet, start=start) as reporter:
                    if start:
                        reporter.say(f"resumed at update {updates:,} ({start:,} steps)")
                    # Held by the loop alone, which lets go of it: where a runtime copies the replay, this is another of it.
                    return self._loop(begun.pop(), updates, start, checkpoints, reporter, stopped)
            finally:
                checkpoints.close()

    def _begin(self, checkpoints: Checkpoints) -> Any:
        """The state that was saved last, or a fresh one."""
        if checkpoints.latest() is None:
            return self.runtime.init(jax.random.key(self.config.seed))
        return checkpoints.restore_state(jax.eval_shape(self.runtime.init, jax.random.key(0)))

    def _next_evaluation(self, earliest: int, updates: int) -> int:
        """The first evaluation due after ``updates``, counted in evaluation periods; self-play may be ahead of updates."""
        period = self.config.train.eval_period
        while earliest > 1 and self.runtime.updates_at((earliest - 1) * period) > updates:
            earliest -= 1
        while self.runtime.updates_at(earliest * period) <= updates:
            earliest += 1
        return earliest

    def _first_evaluation(self, env_steps: int, updates: int) -> int:
        """The first evaluation due, counted so too: one that was due before and that a stop or a failure left out is owed."""
        following = self._next_evaluation(env_steps // self.config.train.eval_period + 1, updates)
        before = self.runtime.updates_at((following - 1) * self.config.train.eval_period)
        owed = following > 1 and before > self.run.last_evaluated()
        return following - 1 if owed else following

    def _deepen(self, state: Any, updates: int, reporter: Reporter) -> Any:
        """The state, in another runtime that makes more simulations: as if it had been saved, and restored."""
        with self.clock.phase("build"):
            state = self.runtime.snapshot(state)
            self.runtime.close()
            gc.collect()  # threads and what they share refer to one another: until it is found, the ring they had is kept
            self._build(updates)
        reporter.deepened(self.simulations)
        return state

    def _take(self, live: LiveKnobs, reporter: Reporter) -> int | None:
        """The loop count from now on, when a change was asked for."""
        config = live.poll()
        if config is None:
            return None
        reporter.say(f"from now on: {config.runtime.loop_count} updates a dispatch, {config.allocation.cores or 'all'} cores")
        return config.runtime.loop_count

    def _save(self, state: Any, checkpoints: Checkpoints, reporter: Reporter, *, least: int = 0) -> None:
        """Has what was learnt on the disk, unless it is there already or is less than so many updates."""
        with self.clock.phase("checkpoint"):
            state = self.runtime.snapshot(state)
            updates = int(state.learner.updates)
            if updates >= least and checkpoints.latest() != updates:
                checkpoints.save(updates, state, state.learner.params)
            for step in checkpoints.finished(wait=True):
                reporter.saved(step, self.clock.total)

    @contextmanager
    def _keeping(self, state: Any, checkpoints: Checkpoints, reporter: Reporter, *, least: int) -> Iterator[None]:
        """Saves what was learnt, at least so many updates, when a simulator ends the training: it is worth no less."""
        try:
            yield
        except RunFailed:
            self._save(state, checkpoints, reporter, least=least)
            raise

    def _loop(
        self, state: Any, updates: int, start: int, checkpoints: Checkpoints, reporter: Reporter, stopped: Callable[[], bool]
    ) -> TrainResult:
        train, clock = self.config.train, self.clock
        env_steps, first_seconds = start, None
        compiled, timed_steps, timed_updates = False, 0, 0  # timed: what dispatches made that did not compile
        evaluation: Evaluation | None = None
        finished, skips = False, Skips()
        keeping = functools.partial(self._keeping, checkpoints=checkpoints, reporter=reporter, least=updates + 1)
        last = self.runtime.updates_at(train.max_env_steps)
        next_evaluation = self._first_evaluation(start, updates)
        saved_at, seconds_an_update = time.perf_counter(), math.inf
        totals = PipelineTotals()
        loop_count = self.config.runtime.loop_count
        live = LiveKnobs(self.run, self.config)

        while not stopped():
            try:
                loop_count = self._take(live, reporter) or loop_count
            except ConfigError as error:
                reporter.say(f"not taken: {error}")
            if self._simulations_after(updates) != self.simulations:
                state, compiled = self._deepen(state, updates, reporter), False
                if stopped():  # the runtime that was asked to return soon is gone
                    break
            # How updates are portioned out changes nothing that is learnt: no dispatch is so long that reports and signals
            # have to wait for it, and evaluations come when they are due, however fast the machine is.
            evaluation_due = self.runtime.updates_at(next_evaluation * train.eval_period)
            deepening_due = min((first for first, _ in self.deepenings if first > updates), default=last)
            due = min(evaluation_due, deepening_due, last) - updates
            n, count = portion(due, loop_count, seconds_an_update)
            if due > 0:  # not so when a run is resumed that had finished, or that owes an evaluation
                before = time.perf_counter()
                with clock.phase("train" if compiled else "first dispatch"), keeping(state):
                    state, report = self.runtime.run(state, n, count)
                made = report.updates - updates  # none when a signal came first
                if compiled:
                    seconds_an_update = (time.perf_counter() - before) / (n * count)
                    timed_steps, timed_updates = timed_steps + report.env_steps - env_steps, timed_updates + made
                elif made:
                    compiled, first_seconds = True, first_seconds or seconds_since_process_start()
                    _ = self.evaluate  # compiles beside training from now on: earlier it would have taken a core from it
                env_steps, updates = report.env_steps, report.updates
                totals.add(report.pipeline)
                if made:
                    reporter.training(report, clock.total, timed_steps, clock.seconds.get("train", 0.0))
                skips = skips.then(report.skips)
                _check_progress(self.config, skips)
            done = updates >= last
            if done or updates >= evaluation_due:
                if stopped():
                    break  # the evaluation is owed: the run makes it when it is resumed
                try:
                    with clock.phase("evaluate"), keeping(state):
                        evaluation = self.evaluate(updates, state.learner.params, stopped)
                except Stopped:
                    break
                next_evaluation = self._next_evaluation(next_evaluation + 1, updates)
                reporter.evaluation(env_steps, updates, clock.total, evaluation.to_dict())
                done = done or solved(self.config, evaluation)
            if done:
                finished = True
                break
            with clock.phase("checkpoint"):
                if time.perf_counter() - saved_at >= train.checkpoint_period:
                    checkpoints.save(updates, self.runtime.snapshot(state), state.learner.params)
                    saved_at = time.perf_counter()
                for step in checkpoints.finished():
                    reporter.saved(step, clock.total)

        self._save(state, checkpoints, reporter)
        trained = clock.seconds.get("train", 0.0)
        result = TrainResult(
            out=str(self.run.path),
            solved=finished and solved(self.config, evaluation),
            finished=finished,
            env_steps=env_steps,
            updates=updates,
            mean_return=evaluation.mean_return if evaluation else None,
            std_return=evaluation.std_return if evaluation else None,
            episodes=evaluation.episodes if evaluation else None,
            seconds=seconds_since_process_start(),
            env_steps_per_second=timed_steps / trained if trained else 0.0,
            updates_per_second=timed_updates / trained if trained else 0.0,
            first_update_seconds=first_seconds,
            phases={k: round(v, 3) for k, v in clock.seconds.items()},
            peak_memory_gib=round(usage.peak_bytes() / 2**30, 3) or None,
            pipeline=totals.result(),
        )
        if finished:
            write_atomically(self.run.result_file, json.dumps(result.to_dict(), indent=1) + "\n")
        draw_return_curve(self.run, self.config)  # stopped by a signal too: it may never go on
        return result


def _check_searches(config: Config, env: Environment | HostEnvironment) -> None:
    """Raises ConfigError when a search of this training would be too large, which some find out long after its start."""
    train = config.train
    evaluated = min(train.eval_episodes, HOST_BATCH) if isinstance(env, HostEnvironment) else train.eval_episodes
    for roots in (config.runtime.num_envs, evaluated, config.reanalyzed * (train.unroll_steps + 1)):
        if roots:
            check_room(config.search, roots, env.spec.num_actions)


def _check_progress(config: Config, skips: Skips) -> None:
    """Raises RunFailed when more updates in a row were skipped than can be when nothing is wrong."""
    if has_diverged(config.precision, skips):
        static = resolve(config.precision).loss_scale == "static"
        scale = "precision.initial_loss_scale (or set precision.loss_scale = dynamic), " if static else ""
        raise RunFailed(
            f"training diverged: not one of {skips.longest} updates in a row had finite gradients; "
            f"lower {scale}train.learning_rate, or raise precision.level's range with O1 or O0"
        )


@contextmanager
def _stop_signals(interrupt: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and SIGUSR1 ask the loop to save and stop, and call ``interrupt``.

    Ctrl-C after any of them acts at once. A second one of the others means nothing: schedulers send SIGTERM to every process of
    a job, so that a training that is followed has one from each; and SIGUSR1, which is sent ahead of the end, and which tells a
    training that whoever followed it is gone, comes once for each thread of that process.
    """
    received: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, _frame: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, previous[signal.SIGINT])
        interrupt()

    try:
        for number in (int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGUSR1)):
            previous[number] = signal.signal(number, handle)
    except ValueError:
        previous.clear()  # not the main thread: signals are the caller's affair
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
