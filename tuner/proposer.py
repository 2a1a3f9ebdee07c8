"""What to measure next: the predictor, taught by what was measured, is annealed over the grid. Nothing is measured here.

So that a tuning makes the choices that a replay of one over a table of measurements makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from predictor import Hardware, Measurement, RuntimePredictor, hardware_rates, stack
from tuner import anneal
from tuner.goal import Goal
from tuner.objective import ANY, cost, energy, excluded, limits_of, log_rent, missed_power, price
from tuner.residual import capacity, evaluate, make_residual
from tuner.space import Space, workloads

CHAINS = 1024
REHEAT = 0.3  # of the temperature that chains start at, when they go on: what was learnt since changes their energies a little
# One trial in so many is drawn at random: the predictor would never see what it thinks is bad. Few are: of 212 in 81 recorded
# tunings none was among the four fastest of its own, and they had 0.45 of the best's speed (median).
RANDOM_EVERY = 20
# One in so many moves a knob that no trial has moved: what the start's choice of it costs is taken for what everything costs, for
# no trial tells them apart. Where a second core was worth a tenth less than expected, one of six tunings from two cores tried no
# other in 15 trials, and two of three when the knob was left to the predictor. The first comes early, before much is built on
# what may be wrong.
VARIED_EVERY, VARIED_FIRST = 5, 4
# Later, one in so many changes one choice of the best, of those without an order, and nothing else: what was tried together with
# what was bad is taken to be bad. Of six tunings, three that began with simulators in processes had tried threads just so, and
# ended without them at 0.83 to 0.92 of the best's speed.
SWITCHED_EVERY, SWITCHED_FIRST = 3, 8
COOLING, COLDEST = 0.8, 0.05  # of the outer temperature: what a round takes of it, and where it stays
CURIOSITY = 1.0  # standard deviations that a trial's seconds are taken to be better than expected
_FAILED = 2.0  # times the seconds of the slowest that ran: what one that failed counts as, so that its like are shunned
_DRAWN = 1024  # points that a random one is drawn from: most may be infeasible
_FASTEST = Goal()
NOTHING = 0.01  # a difference of this share is not worth measuring

Point = tuple[int, ...]
_energy = jax.jit(energy)


def temperature_of(number: int) -> float:
    """The outer temperature of trial ``number``: from 1 at the first after the baseline down to ``COLDEST``."""
    return float(max(COOLING ** (number - 1), COLDEST))


def _least(points: np.ndarray, energies: np.ndarray) -> Point | None:
    """Of points [C, D] the one of least energy [C]; None where none is finite."""
    index = int(np.argmin(energies))
    return tuple(int(x) for x in points[index]) if np.isfinite(energies[index]) else None


def _starts(best: Point, chains: np.ndarray | None) -> np.ndarray:
    """[C, D]: every second chain starts at the best there is; others go on from where ``chains`` stood, or anywhere (-1)."""
    starts = np.full((CHAINS, len(best)), -1, np.int32) if chains is None else chains.copy()
    starts[::2] = best
    return starts


class Proposer:
    """Chooses points of a grid, one after the other, from what was measured of those before."""

    def __init__(
        self,
        space: Space,
        hardware: Hardware,
        taught: RuntimePredictor,
        key: jax.Array,
        staleness_price: float,
        goal: Goal = _FASTEST,
        curiosity: float = CURIOSITY,
    ) -> None:
        """``taught`` knows other machines and other work; ``staleness_price`` is the share of time an update of age is worth.

        ``curiosity``: how many standard deviations better than expected a trial is taken to be.
        """
        self.space, self.hardware, self.taught, self.predictor = space, hardware, taught, taught
        self.limits, self.curiosity = limits_of(goal, hardware, space, staleness_price), curiosity
        self._key = key
        self._known: list[tuple[Point, Measurement]] = []
        self._covered: list[Point] = []
        self._chains: np.ndarray | None = None  # [C, D], where they stood when the last annealing ended
        self._residual = make_residual(space, (), ())

    def learn(self, known: Sequence[tuple[Point, Measurement]]) -> None:
        """Everything that was measured so far, oldest first: points and what was found."""
        self._known = list(known)
        # What so few say beyond the base, of a single piece of work, a network would only learn by heart.
        self.predictor = self.taught.fit([measurement for _, measurement in known], train=False)
        if known:
            rows = [m.workload for _, m in known]
            filled = rows + rows[:1] * (capacity(len(rows)) - len(rows))  # of few lengths, so that few programs are compiled
            predicted = np.asarray(self.predictor.log_seconds(stack(filled), self.hardware))[: len(rows)]
            found = np.array([math.log(m.seconds_per_env_step or math.inf) + missed_power(m, self.limits) for _, m in known])
            slowest = np.max(found, initial=-math.inf, where=np.isfinite(found))
            found = np.where(np.isfinite(found), found, np.maximum(predicted, slowest) + math.log(_FAILED))
            self._residual = make_residual(self.space, [point for point, _ in known], found - predicted)

    def role_of(self, number: int) -> str:
        """How trial ``number`` (the baseline is 0) is chosen: ``random``, ``varied``, ``switched`` or, mostly, ``annealed``.

        ``varied`` while a knob is unmoved; ``switched`` while there is a choice of the best that may be changed alone.
        """
        if number % RANDOM_EVERY == 0:
            return "random"
        if number % VARIED_EVERY == VARIED_FIRST and self._as_ever():
            return "varied"
        switches = number >= SWITCHED_FIRST and (number - SWITCHED_FIRST) % SWITCHED_EVERY == 0
        return "switched" if switches and np.isfinite(self._switched()[1]).any() else "annealed"

    def _switched(self) -> tuple[np.ndarray, np.ndarray]:
        """Points [C, D] that differ from the best in one choice of a knob without an order, and their energies [C].

        Of knobs that are not live: those one process times at many choices.
        """
        best = np.array(self._best()[0], np.int32)
        points = [best]  # its own is infinite, for it was measured
        for axis, (knob, options) in enumerate(zip(self.space.knobs, self.space.choices, strict=True)):
            if knob.scale == "name" and knob.cost != "live":
                points += [np.where(np.arange(len(best)) == axis, i, best) for i in range(len(options)) if i != best[axis]]
        filled = np.array(points + points[:1] * (capacity(len(points)) - len(points)))  # so that few programs are compiled
        return filled, self.energies(filled)

    def _as_ever(self) -> list[Point]:
        """Patterns, in their order, of all points at which knobs that were never moved stay; none where all were.

        Of cores alone, if they are one: what a second is worth is the machine's and not the program's, so that other machines say
        least of it. Then of all of them. Knobs aside that one process times at many choices, and those that hardly matter.
        """
        tried = np.array([point for point, _ in self._known] or [self.space.start])
        unmoved = np.array(
            [
                len(options) > 1 and knob.cost != "live" and not knob.fine and len(set(column)) == 1
                for knob, options, column in zip(self.space.knobs, self.space.choices, tried.T, strict=True)
            ]
        )
        cores = unmoved & np.array([knob.path == "allocation.cores" for knob in self.space.knobs])
        patterns = [tuple(np.where(stay, tried[0], ANY).tolist()) for stay in (cores, unmoved) if stay.any()]
        return list(dict.fromkeys(patterns))

    def cover(self, point: Point) -> None:
        """A point that is not to be proposed, for it would be measured as another one was."""
        self._covered.append(point)

    def price(self, measurement: Measurement) -> float:
        """What a measured configuration pays for cores, memory and staleness, as a share of its time."""
        return float(price(measurement.workload, hardware_rates(self.hardware), self.limits.staleness_price))

    def rent(self, measurement: Measurement) -> float:
        """What a second of a measured configuration counts as; 1 where only time matters."""
        return math.exp(
            float(log_rent(measurement.workload, hardware_rates(measurement.hardware), self.limits))
            + missed_power(measurement, self.limits)
        )

    def cost(self, measurement: Measurement) -> float:
        """What is minimised, of a measured configuration; infinite where it failed."""
        return cost(measurement, self.hardware, self.limits)

    def _arguments(self, curiosity: float | None = None, shunned: Sequence[Point] = ()) -> tuple[Any, ...]:
        """What the energy takes beside points; ``shunned`` are not to be proposed, nor what was measured or covered."""
        curious = jnp.float32(self.curiosity if curiosity is None else curiosity)
        return (
            self.predictor.params.heard(),
            hardware_rates(self.hardware),
            self.space.base,
            self.space.tables(),
            self.limits._replace(curiosity=curious),
            excluded(self.space, [*(point for point, _ in self._known), *self._covered, *shunned]),
            self._residual,
        )

    def energies(self, points: np.ndarray) -> np.ndarray:
        """What is annealed, of points int32 [C, D]: float32 [C], infinite of those that are not to be measured (again)."""
        return np.asarray(_energy(jnp.asarray(points, jnp.int32), *self._arguments()))

    def log_seconds(self, points: np.ndarray) -> np.ndarray:
        """Log of the seconds an environment step that are expected of points int32 [C, D]: float32 [C].

        Where energy counts, times by how much more than expected of it they are to take.
        """
        made = workloads(self.space.base, self.space.tables(), jnp.asarray(points, jnp.int32))
        missed, _ = evaluate(self._residual, jnp.asarray(points, jnp.int32))
        return np.asarray(self.predictor.log_seconds(made, self.hardware) + missed)

    def propose(self, number: int) -> Point | None:
        """A point for trial ``number`` that was not measured: of least energy among the chains' best, or drawn at random.

        At the loop count that is predicted to be fastest, where that is live: each program is measured once, and a trial does not
        tell the percent or two that dispatching costs. None when every feasible point was measured.
        """
        point = self._chosen(number)
        loops = None if point is None else self._by_loop_count(point)
        return point if loops is None else min(loops, key=lambda same: loops[same])

    def _by_loop_count(self, point: Point) -> dict[Point, float] | None:
        """The same program at every loop count, with the log seconds an environment step that the predictor alone expects.

        None where updates a dispatch are no argument of a compiled program.
        """
        live = [knob.path == "runtime.loop_count" and knob.cost == "live" for knob in self.space.knobs]
        if not any(live):
            return None
        axis = live.index(True)
        points = [(*point[:axis], choice, *point[axis + 1 :]) for choice in range(len(self.space.choices[axis]))]
        made = workloads(self.space.base, self.space.tables(), jnp.array(points, jnp.int32))
        return dict(zip(points, np.asarray(self.predictor.log_seconds(made, self.hardware)).tolist(), strict=True))

    def _chosen(self, number: int) -> Point | None:
        """What is proposed, at whatever loop count."""
        key, role = jax.random.fold_in(self._key, number), self.role_of(number)
        if role == "random":
            points = np.asarray(jax.random.uniform(key, (_DRAWN, len(self.space.sizes))) * self.space.sizes[None, :], np.int32)
            drawn = _least(points, np.where(np.isfinite(self.energies(points)), np.arange(float(_DRAWN)), np.inf))
            if drawn is not None:  # bounds may leave so little that chance does not find it, and an annealer does
                return drawn
        best = self._best()[0]
        if role == "switched":
            return _least(*self._switched())
        if role == "varied":
            for pattern in self._as_ever():
                points, energies, _ = self._anneal(key, _starts(best, None), 1.0, shunned=[pattern])
                if (point := _least(points, energies)) is not None:  # what no trial has moved can be
                    return point
        heat = 1.0 if self._chains is None else REHEAT
        points, energies, self._chains = self._anneal(key, _starts(best, self._chains), heat)
        return _least(points, energies)

    def _anneal(
        self, key: jax.Array, starts: np.ndarray, heat: float, shunned: Sequence[Point] = ()
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The best of each chain [C, D], its energy [C], and where the chains end [C, D]."""
        arguments = self._arguments(shunned=shunned)
        found = anneal.run(
            key,
            energy,
            self.space.sizes,
            chains=CHAINS,
            initial=starts,
            heat=heat,
            args=arguments,
            compiler_options=self.predictor.params.heard().compiler_options,
        )
        return np.asarray(found.chain_best), np.asarray(found.chain_best_energy), np.asarray(found.current)

    def expected_gain(self, point: Point) -> float:
        """By how much measuring a point is expected to lower the log of the least cost that is expected of what was measured.

        0 or more: the expected improvement of Jones, Schonlau and Welch (1998), its cost being normal by what was learnt. Over
        what is expected, and not over the least measured, which has been lucky (Picheny, Wagner and Ginsbourger, 2013).
        """
        row = jnp.array([point], jnp.int32)
        expected, hoped = (float(_energy(row, *self._arguments(curiosity=c))[0]) for c in (0.0, 1.0))
        if not math.isfinite(expected):
            return 0.0  # it is not to be measured
        better, deviation = self._least_expected() - expected, expected - hoped
        if deviation <= 0.0:
            return max(better, 0.0)
        scaled = better / deviation
        below = 0.5 * math.erfc(-scaled / math.sqrt(2.0))
        return better * below + deviation * math.exp(-0.5 * scaled**2) / math.sqrt(2.0 * math.pi)

    def _best(self) -> tuple[Point, Measurement]:
        """The least cost measured of what may be chosen."""
        return min(self._choices(), key=lambda known: self.cost(known[1]))

    def _least_expected(self) -> float:
        """The least cost that is expected of what was measured and may be chosen; infinite where nothing ran."""
        ran = [(point, measurement) for point, measurement in self._choices() if measurement.seconds_per_env_step]
        if not ran:
            return math.inf
        points, measured = zip(*ran, strict=True)
        filled = np.array(points + points[:1] * (capacity(len(points)) - len(points)), np.int32)
        seconds = self.log_seconds(filled)[: len(points)]
        rents = [float(log_rent(m.workload, hardware_rates(m.hardware), self.limits)) for m in measured]
        return min(s + rent + self.price(m) for s, rent, m in zip(seconds, rents, measured, strict=True))

    def _choices(self) -> list[tuple[Point, Measurement]]:
        """What was measured, of levels that were not refused since, if there are any: whole choices are covered then."""
        patterns = [covered for covered in self._covered if ANY in covered]

        def refused(point: Point) -> bool:
            return any(all(choice in (ANY, own) for choice, own in zip(p, point, strict=True)) for p in patterns)

        return [known for known in self._known if not refused(known[0])] or self._known

    def further_loop_counts(self, point: Point) -> list[int]:
        """Other loop counts to be timed in the process that measures a point: the one predicted to be best, where it is another.

        None where each is a program of its own, or hardly any difference is predicted between them: slow bursts are dear.
        """
        loops = self._by_loop_count(point)
        if loops is None or max(loops.values()) - min(loops.values()) < NOTHING:
            return []
        best = min(loops, key=lambda same: loops[same])
        return [] if best == point else [int(self.space.decode(best)["runtime.loop_count"])]
