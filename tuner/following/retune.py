"""Training in phases: where costs have changed and another configuration is expected to pay, the run goes on with that one.

A candidate is not measured beside the training but by it: the child is asked to save and stop, goes on from its checkpoint with
the change, and its steps a second are compared with those before. Nothing is thrown away, and nothing of what is learnt differs.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from predictor import Hardware, Measurement, Outcome, RuntimePredictor
from tuner.bridge import Config, ConfigError, RunDir, UserError, allocation_checked, concrete, enable_cache, get, tell
from tuner.corrections import more_memory
from tuner.following import phases, switches
from tuner.following.phases import Level, Reason
from tuner.following.process import POLL_SECONDS, STOPPED, Training
from tuner.following.switches import Switch
from tuner.goal import Goal
from tuner.history import HISTORY, shared_measurements
from tuner.neighbourhood import resumable_space
from tuner.objective import STALENESS_PRICE
from tuner.proposer import Point, Proposer
from tuner.resources import least_cores
from tuner.space import Space, feasible, workloads

NOTHING = 0.01  # a knob that is expected to win less than this share stays as it is
CANDIDATES = 3  # of a phase; then it is left alone until something changes again
WINDOWS = 4  # that costs are given to stop moving in, once they were seen to change
RELEASE_SHARE = 0.02  # of what is left of the training, that looking whether cores can be released may take
RELEASED = 0.98  # of the steps/s, that fewer cores must keep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """How a training that was followed ended."""

    code: int  # exit code of its last process; 130 when it was told to stop, before it could save or after
    said: str  # what that printed
    cores_busy: float  # of all processes, on average
    switches: tuple[Switch, ...]


def train_in_phases(
    config: Config,
    run: RunDir,
    arguments: Sequence[str],
    hardware: Hardware,
    *,
    expected: float = math.nan,
    as_json: bool = False,
    phased: bool = True,
    quiet: bool = False,
    most_memory_gib: float | None = None,
) -> Trained:
    """Trains in a process of its own, under its allocation from the start, and follows it from phase to phase.

    Ctrl-C, SIGTERM and SIGUSR1 have it save and stop; so does the end of this process, however it comes. What a run was switched
    to is in its configuration: ``muzerox train --resume`` goes on with it.

    Args:
      config: what the training is started with.
      arguments: of ``muzerox train`` that start it in ``run``.
      expected: seconds an environment step, as tuning measured or predicted them; NaN where nobody did.
      phased: False only trains.
      quiet: nothing on stderr but what the training says.
      most_memory_gib: that somebody asked for; no switch goes beyond it. None: what the machine has.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    goal = Goal(max_memory_gib=most_memory_gib)
    follower = _Phases(concrete(config, hardware.platform), run, hardware, goal, as_json=as_json, quiet=quiet)
    follower.state = phases.State(expected=expected)
    code, said = follower.train(arguments, phased=phased)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Trained(code=code, said=said, cores_busy=cpu / seconds, switches=tuple(switches.load(run)))


def measured(space: Space, point: Point, now: Level | None, hardware: Hardware) -> Measurement:
    """What a stretch of the training says of the configuration at ``point``; None: that it does not run."""
    fields = workloads(space.base, space.tables(), jnp.asarray([point], jnp.int32))
    workload = jax.tree.map(lambda x: float(np.asarray(x)[0]), fields)
    if now is None:
        return Measurement(hardware=hardware, workload=workload, outcome=Outcome.CRASHED)
    return Measurement(
        hardware=hardware,
        workload=workload,
        outcome=Outcome.OK,
        seconds_per_env_step=now.seconds_per_env_step,
        env_steps_per_second=1.0 / now.seconds_per_env_step,
        from_cache=True,
    )


