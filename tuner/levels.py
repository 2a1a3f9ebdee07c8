"""Which precision levels a tuning may choose: speed proposes, drift against O0 decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from predictor import Hardware
from tuner.bridge import REFERENCE, Config
from tuner.comparison import MIN_GAIN
from tuner.drift import Drift, measure_drift
from tuner.history import Trial, TuneDir
from tuner.measure import TIMEOUT


class Levels:
    """What is known of precision levels; kept in the tuning's folder, so that none is examined twice.

    The start's level is the user's choice, and O0 is what others are compared with: neither is examined. A level that was never
    faster than the start is neither examined nor trusted.

    Args:
      say: is told the evidence, a line a level.
    """

    def __init__(
        self, start: Config, hardware: Hardware, folder: TuneDir, say: Callable[[str], None], *, timeout: float = TIMEOUT
    ):
        self._start, self._hardware, self._folder, self._say, self._timeout = start, hardware, folder, say, timeout
        self._drifts = {drift.level: drift for drift in folder.drifts()}
        self._told: set[str] = set()

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """The evidence, in the order it was found."""
        return tuple(self._drifts.values())

    def trusted(self, trials: Sequence[Trial]) -> list[Trial]:
        """Those of ``trials`` whose level may be chosen."""
        fine = {self._start.precision.level, REFERENCE, *(drift.level for drift in self.drifts if drift.accepted)}
        return [trial for trial in trials if level_of(trial) in fine]

    def newly_refused(self, trials: Sequence[Trial], value: Callable[[Trial], float]) -> list[str]:
        """Examines each level that beats the start (the first of ``trials``) by ``MIN_GAIN`` and was not examined yet.

        Args:
          value: of a trial, what is minimised; infinite where it failed.

        Returns:
          Levels that are refused and that no call has returned before.
        """
        for level, speedup in self._better(trials, value).items():
            if level not in self._drifts:
                self._say(f"precision {level} is {speedup:.2f}x as good as the start: comparing its numbers with {REFERENCE}'s")
                drift = measure_drift(self._start, [level], hardware=self._hardware, timeout=self._timeout)[level]
                self._drifts[level] = dataclasses.replace(drift, speedup=speedup)
                self._folder.save_drifts(self.drifts)
                self._say(f"precision {self._drifts[level].explain()}")
        refused = [drift.level for drift in self.drifts if not drift.accepted and drift.level not in self._told]
        self._told.update(refused)
        return refused

    def _better(self, trials: Sequence[Trial], value: Callable[[Trial], float]) -> dict[str, float]:
        """Levels to be examined, with how many times as good as the start their best trial is."""
        known = {self._start.precision.level, REFERENCE}
        found: dict[str, float] = {}
        for trial in trials[1:]:
            if trials[0].seconds and level_of(trial) not in known:
                found[level_of(trial)] = max(found.get(level_of(trial), 0.0), value(trials[0]) / value(trial))
        return {level: speedup for level, speedup in found.items() if speedup >= MIN_GAIN}


def level_of(trial: Trial) -> str:
    """The precision level that a trial ran at."""
    return str(trial.config["precision"]["level"])
