"""A simulator whose costs change while it is trained on: ``gymnasium:regimes:Growing-v0``, with this folder on PYTHONPATH."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

COUNTER, CHANGE = "REGIME_COUNTER", "REGIME_CHANGE"  # variables: a file, and steps of all simulators until episodes grow
_EVERY = 32  # steps of a simulator that are counted together


class Growing(gymnasium.Env):
    """Episodes become ten times as long, and a step a hundred times as dear: it goes through all pairs of its episode's past.

    That is computed, in Python, with its lock held. All simulators of a run, in whatever process and after whatever restart,
    count in the size of one file; without one, episodes stay short.
    """

    observation_space, action_space = Box(-1.0, 1.0, (4,), np.float32), Discrete(3)

    def __init__(self, short: int = 20, long: int = 200):
        self.short, self.long = short, long
        self.steps = self.uncounted = 0
        self.length = short
        file = os.environ.get(COUNTER)
        self.file = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY) if file else None
        self.change = int(os.environ.get(CHANGE, "0"))

    def has_changed(self) -> bool:
        """Whether the regime has."""
        return self.file is not None and 0 < self.change <= os.fstat(self.file).st_size * _EVERY

    def show(self) -> np.ndarray:
        phase = 2.0 * np.pi * self.steps / self.length
        return np.array([np.sin(phase), np.cos(phase), self.steps / self.long, self.length == self.long], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed, options=options)
        self.steps, self.length = 0, self.long if self.has_changed() else self.short
        return self.show(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        self.uncounted += 1
        if self.file is not None and self.uncounted == _EVERY:
            os.write(self.file, b".")
            self.uncounted = 0
        total = 0
        for x in range(self.steps * self.steps):
            total = (total * 31 + x) & 0xFFFF
        wanted = self.steps % 3
        return self.show(), float(action == wanted and total >= 0), self.steps >= self.length, False, {}

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


gymnasium.register("Growing-v0", entry_point=f"{__name__}:Growing")
