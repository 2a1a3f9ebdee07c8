"""What a tuning is to minimise, and what it may not exceed: seconds, money, energy, or a mix of them.

A goal is a weighted geometric mean: seconds an environment step, what the step costs and the joules it takes, each to the power
of its weight. Units do not matter then, and a mix of halves takes half the speed for half the price of an hour.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from predictor import Hardware
from tuner.bridge import GIB, Config, UserError, no_energy

PRICES = {"core": 0.04, "gib": 0.005, "device": 2.5}  # of an hour, as a cloud's machines cost about; only ratios matter
_WEIGHTS = ("time", "cost", "energy")
_LEAST, _MOST = 1e-6, 1e6  # of a weight or a price: what products and sums of such are, float32 holds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """Weights, prices and bounds. The default is seconds, on all there is."""

    money: float = 0.0  # weight of what an environment step costs, from 0 to 1
    energy: float = 0.0  # of the joules it takes; the rest is that of its seconds
    core: float = PRICES["core"]  # price of an hour
    gib: float = PRICES["gib"]
    device: float = PRICES["device"]
    max_cores: int | None = None
    max_memory_gib: float | None = None

    @classmethod
    def parse(
        cls, objective: str = "time", prices: str = "", max_cores: int | None = None, max_memory_gib: float | None = None
    ) -> Goal:
        """From ``time``, ``cost``, ``energy`` or ``time=0.7,cost=0.3``, and ``core=0.04,gib=0.005``. Raises UserError."""
        if objective in _WEIGHTS:
            objective = f"{objective}=1"
        weights = dict.fromkeys(_WEIGHTS, 0.0) | _numbers("objective", objective, _WEIGHTS, "time or time=0.7,cost=0.3")
        if not any(weights.values()):
            raise UserError("objective", objective, "needs a weight above 0", "time")
        found = PRICES | _numbers("prices", prices, tuple(PRICES), "core=0.04,gib=0.005,device=2.5")
        if weights["cost"] and not any(found.values()):
            raise UserError("prices", prices, "one must be above 0", "core=0.04")
        if max_cores is not None and max_cores < 1:
            raise UserError("max_cores", max_cores, "must be at least 1", 1)
        if max_memory_gib is not None and not 0.25 <= max_memory_gib < math.inf:
            raise UserError("max_memory", max_memory_gib, "must be at least 0.25 GiB", 0.25)
        money, energy = (weights[name] / sum(weights.values()) for name in ("cost", "energy"))
        return cls(money=money, energy=energy, **found, max_cores=max_cores, max_memory_gib=max_memory_gib)

    def check(self, platform: str) -> None:
        """Raises UserError where nothing of a machine of ``platform`` has the energy or the price that counts."""
        if self.energy and (why := no_energy(platform)):
            raise UserError("objective", self.name, f"energy cannot be read on this machine: {why}", "cost")
        if self.money and platform == "cpu" and not (self.core or self.gib):
            free = f"core=0,gib=0,device={self.device:g}"
            raise UserError("prices", free, "a machine without an accelerator has cores and memory alone", "core=0.04")

    def within(self, hardware: Hardware) -> Hardware:
        """The machine, with no more memory than the goal allows; what it is called changes with it."""
        bound = math.inf if self.max_memory_gib is None else self.max_memory_gib * GIB
        return dataclasses.replace(hardware, memory_bytes=int(min(hardware.memory_bytes, bound)))

    def bounded(self, start: Config, hardware: Hardware) -> Config:
        """The configuration with no more cores and memory than the goal allows, where that is less than the machine has."""
        given, memory = start.allocation, self.max_memory_gib
        changes: dict[str, Any] = {}
        if self.max_cores is not None:
            changes["allocation.cores"] = min(given.cores or self.max_cores, self.max_cores)
        if memory is not None and memory * GIB < hardware.memory_bytes:
            changes["allocation.memory_gib"] = min(given.memory_gib or memory, memory)
        return start.replace(changes)

    def kept_to(self, start: Config) -> Goal:
        """The goal of a tuning from ``start``, which is bounded: no other is given more memory than that asks for."""
        return dataclasses.replace(self, max_memory_gib=start.allocation.memory_gib)

    @property
    def name(self) -> str:
        """What is minimised, as ``--objective`` has it."""
        weights = dict(zip(_WEIGHTS, (1.0 - self.money - self.energy, self.money, self.energy), strict=True))
        mixed = [f"{name}={weight:.3g}" for name, weight in weights.items() if weight > 1e-9]
        return ",".join(mixed) if len(mixed) > 1 else mixed[0].partition("=")[0]

    @property
    def terms(self) -> dict[str, str | float]:
        """All that it counts by, by the options that say so: what has other terms is another goal."""
        prices = {f"--prices {name}": getattr(self, name) for name in PRICES} if self.money else {}
        return {"--objective": self.name, "--objective cost": self.money, "--objective energy": self.energy, **prices}


def _numbers(name: str, text: str, known: tuple[str, ...], example: str) -> dict[str, float]:
    """``a=1,b=2`` as a dictionary. Raises UserError."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if key not in known or key in found or not (number == 0.0 or _LEAST <= number <= _MOST):
            rule = f"must be pairs of {', '.join(known)}, each once, and 0 or a number from {_LEAST:g} to {_MOST:g}"
            raise UserError(name, text, rule, example)
        found[key] = number
    return found