class _Phases:
    """One process's share of following a run."""

    def __init__(self, config: Config, run: RunDir, hardware: Hardware, goal: Goal, *, as_json: bool, quiet: bool):
        self.run, self.hardware, self.goal, self.quiet = run, hardware, goal, quiet
        self.training = Training(config, run, hardware, as_json=as_json)
        self.state = phases.State()
        self.number = max((switch.number + 1 for switch in switches.load(run)), default=0)
        self.host_step_more = 0.0  # seconds that a step of an environment takes beyond what was measured before the training
        self.taught: RuntimePredictor | None = None

    def say(self, text: str) -> None:
        """One line on stderr."""
        if not self.quiet:
            tell(f"phases: {text}")

    def train(self, arguments: Sequence[str], *, phased: bool) -> tuple[int, str]:
        """Starts the training and follows it to its end. Exit code, and what its last process printed."""
        training = self.training
        self._undo_what_was_on_trial()
        with training.signals():
            training.start(arguments)
            while (code := training.wait(POLL_SECONDS if phased else None)) is None:
                for report in training.reports():
                    self.state, reason = phases.watch(self.state, report)
                    if reason is not None and not training.stopping:
                        self._end_phase(reason)
                        break  # what was reported meanwhile belongs to no phase
            return code, training.said()

    def _undo_what_was_on_trial(self) -> None:
        """A switch that whoever followed the run before was killed over: nobody has seen whether it pays."""
        last = next(reversed(switches.load(self.run)), None)
        if last is None or last.verdict != switches.ON_TRIAL:
            return
        if not self._is_left_with(last.after):  # it did not get that far, or somebody has changed it since
            self._judge(last, "cut short")
            return
        with self.run.lock():
            self.training.restore(last.before)
        config = self.training.config
        # What is asked for now has the last word.
        self.training.config = config.replace({p: v for p, v in last.before.items() if get(config, p) == last.after[p]})
        self._judge(last, "undone")

    # A phase ends ----------------------------------------------------------------------------------------------------

    def _end_phase(self, reason: Reason) -> None:
        """Looks for what is faster now, and goes on with it."""
        training = self.training
        self.say(reason.text)
        if reason.kind == "return":
            self._release(reason)
            return
        settled = self._settled(reason)
        if settled is None:
            return  # ended, or searches have deepened, which is for another phase to look at
        reason = settled
        more = reason.now.clocks[0] - reason.before.clocks[0]  # of a row; NaN without environments on the host
        self.host_step_more += more / training.config.runtime.num_envs if math.isfinite(more) else 0.0
        left = training.seconds_left(reason.now.seconds_per_env_step)
        if not phases.pays(2.0, left, training.cost):  # hardly any change is that good
            self.say(f"{left:.0f} s are left, and a restart takes {training.cost:.0f} s: it goes on as it is")
            return
        seconds = self._anneal(reason)
        if seconds is not None:
            self.state = phases.fresh(self.state, expected=seconds)

    def _settled(self, reason: Reason) -> Reason | None:
        """``reason`` with costs as they are once they have stopped moving: a change is seen while it goes on.

        What is left of the training and what a switch wins would both be told wrongly by costs of the way there.
        """
        for _ in range(WINDOWS):
            reports = self.training.gather(self.state.simulations, settle=0.0, seconds=phases.WINDOW_SECONDS)
            if reports is None or reports[-1].simulations != reason.now.simulations:
                return None
            reason = reason._replace(now=phases.level(reports))
            if phases.is_steady(reports):
                break
        return reason

    def _anneal(self, reason: Reason) -> float | None:
        """Tries what the predictor, with history and the training itself in mind, thinks is best. Seconds a step at the end."""
        training = self.training
        enable_cache()
        space = resumable_space(training.now, self.hardware.platform, self.host_step_more)
        if self.taught is None:
            self.taught = RuntimePredictor.pretrained().fit(self._history()[-HISTORY:])
        price = STALENESS_PRICE / training.config.train.target_period
        proposer = Proposer(space, self.hardware, self.taught, jax.random.key(self.number), price, self.goal)
        here, seconds = space.start, reason.now.seconds_per_env_step
        known = [(here, measured(space, here, reason.now, self.hardware))]
        for number in range(1, CANDIDATES + 1):
            proposer.learn(known)
            point = proposer.propose(number)
            if point is None:
                break
            point = self._simpler(proposer, here, point)
            if point in (found for found, _ in known):
                proposer.cover(point)  # what else it had would have made no difference
                continue
            gain = self._gain(proposer, here, point)
            if not phases.pays(gain, training.seconds_left(seconds), training.cost):
                self.say(
                    f"the best other configuration is expected to be {gain:.2f} times as fast: not worth {training.cost:.0f} s"
                )
                break
            wanted, current = space.decode(point), space.decode(here)
            changes = {path: value for path, value in wanted.items() if value != current[path]}
            judged = self._try(changes, reason, gain, seconds)
            if judged is None:
                return None  # this phase is over
            verdict, now = judged
            known.append((point, measured(space, point, now, self.hardware)))
            if now is not None and verdict in ("kept", "left"):
                here, seconds = point, now.seconds_per_env_step
        return seconds

    def _history(self) -> list[Measurement]:
        """What this machine has measured; nothing, and why, where that cannot be read: a training is not stopped for advice."""
        try:
            return shared_measurements(self.hardware.id, self.say)
        except UserError as error:
            self.say(f"goes on without this machine's history: {error}")
            return []

    def _gain(self, proposer: Proposer, here: Point, point: Point) -> float:
        """How many times faster ``point`` is expected to be."""
        logs = proposer.log_seconds(np.array([here, point], np.int32))
        return float(np.exp(logs[0] - logs[1]))

    def _simpler(self, proposer: Proposer, here: Point, point: Point) -> Point:
        """``point`` without the moves from ``here`` that are expected to win next to nothing: they may have to be compiled."""
        space = proposer.space
        for column in range(len(point)):
            without = (*point[:column], here[column], *point[column + 1 :])
            made = workloads(space.base, space.tables(), jnp.asarray([without], jnp.int32))
            allowed = bool(feasible(made, space.max_num_envs, space.max_staleness)[0])
            if allowed and self._gain(proposer, without, point) < 1.0 + NOTHING:
                point = without
        return point

    def _release(self, reason: Reason) -> None:
        """Late convergence: the fewest cores that training is expected to keep its pace on, while it runs."""
        training = self.training
        cores, busy = training.config.allocation.cores, training.last.cores_busy if training.last else math.nan
        fewer = max(math.ceil(busy + 0.1), least_cores(training.config)) if math.isfinite(busy) else 0
        took = phases.SETTLE_SECONDS + phases.MEASURE_SECONDS
        left = training.seconds_left(reason.now.seconds_per_env_step)
        if cores is None or not 0 < fewer < cores or took > RELEASE_SHARE * left:
            return
        self._try({"allocation.cores": fewer}, reason, 1.0, reason.now.seconds_per_env_step)

    # A candidate -----------------------------------------------------------------------------------------------------

    def _try(
        self, changes: Mapping[str, Any], reason: Reason, expected: float, seconds: float
    ) -> tuple[str, Level | None] | None:
        """Goes on with ``changes``, and back where they do not pay. Verdict and costs (None: it failed).

        None: the training has ended, or its searches have deepened, which is for another phase to look at.
        """
        training = self.training
        assert training.last is not None
        if self.taught is not None:
            most = self.goal.max_memory_gib or math.inf
            changes = {**changes, **more_memory(training.now, changes, self.taught, self.hardware, most)}
        try:
            allocation_checked(training.config.replace(changes))
        except ConfigError as error:
            self.say(f"it goes on as it is: {error}")
            return "failed", None
        back = {path: get(training.config, path) for path in changes}
        live = training.is_live(changes)
        switch = Switch(
            number=self.number,
            env_steps=training.last.env_steps,
            kind=reason.kind,
            reason=reason.text,
            how="live" if live else "restart",
            before=back,
            after=dict(changes),
            expected_gain=round(expected, 4),
        )
        self.number += 1
        switches.append(self.run, switch)
        self.say(f"trying {_text(changes)}, expected to be {expected:.2f} times as fast")
        outcome = training.change(changes)
        if outcome == "running" and not live:
            switch = dataclasses.replace(switch, cost_seconds=round(training.cost, 2))
        reports = training.gather(self.state.simulations) if outcome == "running" else None
        if outcome == "running" and reports is None:
            outcome = "failed" if training.wait() not in (0, STOPPED) else "ended"
        if outcome == "failed":
            self._judge(switch, "failed")
            return ("failed", None) if self._recover(back) else None
        if reports is None:
            self._judge(switch, "cut short")
            return None
        now = phases.level(reports)
        if now.simulations != reason.now.simulations:  # deeper meanwhile: nobody knows what they cost without the changes
            self._judge(switch, "undone" if live and self._go_back(back) else "left")
            return None
        gain = seconds / now.seconds_per_env_step
        switch = dataclasses.replace(switch, measured_gain=round(gain, 4))
        if reason.kind == "return":
            verdict = "kept" if gain > RELEASED else "undone"
        else:
            verdict = phases.verdict(gain, training.seconds_left(seconds), 0.0 if live else training.cost)
        if verdict == "undone" and not self._go_back(back):
            self._judge(switch, "undone" if self._is_left_with(back) else "left")
            return None
        self._judge(switch, verdict)
        return verdict, now

    def _go_back(self, back: Mapping[str, Any]) -> bool:
        """Goes on with ``back``, at the second attempt where the first fails. False: the training has ended."""
        outcome = self.training.change(back)
        return self._recover(back) if outcome == "failed" else outcome == "running"

    def _recover(self, back: Mapping[str, Any]) -> bool:
        """Goes on with ``back`` after a process has failed. False: the training has ended."""
        self.training.restore(back)  # what failed may be in the run's configuration, and another process may not get that far
        if self.training.stopping:
            return False
        self.training.resume(back)
        return self.training.gather(self.state.simulations) is not None

    def _is_left_with(self, values: Mapping[str, Any]) -> bool:
        """Whether the run, at which no process is at work, would go on with ``values``: one writes them before it compiles."""
        config = concrete(self.run.load_config(), self.hardware.platform)
        return all(get(config, path) == value for path, value in values.items())

    def _judge(self, switch: Switch, verdict: str) -> None:
        switches.append(self.run, dataclasses.replace(switch, time=time.time(), verdict=verdict))
        gain = "" if switch.measured_gain is None else f", measured {switch.measured_gain:.2f} times as fast"
        self.say(f"{verdict}: {_text(switch.after)}{gain}")


def _text(changes: Mapping[str, Any]) -> str:
    return " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in changes.items())
