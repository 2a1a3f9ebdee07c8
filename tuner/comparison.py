"""The end of a tuning: the best trials against the start, in alternation; the start wins unless it is clearly beaten."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr

from predictor import Hardware, Measurement, Outcome
from tuner.bridge import Config
from tuner.history import Trial
from tuner.measuring.measure import measure_in_alternation, paired_ratio

LUCK = 0.05  # how often one that is no faster than the start may be chosen all the same
MIN_GAIN = 1.02  # a candidate that is not faster than the start by this much, in alternation, is not worth a change
# A trial alone is off by what the machine does meanwhile: played back with such noise, the best of the four fastest was from as
# far to half as far from the optimum as the best of two. Time is kept for two; the others have what trials leave.
FINALISTS, RESERVED = 4, 2
# Rounds differ by 0.11 in logarithms: of 9 one in four, of 15 next to none misses the one of four rivals that is 1.15 times as
# fast.
MIN_ROUNDS, MAX_ROUNDS = 15, 25
LONG_ROUNDS = 3  # at least, where MIN_ROUNDS would take more than SHARE of the budget
SHARE = 0.2
_SPREAD = 0.07  # of a round's logarithm: bursts of one configuration differ by as much, whatever a few of them say
_MANY = 9  # rounds, which tell their spread themselves
# Of the logarithm of a process's speed, which it keeps: two of one program differ by as much, and no number of rounds tells. 61
# comparisons of Anakin's and those of the same configurations in other processes soon after are 0.039 apart (root mean square),
# but what 31 tunings told and what was found up to an hour later (benchmarks/data/tune.jsonl) 0.064: what is likeliest by these.
_OF_A_PROCESS = 0.027
_NINE_IN_TEN = 1.645  # standard errors
RIVAL = 0.5  # times the start's bursts that those of a rival are expected to take, which is yet to be found
_ROOM = 0.8  # of the machine's memory that processes side by side may take
# Seconds of a worker's start, which is started ahead, and the share of compiling that is left with a warm cache: 0.24 to 0.32 of
# four presets. And the share of it all, warming up included, that is left where two start at once, 0.73 to 0.86.
_STARTING, _FROM_CACHE, _TWO_AT_ONCE = 0.5, 0.32, 0.86
_FINISHING = 3.0  # seconds that the end takes: plot, table, files

Price = Callable[[Measurement], float]


class Comparison(NamedTuple):
    """How it ended: ``chosen`` of the rivals was clearly faster, or none; the start's and the chosen one's bursts are paired."""

    base: Measurement
    chosen: int | None  # None, too, where the start did not run
    ours: Measurement  # the start's where none was


def finalists(trials: Sequence[Trial], program: Callable[[Trial], Hashable], cost: Callable[[Measurement], float]) -> list[Trial]:
    """The best trials after the first, one of each ``program``: the others that a process timed differ from it by little.

    Those alone that there is memory for beside the first, the start.
    """
    start, *others = trials
    ranked = sorted((t for t in others if t.seconds is not None and _fit_together([start, t])), key=lambda t: cost(t.measurement))
    by_program = {program(trial): trial for trial in reversed(ranked)}
    return sorted(by_program.values(), key=lambda t: cost(t.measurement))[:FINALISTS]


class Schedule(NamedTuple):
    """What comparing trials with the start, the first of them, takes of a tuning's time."""

    burst: float  # seconds of a timed burst, about
    budget: float  # seconds of the tuning

    def reserved(self, trials: Sequence[Trial]) -> float:
        """Seconds to keep for comparing the best of ``trials`` with the start, or one that is yet to be found."""
        return self._shortest(trials[: 1 + RESERVED])

    def plan(self, trials: Sequence[Trial], left: float) -> tuple[int, int]:
        """How many rivals to compare in the seconds ``left``, at least one, and for how many rounds at least.

        Each alone fits into memory beside the start, as :func:`finalists` do.
        """
        rivals = len(trials) - 1
        while rivals > 1:
            compared = trials[: 1 + rivals]
            if self._shortest(compared) <= left and _fit_together(compared):
                break
            rivals -= 1
        _, a_round = self._seconds(trials[: 1 + rivals])
        return rivals, self._fewest_rounds(a_round)

    def _fewest_rounds(self, a_round: float) -> int:
        """Rounds of ``a_round`` seconds that a comparison must have."""
        return int(min(MIN_ROUNDS, max(LONG_ROUNDS, SHARE * self.budget / a_round)))

    def _shortest(self, trials: Sequence[Trial]) -> float:
        """Seconds that comparing all of them takes at least."""
        ready, a_round = self._seconds(trials)
        return ready + self._fewest_rounds(a_round) * a_round

    def _seconds(self, trials: Sequence[Trial]) -> tuple[float, float]:
        """Until all are up, the end's included, and of a round of their bursts."""
        measured = [trial.measurement for trial in trials]
        ready = [_STARTING + (1.0 if m.from_cache else _FROM_CACHE) * (m.compile_seconds or 0.0) for m in measured]
        warmups = [m.warmup_seconds or 0.0 for m in measured]
        bursts = [max(self.burst, _shortest_burst(m)) for m in measured]
        if len(trials) == 1:  # warm-ups aside: a start that is slow to warm up would leave no time to try anything
            ready, warmups, bursts = 2 * ready, [], [bursts[0], max(self.burst, RIVAL * bursts[0])]
        return _TWO_AT_ONCE * (sum(ready) + sum(warmups)) + _FINISHING, sum(bursts)


