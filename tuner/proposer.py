"""What to measure next: the predictor, taught by what was measured, is annealed over the grid. Nothing is measured here.

So that a tuning makes the choices that a replay of one over a table of measurements makes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from predictor import Hardware, Measurement, RuntimePredictor, Workload, hardware_rates, stack
from tuner import anneal
from tuner.objective import Limits, cost, energy, excluded, price
from tuner.space import Space

RANDOM_EVERY = 5  # one trial in so many is drawn at random: the predictor would never see what it thinks is bad
_DRAWN = 1024  # points that a random one is drawn from: most may be infeasible
_NOTHING = 0.01  # a difference of this share is not worth measuring

Point = tuple[int, ...]


def role_of(number: int) -> str:
    """How trial ``number`` (the baseline is 0) is chosen: ``annealed`` or ``random``."""
    return "random" if number % RANDOM_EVERY == 0 else "annealed"


class Proposer:
    """Chooses points of a grid, one after the other, from what was measured of those before."""

    def __init__(
        self, space: Space, hardware: Hardware, taught: RuntimePredictor, key: jax.Array, staleness_price: float
    ) -> None:
        """``taught`` knows other machines and other work; ``staleness_price`` is the share of time an update of age is worth."""
        self.space, self.hardware, self.taught, self.predictor = space, hardware, taught, taught
        self.staleness_price = staleness_price
        self._key_fit, self._key_anneal = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        self._known: list[tuple[Point, Measurement]] = []
        self._covered: list[Point] = []

    def learn(self, known: Sequence[tuple[Point, Measurement]]) -> None:
        """Everything that was measured so far, oldest first: points and what was found."""
        self._known = list(known)
        self.predictor = self.taught.fit([measurement for _, measurement in known], key=self._key_fit)

    def cover(self, point: Point) -> None:
        """A point that is not to be proposed, for it would be measured as another one was."""
        self._covered.append(point)

    def price(self, measurement: Measurement) -> float:
        """What a measured configuration pays for cores, memory and staleness, as a share of its time."""
        return float(price(measurement.workload, hardware_rates(self.hardware), self.staleness_price))

    def cost(self, measurement: Measurement) -> float:
        """What is minimised, of a measured configuration; infinite where it failed."""
        return cost(measurement, self.hardware, self.staleness_price)

    def propose(self, number: int) -> Point | None:
        """A point for trial ``number`` that was not measured: of least energy among the chains' best, or drawn at random.

        None when every feasible point was.
        """
        key = jax.random.fold_in(self._key_anneal, number)
        bounds = self.space.max_num_envs, self.space.max_staleness, self.staleness_price
        arguments = (
            self.predictor.params,
            hardware_rates(self.hardware),
            self.space.base,
            self.space.tables(),
            Limits(*map(jnp.float32, bounds)),
            excluded(self.space, [*(point for point, _ in self._known), *self._covered]),
        )
        if role_of(number) == "random":
            points = np.asarray(jax.random.uniform(key, (_DRAWN, len(self.space.sizes))) * self.space.sizes[None, :], np.int32)
            feasible = np.isfinite(energy(jnp.asarray(points), *arguments))
            energies = np.where(feasible, np.arange(float(_DRAWN)), np.inf)
        else:
            best, _ = min(self._known, key=lambda known: self.cost(known[1]))
            found = anneal.run(key, energy, self.space.sizes, initial=best, args=arguments)
            points, energies = np.asarray(found.chain_best), np.asarray(found.chain_best_energy)
        index = int(np.argmin(energies))
        return tuple(int(x) for x in points[index]) if np.isfinite(energies[index]) else None

    def further_loop_counts(self, workload: Workload) -> list[int]:
        """Other loop counts to be timed in a workload's process: the one expected to be best, and the farthest off.

        None where each is a program of its own, or dispatching is expected to cost next to nothing: slow bursts are dear.
        """
        if workload.sebulba:
            return []
        own = int(workload.loop_count)
        options = list(dict.fromkeys([own, *self.space.options("runtime.loop_count")]))
        workloads = [dataclasses.replace(workload, loop_count=float(n)) for n in options]
        seconds = np.exp(np.asarray(self.predictor.log_seconds(stack(workloads), self.hardware)))
        if np.max(seconds) < (1.0 + _NOTHING) * np.min(seconds):
            return []
        best = options[int(np.argmin(seconds))]
        farthest = max(options, key=lambda n: abs(math.log(n / own)))
        return [n for n in dict.fromkeys([best, farthest]) if n != own]
