"""Training in phases: where costs have changed and another configuration is expected to pay, the run goes on with that one.

A candidate is not measured beside the training but by it: the child is asked to save and stop, goes on from its checkpoint with
the change, and its steps a second are compared with those before. Nothing is thrown away, and nothing of what is learnt differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from predictor import Hardware, Measurement, Outcome, RuntimePredictor
from tuner import phases, switches
from tuner.bridge import (
    Config,
    RunDir,
    ask_live,
    can_change_live,
    concrete,
    enable_cache,
    get,
)
from tuner.child import Child, Follower
from tuner.corrections import more_memory
from tuner.history import HISTORY, shared_measurements
from tuner.neighbourhood import resumable_space
from tuner.objective import STALENESS_PRICE
from tuner.phases import Level, Reason, Report
from tuner.proposer import Point, Proposer
from tuner.space import Space, feasible, workloads
from tuner.switches import Switch

NOTHING = 0.01  # a knob that is expected to win less than this share stays as it is
CANDIDATES = 3  # of a phase; then it is left alone until something changes again
POLL_SECONDS = 0.25
WINDOWS = 4  # that costs are given to stop moving in, once they were seen to change
MEASURE_SECONDS = 8.0  # of a candidate, once it has settled
RELEASE_SHARE = 0.02  # of what is left of the training, that looking whether cores can be released may take
RELEASED = 0.98  # of the steps/s, that fewer cores must keep
START_SECONDS = 60.0  # and ten times what a start took before: after these a candidate has failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """How a training that was followed ended."""

    code: int  # exit code of its last process
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
) -> Trained:
    """Trains in a process of its own, under its allocation from the start, and follows it from phase to phase.

    Ctrl-C and SIGTERM have it save and stop; so does the end of this process, however it comes. What a run was switched to is
    in its configuration: ``muzerox train --resume`` goes on with it.

    Args:
      config: what the training is started with.
      arguments: of ``muzerox train`` that start it in ``run``.
      expected: seconds an environment step, as tuning measured or predicted them; NaN where nobody did.
      phased: False only trains.
      quiet: nothing on stderr but what the training says.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    follower = _Phases(concrete(config, hardware.platform), run, hardware, as_json=as_json, quiet=quiet)
    follower.state = phases.State(expected=expected)
    code, said = follower.train(arguments, phased=phased)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Trained(code=code, said=said, cores_busy=cpu / seconds, switches=tuple(switches.load(run)))


def measured(space: Space, point: Point, now: Level, hardware: Hardware) -> Measurement:
    """What a stretch of the training says of the configuration at ``point``."""
    fields = workloads(space.base, space.tables(), jnp.asarray([point], jnp.int32))
    return Measurement(
        hardware=hardware,
        workload=jax.tree.map(lambda x: float(np.asarray(x)[0]), fields),
        outcome=Outcome.OK,
        seconds_per_env_step=now.seconds_per_env_step,
        env_steps_per_second=1.0 / now.seconds_per_env_step,
        from_cache=True,
    )


