"""Which knob matters, and by how much: what the predictor expects along each knob's choices, all else as it was tuned."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from predictor import Hardware, RuntimePredictor, Workload, hardware_rates, stack
from predictor.memory import fits
from tuner.history import Trial
from tuner.space import Knob, Space, feasible


class Neighbour(NamedTuple):
    """A trial that differs from the tuned configuration in one knob alone."""

    number: int
    option: Any
    factor: float  # its measured seconds over those of the trial that was chosen


class Pair(NamedTuple):
    """Two trials elsewhere in the grid that differ in one knob alone."""

    numbers: tuple[int, int]
    options: tuple[Any, Any]  # in the order of the knob's choices
    factor: float  # seconds measured at the second over those at the first


class Effect(NamedTuple):
    """Seconds along one knob's choices as factors over the tuned configuration: above 1 is slower."""

    knob: Knob
    options: tuple[Any, ...]
    chosen: Any  # the tuned configuration's
    predicted: tuple[float | None, ...]  # by option; None where the machine or the rest of the configuration forbids it
    neighbours: tuple[Neighbour, ...]
    pairs: tuple[Pair, ...]

    @property
    def range(self) -> float:
        """Predicted seconds of the slowest choice over those of the fastest."""
        there = [factor for factor in self.predicted if factor is not None]
        return max(there) / min(there) if there else 1.0


def effects(
    tuned: Mapping[str, Any],
    workload: Workload,
    trials: Sequence[Trial],
    *,
    space: Space,
    predictor: RuntimePredictor,
    hardware: Hardware,
) -> list[Effect]:
    """The effects of all knobs of ``space``, those that matter most first.

    Args:
      tuned: values of the tuned configuration by path of each knob.
      workload: of the tuned configuration, fields numbers.
    """
    sets = [
        dataclasses.replace(workload, **knob.fields(option))
        for knob, options in zip(space.knobs, space.choices, strict=True)
        for option in options
    ]
    # One by one, as the tuning predicted each of its trials: that program is compiled already.
    log_seconds = np.array([float(predictor.log_seconds(candidate, hardware)) for candidate in (workload, *sets)])
    factors = np.exp(log_seconds[1:] - log_seconds[0])
    candidates = stack([workload, *sets])
    allowed = np.asarray(feasible(candidates, space.max_num_envs, space.max_staleness))
    offsets = predictor.params.offsets
    limits = offsets.feasible_bytes, offsets.feasible_device_bytes
    fitting = fits(candidates, hardware_rates(hardware), offsets.process_bytes, *limits)
    allowed = (allowed & np.asarray(fitting))[1:]
    found: list[Effect] = []
    begin = 0
    for knob, options in zip(space.knobs, space.choices, strict=True):
        rows = range(begin, begin + len(options))
        begin += len(options)
        predicted = tuple(float(factors[row]) if allowed[row] else None for row in rows)
        neighbours = _neighbours(knob.path, tuned, trials)
        pairs = _pairs(knob.path, options, trials, tuned)
        found.append(Effect(knob, options, tuned[knob.path], predicted, neighbours, pairs))
    return sorted(found, key=lambda effect: -effect.range)


def chosen_trial(tuned: Mapping[str, Any], trials: Sequence[Trial]) -> Trial | None:
    """The trial that measured the point ``tuned``; None where it was not measured by itself."""
    return next((trial for trial in trials if trial.seconds and _differing(trial.changes, tuned) == set()), None)


def _differing(changes: Mapping[str, Any], others: Mapping[str, Any]) -> set[str]:
    return {path for path, value in changes.items() if value != others.get(path)}


def _neighbours(path: str, tuned: Mapping[str, Any], trials: Sequence[Trial]) -> tuple[Neighbour, ...]:
    reference = chosen_trial(tuned, trials)
    if reference is None or reference.seconds is None:
        return ()
    return tuple(
        Neighbour(trial.number, trial.changes[path], trial.seconds / reference.seconds)
        for trial in trials
        if trial.seconds and _differing(trial.changes, tuned) == {path}
    )


def _pairs(path: str, options: Sequence[Any], trials: Sequence[Trial], tuned: Mapping[str, Any]) -> tuple[Pair, ...]:
    """Neighbours of each other; those that involve the tuned configuration, or two neighbours of it, are told of already."""
    pairs = []
    told = [_differing(trial.changes, tuned) <= {path} for trial in trials]
    for index, first in enumerate(trials):
        for other, second in enumerate(trials[:index]):
            if told[index] or told[other] or _differing(first.changes, second.changes) != {path}:
                continue
            low, high = sorted((first, second), key=lambda trial: options.index(trial.changes[path]))
            if low.seconds and high.seconds:
                at = low.changes[path], high.changes[path]
                pairs.append(Pair((low.number, high.number), at, high.seconds / low.seconds))
    return tuple(pairs)
