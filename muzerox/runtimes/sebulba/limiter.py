"""The replay ratio, kept between threads: who runs ahead waits (Cassirer et al., Reverb, arXiv:2102.04736)."""

from __future__ import annotations

import threading
from fractions import Fraction

from muzerox.runtimes.sebulba.meter import Meter
from muzerox.runtimes.sebulba.queues import Closed, Replaced


class Pace:
    """Environment steps that must have been made before an update may sample, and the inverse.

    Update 1 needs ``first`` steps, every further one ``batch_size / replay_ratio`` more.
    """

    def __init__(self, *, first: int, batch_size: int, replay_ratio: Fraction):
        self.first = first
        # Of whole numbers: fractions take microseconds, at every row.
        self._steps, self._updates = (Fraction(batch_size) / replay_ratio).as_integer_ratio()

    def steps_before(self, update: int) -> int:
        """Environment steps needed before ``update``, counted from 1; none before update 0."""
        rounded_up = -((update - 1) * self._steps // -self._updates)
        return self.first + rounded_up if update > 0 else 0

    def updates_at(self, env_steps: int) -> int:
        """The first update before which so many environment steps are needed."""
        beyond = env_steps - self.first
        return 2 + (beyond - 1) * self._updates // self._steps if beyond > 0 else 1


class RateLimiter:
    """Lets self-play run ``window`` updates ahead of the learner and no further, and contexts be made when they are due.

    Args:
      updates: learner updates already made.
      env_steps: environment steps already made.
      last: no steps are made and no contexts prepared for updates after this one; see :meth:`until`.
    """

    def __init__(self, pace: Pace, meter: Meter, *, window: int, updates: int, env_steps: int, last: int):
        self._pace, self._meter, self._window, self._last = pace, meter, window, last
        # Whom a change concerns is woken, and only once it lets him go on: self-play is not interrupted for nothing.
        self._lock = threading.RLock()
        self._room, self._due = threading.Condition(self._lock), threading.Condition(self._lock)
        self._learned = self._contexts = updates
        self._made = env_steps
        self._reserved: dict[int, int] = {}  # by worker, steps under way
        self._generation: dict[int, int] = {}  # by worker, who may reserve
        self._closed = False

    @property
    def env_steps(self) -> int:
        """Steps made."""
        return self._made

    @property
    def learned_updates(self) -> int:
        """Updates the learner has made."""
        return self._learned

    def _allowed(self) -> int:
        return self._pace.steps_before(min(self._learned + self._window, self._last))

    def begin(self, worker: int, generation: int) -> None:
        """A worker starts over: what its predecessor reserved will not be made, and it may reserve no more."""
        with self._lock:
            self._generation[worker] = generation
            self._reserved.pop(worker, None)
            self._room.notify_all()

    def reserve(self, worker: int, generation: int, steps: int) -> None:
        """Waits until ``worker`` may make ``steps`` steps; they count from now. Raises Closed and Replaced."""

        def decided() -> bool:
            replaced = generation != self._generation[worker]
            return self._closed or replaced or self._made + sum(self._reserved.values()) < self._allowed()

        with self._meter.wait("step_put"), self._room:
            self._room.wait_for(decided)
            if self._closed:
                raise Closed
            if generation != self._generation[worker]:
                raise Replaced
            self._reserved[worker] = steps

    def commit(self, worker: int) -> None:
        """The steps that ``worker`` reserved have been made."""
        with self._lock:
            self._made += self._reserved.pop(worker)
            if self._is_due(self._contexts + 1):
                self._due.notify_all()

    def next_context(self) -> int:
        """Waits until another update may sample; returns its number, counted from 1. Raises Closed."""
        with self._meter.wait("context_put"), self._due:
            self._due.wait_for(lambda: self._closed or self._is_due(self._contexts + 1))
            if self._closed:
                raise Closed
            self._contexts += 1
            return self._contexts

    def _is_due(self, update: int) -> bool:
        return update <= self._last and self._made >= self._pace.steps_before(update)

    def learned(self, updates: int) -> None:
        """The learner has made so many updates."""
        with self._room:
            self._learned = updates
            self._room.notify_all()

    def until(self, update: int) -> None:
        """``update`` will be asked for: it and those before it are within the training."""
        with self._lock:
            self._last = max(self._last, update)
            self._room.notify_all()
            self._due.notify_all()

    def close(self) -> None:
        """Everyone who waits, now or later, gets Closed."""
        with self._lock:
            self._closed = True
            self._room.notify_all()
            self._due.notify_all()