def _shortest_burst(m: Measurement) -> float:
    """Of a burst: a cycle of acting and learning. That is what one program warms up with; threads may have to make more."""
    w, warmup = m.workload, m.warmup_seconds or 0.0
    cycle = w.num_envs * w.selfplay_workers * w.replay_ratio / w.batch_size  # updates that a row of all environments is due for
    return min(warmup, math.ceil(cycle) / m.updates_per_second) if w.sebulba and m.updates_per_second else warmup


def _fit_together(trials: Sequence[Trial]) -> bool:
    """Whether there is memory for all of them at once."""
    measured = [trial.measurement for trial in trials]
    host, device = (
        sum(x or 0.0 for x in held) for held in zip(*((m.peak_bytes, m.device_peak_bytes) for m in measured), strict=True)
    )
    hardware = measured[0].hardware
    on_device = hardware.platform == "cpu" or device <= _ROOM * hardware.device_memory_bytes
    return host <= _ROOM * hardware.memory_bytes and on_device


def compare(
    start: Config,
    rivals: Sequence[Config],
    *,
    hardware: Hardware,
    fewest: int,
    left: float,
    seconds: float,
    timeout: float,
    price: Price,
    rent: Price,
    say: Callable[[str], None] | None = None,
) -> Comparison:
    """Measures ``rivals`` against ``start``, all alive, burst by burst. With what they pay, one must be clearly faster.

    Args:
      fewest: rounds; more, up to MAX_ROUNDS, while they and the end of a tuning fit into the seconds ``left``.
      seconds: of a burst.
      timeout: seconds that compiling, or a burst, may take.
      rent: what a second of a configuration counts as.
      price: what it pays beside, as a share of its time.
      say: is told where other programs disturbed it.
    """
    until = time.monotonic() + left - _FINISHING
    base, *measured = measure_in_alternation(
        [start, *rivals],
        hardware=hardware,
        rounds=MAX_ROUNDS,
        fewest=fewest,
        until=until,
        seconds=seconds,
        timeout=timeout,
        say=say,
    )
    chosen = choose(base, measured, price, rent)
    return Comparison(base, chosen, base if chosen is None else measured[chosen])


def choose(base: Measurement, measured: Sequence[Measurement], price: Price, rent: Price) -> int | None:
    """The best of the rivals that are clearly faster than ``base``, all with what they pay; None where none is.

    That any is by luck alone happens no more often than ``LUCK``, however many there are.
    """
    if base.outcome != Outcome.OK or math.isinf(rent(base)):
        return None
    paid = {
        i: _as_it_counts(m, rent(m) / rent(base) * math.exp(price(m) - price(base)))
        for i, m in enumerate(measured)
        if m.outcome == Outcome.OK and math.isfinite(rent(m))  # else joules count, and could not be read
    }
    if not paid:
        return None
    faster = clearly_faster(list(paid.values()), base, MIN_GAIN, LUCK)
    beaten_by = [i for i, beats in zip(paid, faster, strict=True) if beats]
    return max(beaten_by, key=lambda i: paired_ratio(paid[i], base), default=None)


def clearly_faster(rivals: Sequence[Measurement], base: Measurement, gain: float, level: float = 0.05) -> list[bool]:
    """Of each, measured in the same rounds as ``base``: is its median ratio at least ``gain``, and is that more than luck?

    Were none faster, luck would have shown any of them to be less often than ``level``: each is tested at its share of that
    (Bonferroni, 1936).

    By the signed-rank test (Wilcoxon, 1945): were neither faster, the rounds' logarithms would be as often on either side of 0,
    and as far. Of so few rounds that it could not tell even if all were won, by Student's t-test, whose spread is what all
    rivals' rounds have in common, _SPREAD at least: each alone has too few to tell it.
    """
    logs = np.log([[b / a for a, b in zip(ours.repeats, base.repeats, strict=True)] for ours in rivals])  # [R, rounds]
    count, rounds = logs.shape
    if 0.5**rounds < level / count:
        from scipy.stats import wilcoxon  # a second to import, and needed at the end of a tuning alone

        luck = np.array([wilcoxon(row, alternative="greater").pvalue for row in logs])
    elif rounds > 1:
        error = max(math.sqrt(float(logs.var(axis=1, ddof=1).mean())), _SPREAD) / math.sqrt(rounds)
        luck = stdtr(count * (rounds - 1), -logs.mean(axis=1) / error)
    else:
        luck = np.ones(count)
    return [paired_ratio(ours, base) >= gain and bool(p < level / count) for ours, p in zip(rivals, luck, strict=True)]


def speedup_interval(ours: Measurement, base: Measurement) -> tuple[float, float]:
    """Where, nine times in ten, trainings of the two are to be expected to differ: in new processes, and for long.

    By how rounds differ (the error of a median; their spread by the median deviation) and how processes do, those compared and
    those to come, in another hour. That the best of several was chosen for this ratio, which makes it a little too large, is
    not in it.
    """
    logs = np.log([b / a for a, b in zip(ours.repeats, base.repeats, strict=True)])
    middle = float(np.median(logs))
    spread = 1.4826 * float(np.median(np.abs(logs - middle)))
    if len(logs) < _MANY:
        spread = max(spread, _SPREAD)
    error = math.sqrt(math.pi / 2 * spread**2 / len(logs) + 4 * _OF_A_PROCESS**2)
    return math.exp(middle - _NINE_IN_TEN * error), math.exp(middle + _NINE_IN_TEN * error)


def _as_it_counts(measured: Measurement, factor: float) -> Measurement:
    """With bursts ``factor`` times as long, as they count beside others."""
    return dataclasses.replace(measured, repeats=tuple(seconds * factor for seconds in measured.repeats))
