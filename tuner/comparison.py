"""The end of a tuning: the best trials against the start, in alternation; the start wins unless it is clearly beaten."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from predictor import Hardware, Measurement, Outcome
from tuner.bridge import Config
from tuner.history import Trial
from tuner.measure import clearly_faster, measure_in_alternation, paired_ratio

MIN_GAIN = 1.02  # a candidate that is not faster than the start by this much, in alternation, is not worth a change
FINALISTS = 2
MIN_ROUNDS, MAX_ROUNDS = 9, 25
_STARTING, _FROM_CACHE = 2.0, 0.4  # seconds of a worker's start, and the share of compiling that is left with a warm cache
_FINISHING = 3.0  # seconds that the end takes: plot, table, files

Price = Callable[[Measurement], float]


class Comparison(NamedTuple):
    """How it ended: ``chosen`` of the rivals was clearly faster, or none; the start's and the chosen one's bursts are paired."""

    base: Measurement
    chosen: int | None
    ours: Measurement  # the start's where none was


def finalists(trials: Sequence[Trial], program: Callable[[Trial], Hashable], cost: Callable[[Measurement], float]) -> list[Trial]:
    """The best trials after the first, one of each ``program``: the others that a process timed differ from it by little."""
    ranked = sorted((t for t in trials if t.seconds is not None and t.number != 0), key=lambda t: cost(t.measurement))
    by_program = {program(trial): trial for trial in reversed(ranked)}
    return sorted(by_program.values(), key=lambda t: cost(t.measurement))[:FINALISTS]


def seconds_needed(trials: Sequence[Trial], burst: float, rounds: int) -> tuple[float, float]:
    """Seconds until the start (the first of ``trials``) and its rivals are up, and of ``rounds`` of bursts of them all."""
    trials = [*trials, *[trials[0]] * (1 + FINALISTS - len(trials))]  # rivals to be found yet
    measured = [trial.measurement for trial in trials]
    ready = [_STARTING + (1.0 if m.from_cache else _FROM_CACHE) * (m.compile_seconds or 0.0) for m in measured]
    bursts = [max(burst, trial.measurement.warmup_seconds or 0.0) for trial in trials]
    return sum(ready) + _FINISHING, rounds * sum(bursts)


def compare(
    start: Config, rivals: Sequence[Config], *, hardware: Hardware, rounds: int, seconds: float, price: Price, rent: Price
) -> Comparison | None:
    """Measures ``rivals`` against ``start``, all alive, burst by burst; None when the start did not run.

    ``rent``: what a second of a configuration counts as; ``price``: what it pays beside, as a share of its time.
    """
    base, *measured = measure_in_alternation([start, *rivals], hardware=hardware, rounds=rounds, seconds=seconds)
    if base.outcome != Outcome.OK:
        return None
    paid = [_at_rent(m, rent(m) / rent(base)) for m in measured]
    faster = [i for i, m in enumerate(paid) if m.outcome == Outcome.OK and clearly_faster(m, base, MIN_GAIN)]
    if not faster:
        return Comparison(base, None, base)
    chosen = min(faster, key=lambda i: price(measured[i]) - math.log(paired_ratio(paid[i], base)))
    return Comparison(base, chosen, measured[chosen])


def _at_rent(measured: Measurement, rent: float) -> Measurement:
    """With bursts as long as they count."""
    return dataclasses.replace(measured, repeats=tuple(seconds * rent for seconds in measured.repeats))
