"""What tests of tunings share: trials that are made up, and the small tuning that several look at and go on with."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from muzerox import Config
from tuner import TuneResult
from tuner.history import Trial, TuneDir
from tuner.loop import _Tuning
from tuner.neighbourhood import space_around
from tuner.reporting.progress import Progress
from tuner.task import Task

# Where what was expected does not matter to the test.
EXPECTED: dict[str, Any] = {
    "predicted_uncalibrated": 1e-4,
    "predicted_base": 1e-4,
    "predicted": 1e-4,
    "predicted_use": (1.0, 1.0, 0.0),
    "temperature": 1.0,
}

# What the fixture ``tuned`` starts from.
SMALL = Config.preset("gymnax:CartPole-v1").replace(
    {
        "replay.min_size": 64,
        "replay.capacity": 8192,
        "runtime.num_envs": 8,
        "runtime.loop_count": 1,
        "train.batch_size": 16,
        "search.num_simulations": 2,
        "network.width": 8,
        "network.depth": 1,
        "train.unroll_steps": 1,
        "train.td_steps": 4,
    }
)


def resumed(tuned: TuneResult, folder: TuneDir, progress: Progress, **changes: Any) -> _Tuning:
    """A tuning that goes on from what ``folder`` holds, with time left; ``changes`` to its task."""
    space = space_around(tuned.start, "neutral", "cpu")
    task = Task(
        start=tuned.start, space=space, hardware=tuned.hardware, folder=folder, progress=progress, budget=600.0, burst=0.05
    )
    return _Tuning(dataclasses.replace(task, **changes), time.monotonic())


def remeasured(trial: Trial, **changes: Any) -> Trial:
    """A trial of which something else was measured."""
    return dataclasses.replace(trial, measurement=dataclasses.replace(trial.measurement, **changes))
