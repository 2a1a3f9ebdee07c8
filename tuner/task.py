"""What a tuning was asked for, on which machine, and where it is kept: what all of its parts read and none changes."""

from __future__ import annotations

import dataclasses
import sys

from predictor import Hardware
from tuner.bridge import Config
from tuner.goal import Goal
from tuner.history import TuneDir
from tuner.measuring.measure import BURST_SECONDS
from tuner.objective import STALENESS_PRICE
from tuner.reporting.progress import Progress
from tuner.space import Space


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One tuning."""

    start: Config  # concrete: nothing is left to be chosen by default
    space: Space  # around the start
    hardware: Hardware
    folder: TuneDir
    progress: Progress
    budget: float  # seconds
    max_trials: int = sys.maxsize  # processes measured
    burst: float = BURST_SECONDS  # seconds of a timed burst
    goal: Goal = dataclasses.field(default_factory=Goal)
    staleness_price: float = STALENESS_PRICE  # share of time that a period of the target network is worth, as an age
    seed: int = 0
