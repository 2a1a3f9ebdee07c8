"""Which precision levels a tuning may choose: speed proposes, drift against O0 decides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from predictor import Hardware
from tuner.bridge import REFERENCE, Config
from tuner.comparison import MIN_GAIN
from tuner.history import Trial, TuneDir
from tuner.measuring.drift import Drift, measure_drift
from tuner.measuring.measure import TIMEOUT

EXAMINATION_SECONDS = 45.0  # that comparing numbers takes, about: a training of up to 20 s, and programs to be compiled


class Levels:
    """What is known of precision levels; kept in the tuning's folder, so that none is examined twice.

    The start's level is the user's choice, and O0 is what others are compared with: neither is examined. A level that was never
    faster than the start is neither examined nor trusted.

    Args:
      say: is told the evidence, a line a level.
      choices: levels that may be tried: all of them are examined by the training that the first is, which takes most of the time.
    """

    def __init__(
        self,
        start: Config,
        hardware: Hardware,
        folder: TuneDir,
        say: Callable[[str], None],
        *,
        choices: Sequence[str] = (),
        timeout: float = TIMEOUT,
    ):
        self._start, self._hardware, self._folder, self._say, self._timeout = start, hardware, folder, say, timeout
        self._choices = choices
        self._drifts = {drift.level: drift for drift in folder.drifts()}
        self._told: set[str] = set()
        self._put_off: set[str] = set()  # and said so
        self._given = (start.precision.level, REFERENCE)  # never examined

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """The evidence, in the order it was found."""
        return tuple(self._drifts.values())

    def trusted(self, trials: Sequence[Trial]) -> list[Trial]:
        """Those of ``trials`` whose level may be chosen."""
        fine = {*self._given, *(drift.level for drift in self.drifts if drift.accepted)}
        return [trial for trial in trials if level_of(trial) in fine]

    def newly_refused(self, trials: Sequence[Trial], value: Callable[[Trial], float], left: float = math.inf) -> list[str]:
        """Examines each level that beats the start (the first of ``trials``) by ``MIN_GAIN`` and was not examined yet.

        With it those that may be tried after it, as far as they can be.

        Args:
          value: of a trial, what is minimised; infinite where it failed.
          left: seconds of the budget; where they would not do, nothing is examined, and no level trusted that is not known.

        Returns:
          Levels that are refused and that no call has returned before.
        """
        better = self._better(trials, value)
        for level, speedup in better.items():
            if level in self._drifts:
                continue
            if left < EXAMINATION_SECONDS:
                if level not in self._put_off:
                    self._say(f"precision {level} is {speedup:.2f}x as good as the start; no time is left to compare its numbers")
                    self._put_off.add(level)
                continue
            self._say(f"precision {level} is {speedup:.2f}x as good as the start: comparing its numbers with {REFERENCE}'s")
            others = [other for other in self._choices if other not in (level, *self._given, *self._drifts)]
            found = measure_drift(self._start, [level, *others], hardware=self._hardware, timeout=self._timeout)
            # What has failed may have failed for another's sake.
            told = [drift for drift in found.values() if drift.level == level or drift.failure is None]
            self._drifts |= {drift.level: dataclasses.replace(drift, speedup=better.get(drift.level)) for drift in told}
            self._folder.save_drifts(self.drifts)
            for drift in told:
                self._say(f"precision {self._drifts[drift.level].explain()}")
        refused = [drift.level for drift in self.drifts if not drift.accepted and drift.level not in self._told]
        self._told.update(refused)
        return refused

    def _better(self, trials: Sequence[Trial], value: Callable[[Trial], float]) -> dict[str, float]:
        """Levels to be examined, with how many times as good as the start their best trial is."""
        found: dict[str, float] = {}
        for trial in trials[1:]:
            if trials[0].seconds and level_of(trial) not in self._given:
                found[level_of(trial)] = max(found.get(level_of(trial), 0.0), value(trials[0]) / value(trial))
        return {level: speedup for level, speedup in found.items() if speedup >= MIN_GAIN}


def level_of(trial: Trial) -> str:
    """The precision level that a trial ran at."""
    return str(trial.config["precision"]["level"])
