"""The pipeline of threads as Python generators, one a thread: what ``predictor.simulator`` is checked against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Demand = dict[str, float]
Work = tuple[float, Demand]  # seconds alone, and what is taken of each resource meanwhile


class Pipeline:
    """Rounds of each kind of thread as lists of ``Work``; runs until so many updates were published.

    Args:
      unit: updates' worth of steps that a round of self-play makes.
      window: updates that self-play may be ahead.
    """

    def __init__(
        self,
        rounds: dict[str, list[Work]],
        counts: dict[str, int],
        room: Demand,
        *,
        unit: float,
        window: float,
        loop_count: int,
        queues: tuple[int, int],
    ):
        self.rounds, self.room, self.unit, self.window = rounds, room, unit, window
        self.loop_count, self.queues = loop_count, queues
        self.started = self.made = 1.0
        self.begun = self.contexts = self.batches = self.pending = self.under_way = self.published = 0
        bodies = {
            "selfplay": self.selfplay,
            "context": self.context,
            "search": self.search,
            "learner": self.learner,
            "update": self.update,
        }
        self.threads: list[Iterator[Any]] = [body() for kind, body in bodies.items() for _ in range(counts[kind])]

    def selfplay(self) -> Iterator[Any]:
        while True:
            yield lambda: self.started < self.published + self.window - 1e-6
            self.started += self.unit
            yield from self.rounds["selfplay"]
            self.made += self.unit

    def context(self) -> Iterator[Any]:
        while True:
            yield lambda: self.begun + 1 <= self.made + 1e-6
            self.begun += 1
            yield from self.rounds["context"]
            yield lambda: self.contexts < self.queues[0]
            self.contexts += 1

    def search(self) -> Iterator[Any]:
        while True:
            yield lambda: self.contexts > 0
            self.contexts -= 1
            yield from self.rounds["search"]
            yield lambda: self.batches < self.queues[1]
            self.batches += 1

    def learner(self) -> Iterator[Any]:
        while True:
            yield lambda: self.under_way < 2
            for _ in range(self.loop_count):
                yield lambda: self.batches > 0
                self.batches -= 1
            self.under_way += 1
            yield from self.rounds["learner"]
            self.pending += 1

    def update(self) -> Iterator[Any]:
        while True:
            yield lambda: self.pending > 0
            self.pending -= 1
            yield from self.rounds["update"]
            self.published += self.loop_count
            self.under_way -= 1

    def seconds_an_update(self, updates: int) -> float:
        """From the end of a dispatch half-way to the end of the one that makes it ``updates``."""
        now, half = 0.0, (0.0, 0)
        wanted: list[Any] = [next(thread) for thread in self.threads]
        left: list[float | None] = [None] * len(wanted)  # of those at work
        while True:
            moved = True
            while moved:  # whoever can go on does, until nobody can
                moved = False
                for i, thread in enumerate(self.threads):
                    if left[i] == 0.0 or (left[i] is None and wanted[i]()):
                        wanted[i], moved = next(thread), True
                        left[i] = None if callable(wanted[i]) else wanted[i][0]
            if self.published >= updates:
                return (now - half[0]) / (self.published - half[1])
            if self.published <= updates / 2:
                half = half if self.published == half[1] else (now, self.published)
            at_work = {i: (amount, wanted[i][1]) for i, amount in enumerate(left) if amount is not None}
            taken = {name: sum(demand.get(name, 0.0) for _, demand in at_work.values()) for name in self.room}
            share = {name: min(1.0, self.room[name] / amount) if amount else 1.0 for name, amount in taken.items()}
            rates = {i: min(share[name] for name in demand) for i, (_, demand) in at_work.items()}
            step = min(amount / rates[i] for i, (amount, _) in at_work.items())
            now += step
            for i, (amount, _) in at_work.items():
                remaining = amount - rates[i] * step
                left[i] = remaining if remaining > 1e-9 * wanted[i][0] else 0.0
