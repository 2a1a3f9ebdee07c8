"""Measuring configurations in subprocesses: each under its allocation, warm-up and compilation apart, failures recorded.

Several workers can live at once and be timed in alternation, so that what else the machine does hits them alike.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from predictor import Hardware, Measurement, Outcome
from tuner.bridge import Config, concrete
from tuner.measuring.worker_client import TIMEOUT, Worker, WorkerFailed
from tuner.measuring.workload import describe

Say = Callable[[str], None]

BURST_SECONDS = 0.4
REPEATS = 5
ENOUGH_SECONDS = 6.0  # of bursts: where cycles of acting and learning are long, fewer of them say as much
HOPELESS_BURSTS = 2  # after which what is slower than is worth knowing is given up
# Cores that other programs take in a round that tells less than others: who wants all cores suffers more than who wants one.
# And seconds of them that are nothing: processor time is counted in ticks.
_DISTURBED, _TICKS = 0.15, 0.03


def patience(first_seconds: float, compile_seconds: float) -> float:
    """Seconds that compiling, or a burst, of what is tuned may take: the start's process took ``first_seconds`` in all.

    That may have found its programs in the cache; another may have a core to compile with, and is expected to take so long.
    """
    return max(30.0, 3.0 * first_seconds, 5.0 * compile_seconds)


class Timing:
    """One configuration in a worker, and what its bursts measured so far. ``compile_cores``: see :func:`measure_config`."""

    def __init__(self, config: Config, *, hardware: Hardware, timeout: float, compile_cores: int | None = None):
        self.config, self.hardware = concrete(config, hardware.platform), hardware
        self.started = time.monotonic()
        self.bursts: dict[int, list[dict[str, Any]]] = {}  # by loop_count
        self.ready: dict[str, Any] = {}
        self.failure: WorkerFailed | None = None
        self.others = 0.0  # cores that other programs took during its last burst, of those it may use
        self.patient = True  # of late others have ended while what is beside it was measured
        request = {"kind": "train", "config": self.config.to_dict(), "compile_cores": compile_cores}
        self.worker = Worker(request, timeout=timeout)

    def wait(self) -> None:
        """Until the program is compiled and warm."""
        if self.failure is None:
            try:
                self.ready = self.worker.answer()
            except WorkerFailed as failure:
                self._failed(failure)

    def burst(self, seconds: float, loop_count: int | None = None, number: int = 0) -> float | None:
        """One timed burst of round ``number``, by default at the configuration's loop_count.

        Returns the seconds that an environment step took; None where it has failed.
        """
        loop_count = loop_count or self.config.runtime.loop_count
        if self.failure is not None:
            return None
        try:
            burst = self.worker.ask(seconds=seconds, loop_count=loop_count)
        except WorkerFailed as failure:
            self._failed(failure)
            return None
        self.bursts.setdefault(loop_count, []).append({"round": number, **burst})
        seconds, wall = burst["others_seconds"], burst["wall_seconds"]
        self.others = seconds / wall if seconds > _TICKS else 0.0
        return float(burst["seconds_per_env_step"])

    def fastest(self, loop_count: int, fewest: int) -> float:
        """Least seconds an environment step of its bursts so far; 0 of less than ``fewest``."""
        bursts = self.bursts.get(loop_count, [])
        return min(burst["seconds_per_env_step"] for burst in bursts) if len(bursts) >= fewest else 0.0

    def timed(self, loop_count: int) -> float:
        """Seconds that its bursts took so far."""
        return sum(burst["wall_seconds"] for burst in self.bursts.get(loop_count, []))

    def _failed(self, failure: WorkerFailed) -> None:
        self.failure = failure
        self.worker.stop()  # one that hangs would disturb those that are timed beside it

    def counted(self, loop_count: int, rounds: Collection[int]) -> list[dict[str, Any]]:
        """Its bursts at a loop_count that belong to ``rounds``; all of them where none does."""
        bursts = self.bursts.get(loop_count, [])
        return [burst for burst in bursts if burst["round"] in rounds] or bursts

    def measurement(self, loop_count: int | None = None, rounds: Collection[int] = ()) -> Measurement:
        """What was measured at a loop_count, by the bursts of ``rounds``, by default all."""
        config = self.config.replace("runtime.loop_count", loop_count) if loop_count else self.config
        every, bursts = self.bursts.get(config.runtime.loop_count, []), self.counted(config.runtime.loop_count, rounds)
        common: dict[str, Any] = {
            "hardware": self.hardware,
            "workload": describe(config),
            "wall_seconds": time.monotonic() - self.started,
            **{name: self.ready.get(name) for name in ("compile_seconds", "warmup_seconds", "compile_cores")},
            "from_cache": self.ready.get("from_cache", False),
        }
        if self.failure is not None:
            return Measurement(outcome=self.failure.outcome, error=self.failure.error, **common)
        if not all(burst["finite"] for burst in every):
            return Measurement(
                outcome=Outcome.NONFINITE, error="no gradient was finite, or none for more updates in a row than may be", **common
            )

        def median(name: str) -> float:
            return statistics.median(burst[name] for burst in bursts)

        device = [burst["device_peak_bytes"] for burst in every if burst["device_peak_bytes"] is not None]
        joules = [burst["joules_per_env_step"] for burst in bursts if burst["joules_per_env_step"] is not None]

        def age(name: str) -> float | None:
            return median(name) if all(name in burst for burst in bursts) else None

        waits = {name for burst in bursts for name in burst["waits"]}
        peak, allowed = max(burst["peak_bytes"] for burst in every), common["workload"].memory_bytes
        common |= {"peak_bytes": peak, "device_peak_bytes": max(device) if device else None}
        if 0 < allowed < peak:  # a training that goes well until it saves its first checkpoint does not go well
            short = f"saving needs {peak / 2**30:.2f} GiB of {allowed / 2**30:.2f}"
            return Measurement(outcome=Outcome.OUT_OF_MEMORY, error=short, **common)
        seconds = median("seconds_per_env_step")
        return Measurement(
            outcome=Outcome.OK,
            seconds_per_env_step=seconds,
            env_steps_per_second=1.0 / seconds,
            updates_per_second=median("updates_per_second"),
            cpu_use=median("cpu_use"),
            joules_per_env_step=statistics.median(joules) if len(joules) == len(bursts) else None,
            repeats=tuple(burst["seconds_per_env_step"] for burst in bursts),
            waits={name: statistics.median(burst["waits"].get(name, 0.0) for burst in bursts) for name in sorted(waits)},
            batch_staleness=age("batch_staleness"),
            acting_staleness=age("acting_staleness"),
            **common,
        )


class Bursts(NamedTuple):
    """How long processes are timed: ``rounds`` of bursts of ``seconds`` each, about; a cycle of acting and learning is not cut.

    Rounds that other programs disturb are made again, if there are others, and the least disturbed told.

    ``enough``: seconds of bursts, at one loop count, after which no more are timed.
    ``hopeless``: seconds an environment step; what is slower in ``HOPELESS_BURSTS`` is not timed further.
    ``until``: by ``time.monotonic()``; after ``fewest`` rounds none begins that would end later, by what those before took.
    """

    rounds: int
    seconds: float = BURST_SECONDS
    enough: float = math.inf
    hopeless: float = math.inf
    fewest: int = 0
    until: float = math.inf


class Reference(NamedTuple):
    """A process that is alive, and the seconds an environment step it took when what is measured beside it is told as of."""

    timing: Timing
    then: float


def measure_config(
    config: Config,
    *,
    hardware: Hardware,
    repeats: int = REPEATS,
    seconds: float = BURST_SECONDS,
    timeout: float = TIMEOUT,
    enough: float = math.inf,
    loop_counts: Sequence[int] = (),
    hopeless: float = math.inf,
    reference: Reference | None = None,
    compile_cores: int | None = None,
    say: Say | None = None,
) -> list[Measurement]:
    """Measures a configuration in a subprocess, under its allocation.

    Args:
      repeats: timed bursts; the figures are medians.
      seconds: wall seconds of a burst, about; a cycle of acting and learning that takes longer is not cut.
      timeout: seconds that compiling, or a burst, may take.
      enough, hopeless: see :class:`Bursts`.
      loop_counts: measured too, in the same process and in alternation: they share the compiled program.
      reference: timed in alternation with it, and seconds are told as of when those of the reference were ``then``.
      compile_cores: that it is lent until it is compiled, where its allocation has fewer.
      say: is told, in a line, where other programs disturbed it.

    Returns:
      One Measurement for the configuration, and one for each of ``loop_counts``.

    Raises:
      UserError: a configuration that this machine cannot be asked for.
    """
    bursts = Bursts(repeats, seconds, enough, hopeless)
    timing = Timing(config, hardware=hardware, timeout=timeout, compile_cores=compile_cores)
    try:
        timing.wait()
        (found,) = measure_timings([timing], [loop_counts], bursts, reference, say)
    finally:
        timing.worker.stop()
    return found


def measure_in_alternation(
    configs: Sequence[Config],
    *,
    hardware: Hardware,
    rounds: int = 15,
    fewest: int = 0,
    until: float = math.inf,
    seconds: float = BURST_SECONDS,
    timeout: float = TIMEOUT,
    say: Say | None = None,
) -> list[Measurement]:
    """Measures configurations against one another: all alive, one burst each a round, in an order that turns.

    ``repeats`` of the results are paired: the n-th of each belong to the same round. After ``fewest`` rounds none begins
    that would end after ``until``, by ``time.monotonic()``, if it took as long as those before. ``say`` is told where other
    programs disturbed them.
    """
    timings: list[Timing] = []
    try:
        for config in configs:
            timings.append(Timing(config, hardware=hardware, timeout=timeout))
            # Two at once: where its program was compiled before, a process starts on hardly more than one core. Not more, for
            # compilations would fight for them.
            if len(timings) > 1:
                timings[-2].wait()
        for last in timings[-1:]:
            last.wait()
        bursts = Bursts(rounds, seconds, fewest=fewest, until=until)
        return [first for first, *_ in measure_timings(timings, [()] * len(timings), bursts, say=say)]
    finally:
        for timing in timings:
            timing.worker.stop()


def measure_beside(
    config: Config,
    other: Config,
    known: Measurement,
    *,
    hardware: Hardware,
    rounds: int = 9,
    seconds: float = BURST_SECONDS,
    enough: float = math.inf,
    timeout: float = TIMEOUT,
    say: Say | None = None,
) -> Measurement:
    """Measures ``config`` in alternation with ``other``, and tells its seconds as of when those of ``other`` were ``known``.

    Machines are slower by a half for minutes: what one measurement after another says of two percent is chance. Where
    ``other`` did not run, or no longer does, there is nothing to compare with: the seconds are as measured.

    ``enough``: seconds of bursts of ``config``, after which no more rounds begin. ``say``: as for :func:`measure_config`.
    """
    began, then = time.monotonic(), known.seconds_per_env_step
    limits: dict[str, Any] = {"hardware": hardware, "seconds": seconds, "enough": enough, "timeout": timeout, "say": say}
    if then is None:
        return measure_config(config, repeats=rounds, **limits)[0]
    beside = Timing(other, hardware=hardware, timeout=timeout)
    try:
        beside.wait()
        (ours,) = measure_config(config, repeats=rounds, reference=Reference(beside, then), **limits)
    finally:
        beside.worker.stop()
    return dataclasses.replace(ours, wall_seconds=time.monotonic() - began)  # both processes: what such a trial takes


def _told_as_of(ours: Measurement, then: float, others: Sequence[float]) -> Measurement:
    """With seconds as of when those of ``others`` were ``then``; their n-th is of the same round as the n-th of ours."""
    took = then * statistics.median(a / b for a, b in zip(ours.repeats, others, strict=True))
    speed = took / statistics.median(ours.repeats)  # of the machine now, to then
    updates = ours.updates_per_second
    return dataclasses.replace(
        ours,
        seconds_per_env_step=took,
        env_steps_per_second=1.0 / took,
        updates_per_second=None if updates is None else updates / speed,
        repeats=tuple(speed * repeat for repeat in ours.repeats),
    )


def measure_timings(
    timings: Sequence[Timing],
    loop_counts: Sequence[Sequence[int]],
    bursts: Bursts,
    reference: Reference | None = None,
    say: Say | None = None,
) -> list[list[Measurement]]:
    """Measures processes that are up, which stay alive, in alternation: one burst each a round, in an order that turns.

    Args:
      loop_counts: of each, to measure beside its own.
      say: is told, in a line, where other programs disturbed them.

    Returns:
      For each its Measurement, and one for each further loop count.
    """
    wanted = [
        list(dict.fromkeys([timing.config.runtime.loop_count, *further]))
        for timing, further in zip(timings, loop_counts, strict=True)
    ]
    beside: dict[int, float] = {}  # seconds an environment step of the reference, by round
    others: list[float] = []  # cores that other programs took, the most in a burst of each round
    began, quiet = time.monotonic(), 0
    # As many more as were quiet: where others are always at work, waiting for them to end is of no use, and is not done twice.
    waits = bursts.rounds if reference is not None and reference.timing.patient else 0
    while quiet < bursts.rounds and (index := len(others)) < bursts.rounds + max(quiet, waits):
        now = time.monotonic()
        if index and index >= bursts.fewest and now + (now - began) / index > bursts.until:
            break
        slower = 1.0 if reference is None or not beside else statistics.median(beside.values()) / reference.then
        turns = [
            (timings[turn], loop_count)
            for turn in ((index + offset) % len(timings) for offset in range(len(timings)))
            for loop_count in wanted[turn]
            if timings[turn].fastest(loop_count, HOPELESS_BURSTS) <= bursts.hopeless * slower
            and timings[turn].timed(loop_count) < bursts.enough
            and timings[turn].failure is None
        ]
        if not turns:
            break
        if reference is not None and (took := reference.timing.burst(bursts.seconds)) is not None:
            beside[index] = took
        others.append(0.0 if reference is None else reference.timing.others)
        for timing, loop_count in turns:
            timing.burst(bursts.seconds, loop_count, index)
            others[-1] = max(others[-1], timing.others)
        quiet += others[-1] <= _DISTURBED
    if reference is not None:
        reference.timing.patient = quiet > 0
    rounds = _least_disturbed(others, bursts.rounds, say)
    found = [[timing.measurement(n, rounds) for n in counts] for timing, counts in zip(timings, wanted, strict=True)]
    if reference is None or reference.timing.failure is not None:
        return found
    for timing, counts, several in zip(timings, wanted, found, strict=True):
        for place, (loop_count, m) in enumerate(zip(counts, several, strict=True)):
            if m.outcome == Outcome.OK:
                others_then = [beside[burst["round"]] for burst in timing.counted(loop_count, rounds)]
                several[place] = _told_as_of(m, reference.then, others_then)
    return found


def _least_disturbed(others: Sequence[float], most: int, say: Say | None) -> Collection[int]:
    """The rounds that are told, ``most`` of them, by the cores that ``others`` took in each."""
    kept = sorted(range(len(others)), key=lambda index: others[index] if others[index] > _DISTURBED else 0.0)[:most]
    taken = [cores for cores in others if cores > _DISTURBED]
    if taken and say is not None:
        cores = f"other programs take {statistics.median(taken):.1f} cores of this machine"
        if len(kept) < len(others):
            say(f"{cores}: {len(others) - len(kept)} of {len(others)} rounds are left out")
        elif 2 * len(taken) > len(kept):
            say(f"{cores}: what is measured meanwhile is less certain")
    return kept


def paired_ratio(ours: Measurement, theirs: Measurement) -> float:
    """How many times faster ``ours`` is: the median over rounds of the ratio of seconds."""
    return statistics.median(b / a for a, b in zip(ours.repeats, theirs.repeats, strict=True))