class _Phases:
    """One process's share of following a run."""

    def __init__(self, config: Config, run: RunDir, hardware: Hardware, *, as_json: bool, quiet: bool):
        self.config, self.run, self.hardware = config, run, hardware
        self.as_json, self.quiet = as_json, quiet
        self.follower = Follower(run)
        self.state = phases.State()
        self.number = max((switch.number + 1 for switch in switches.load(run)), default=0)
        self.cost = math.nan  # seconds that a restart takes
        self.last: Report | None = None
        self.host_step_more = 0.0  # seconds that a step of an environment takes beyond what was measured before the training
        self.stopping = False
        self.started_cores = config.allocation.cores
        self.taught: RuntimePredictor | None = None

    def say(self, text: str) -> None:
        """One line on stderr."""
        if not self.quiet:
            print(f"phases: {text}", file=sys.stderr, flush=True)

    # The process -----------------------------------------------------------------------------------------------------

    def train(self, arguments: Sequence[str], *, phased: bool) -> tuple[int, str]:
        """Starts the training and follows it to its end. Exit code, and what its last process printed."""
        with self._signals():
            self._start(arguments)
            while (code := self.child.wait(POLL_SECONDS if phased else None)) is None:
                for report in self._reports():
                    self.state, reason = phases.watch(self.state, report)
                    if reason is not None and not self.stopping:
                        self._end_phase(reason)
                        break  # what was reported meanwhile belongs to no phase
            return code, self.child.said()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The child answers both by saving. A terminal sends it Ctrl-C itself; a second would end it at once: not passed on."""

        def interrupt(*_: Any) -> None:
            self.stopping = True

        def terminate(*_: Any) -> None:
            self.stopping = True
            self.child.stop()

        handlers = {signal.SIGINT: interrupt, signal.SIGTERM: terminate}
        previous = {number: signal.signal(number, how) for number, how in handlers.items()}
        try:
            yield
        finally:
            for number, how in previous.items():
                signal.signal(number, how)

    def _start(self, arguments: Sequence[str]) -> None:
        self.follower.restart()
        self.started_cores = self.config.allocation.cores
        self.child = Child(arguments, as_json=self.as_json)
        if self.stopping:  # asked for between two processes
            self.child.stop()

    def _reports(self) -> list[Report]:
        found = self.follower.read(self.config)
        if found:
            if math.isnan(self.cost):  # a start, with what it compiled, is about what a restart will take
                self.cost = time.monotonic() - self.child.began - sum(report.seconds for report in found)
            self.last = found[-1]
        return found

    @property
    def _now(self) -> Config:
        """The configuration, with searches as deep as they are by now."""
        return self.config.searching(self.last.simulations) if self.last else self.config

    def _seconds_left(self, seconds_per_env_step: float) -> float:
        """Of the training, at this pace; more where searches are yet to deepen."""
        assert self.last is not None
        train = self.config.train
        return phases.steps_left(self.last.env_steps, train.max_env_steps, train.target_return) * seconds_per_env_step

    # A phase ends ----------------------------------------------------------------------------------------------------

    def _end_phase(self, reason: Reason) -> None:
        """Looks for what is faster now, and goes on with it."""
        self.say(reason.text)
        if reason.kind == "return":
            self._release(reason)
            return
        settled = self._settled(reason)
        if settled is None:
            return  # ended, or searches have deepened, which is for another phase to look at
        reason = settled
        more = reason.now.clocks[0] - reason.before.clocks[0]  # of a row; NaN without environments on the host
        self.host_step_more += more / self.config.runtime.num_envs if math.isfinite(more) else 0.0
        left = self._seconds_left(reason.now.seconds_per_env_step)
        if not phases.pays(2.0, left, self.cost):  # hardly any change is that good
            self.say(f"{left:.0f} s are left, and a restart takes {self.cost:.0f} s: it goes on as it is")
            return
        seconds = self._anneal(reason)
        if seconds is not None:
            self.state = phases.fresh(self.state, expected=seconds)

    def _settled(self, reason: Reason) -> Reason | None:
        """``reason`` with costs as they are once they have stopped moving: a change is seen while it goes on.

        What is left of the training and what a switch wins would both be told wrongly by costs of the way there.
        """
        for _ in range(WINDOWS):
            reports = self._gather(settle=0.0, seconds=phases.WINDOW_SECONDS)
            if reports is None or reports[-1].simulations != reason.now.simulations:
                return None
            reason = reason._replace(now=phases.level(reports))
            if phases.is_steady(reports):
                break
        return reason

    def _anneal(self, reason: Reason) -> float | None:
        """Tries what the predictor, with history and the training itself in mind, thinks is best. Seconds a step at the end."""
        enable_cache()
        space = resumable_space(self._now, self.hardware.platform, self.host_step_more)
        if self.taught is None:
            self.taught = RuntimePredictor.pretrained().fit(shared_measurements(self.hardware.id, self.say)[-HISTORY:])
        price = STALENESS_PRICE / self.config.train.target_period
        proposer = Proposer(space, self.hardware, self.taught, jax.random.key(self.number), price)
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
            if not phases.pays(gain, self._seconds_left(seconds), self.cost):
                self.say(f"the best other configuration is expected to be {gain:.2f} times as fast: not worth {self.cost:.0f} s")
                break
            wanted, current = space.decode(point), space.decode(here)
            changes = {path: value for path, value in wanted.items() if value != current[path]}
            judged = self._try(changes, reason, gain, seconds)
            if judged is None:
                return None  # this phase is over
            verdict, now = judged
            if now is None:
                failed = dataclasses.replace(known[0][1], outcome=Outcome.CRASHED, seconds_per_env_step=None)
                known.append((point, failed))
                continue
            known.append((point, measured(space, point, now, self.hardware)))
            if verdict in ("kept", "left"):
                here, seconds = point, now.seconds_per_env_step
        return seconds

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
        cores, busy = self.config.allocation.cores, self.last.cores_busy if self.last else math.nan
        fewer = math.ceil(busy + 0.1) if math.isfinite(busy) else 0
        took = phases.SETTLE_SECONDS + MEASURE_SECONDS
        if cores is None or not 0 < fewer < cores or took > RELEASE_SHARE * self._seconds_left(reason.now.seconds_per_env_step):
            return
        self._try({"allocation.cores": fewer}, reason, 1.0, reason.now.seconds_per_env_step)

    # A candidate -----------------------------------------------------------------------------------------------------

    def _try(
        self, changes: Mapping[str, Any], reason: Reason, expected: float, seconds: float
    ) -> tuple[str, Level | None] | None:
        """Goes on with ``changes``, and back where they do not pay. Verdict and costs (None: it failed).

        None: the training has ended, or its searches have deepened, which is for another phase to look at.
        """
        assert self.last is not None
        if self.taught is not None:
            changes = {**changes, **more_memory(self._now, changes, self.taught, self.hardware)}
        back = {path: get(self.config, path) for path in changes}
        live = self._is_live(changes)
        switch = Switch(
            number=self.number,
            env_steps=self.last.env_steps,
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
        outcome = self._apply(changes)
        reports = self._gather() if outcome == "running" else None
        if outcome == "running" and reports is None:
            outcome = "failed" if self.child.wait() not in (0, 130) else "ended"
        if outcome == "failed":
            self._judge(switch, "failed", None)
            if self.stopping:
                return None
            self._start(["--resume", str(self.run.path), *_set(back)])
            self.config = self.config.replace(back)
            return ("failed", None) if self._gather() is not None else None
        if reports is None:
            self._judge(switch, "cut short", None)
            return None
        now = phases.level(reports)
        if now.simulations != reason.now.simulations:  # deeper meanwhile: nobody knows what they cost without the changes
            self._judge(switch, "undone" if live else "left", None)
            if live:
                self._apply(back)
            return None
        gain = seconds / now.seconds_per_env_step
        if reason.kind == "return":
            verdict = "kept" if gain > RELEASED else "undone"
        else:
            verdict = phases.verdict(gain, self._seconds_left(seconds), 0.0 if live else self.cost)
        self._judge(switch, verdict, gain)
        if verdict == "undone" and self._apply(back) != "running":
            return None
        return verdict, now

    def _judge(self, switch: Switch, verdict: str, gain: float | None) -> None:
        cost = None if switch.how == "live" or math.isnan(self.cost) else round(self.cost, 2)
        told = None if gain is None else round(gain, 4)
        row = dataclasses.replace(switch, time=time.time(), verdict=verdict, measured_gain=told, cost_seconds=cost)
        switches.append(self.run, row)
        self.say(f"{verdict}: {_text(switch.after)}" + (f", {gain:.2f} times as fast" if gain is not None else ""))

    def _is_live(self, changes: Mapping[str, Any]) -> bool:
        """Whether the training takes all of it as it runs; cores up to those its process was started with."""
        most = self.started_cores or self.hardware.cores
        enough = (changes.get("allocation.cores") or 1) <= most
        return enough and all(can_change_live(self.config, path) for path in changes)

    def _apply(self, changes: Mapping[str, Any]) -> str:
        """``running`` with the changes, ``failed``, or ``ended``: the training was done, or was told to stop."""
        if self._is_live(changes):
            ask_live(self.run, dict(changes))
            self.config = self.config.replace(changes)
            return "running"
        began = time.monotonic()
        self.child.stop()
        if self.child.wait() != 130 or self.stopping:
            return "ended"
        limit = START_SECONDS + 10.0 * (0.0 if math.isnan(self.cost) else self.cost)
        self.config = self.config.replace(changes)
        self._start(["--resume", str(self.run.path), *_set(changes)])
        while (code := self.child.wait(POLL_SECONDS)) is None:
            reports = self._reports()
            if reports:
                self.cost = time.monotonic() - began - sum(report.seconds for report in reports)
                return "running"
            if time.monotonic() - began > limit:
                self.child.kill()
                return "failed"
        return "ended" if code in (0, 130) else "failed"

    def _gather(self, settle: float = phases.SETTLE_SECONDS, seconds: float = MEASURE_SECONDS) -> list[Report] | None:
        """Reports of so many seconds once it has settled, or the first one that is deeper; None when the training ends before."""
        settled, kept = 0.0, deque[Report]()
        while self.child.wait(POLL_SECONDS) is None:
            for report in self._reports():
                if report.simulations != self.state.simulations:
                    return [report]
                if settled < settle:
                    settled += report.seconds
                else:
                    kept.append(report)
            if len(kept) >= phases.WINDOW_REPORTS and sum(report.seconds for report in kept) >= seconds:
                return list(kept)
        return None


def _set(changes: Mapping[str, Any]) -> list[str]:
    """Options of ``muzerox train --resume``."""
    return [part for path, value in changes.items() for part in ("--set", f"{path}={'none' if value is None else value}")]


def _text(changes: Mapping[str, Any]) -> str:
    return " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in changes.items())
