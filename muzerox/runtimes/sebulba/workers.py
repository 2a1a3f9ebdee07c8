"""What each role of the pipeline does, over and over, in a thread of its own.

self-play   environments step, search chooses -> rows of the replay
context     draws starts of sequences from the replay -> search queue
search      reads them, makes targets, reanalyzes -> batch queue; where nothing is searched again, the learner makes targets
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from muzerox.config import Config
from muzerox.envs.simulators import closing
from muzerox.runtimes import placement
from muzerox.runtimes.sebulba.crew import Worker
from muzerox.runtimes.sebulba.limiter import RateLimiter
from muzerox.runtimes.sebulba.meter import Meter
from muzerox.runtimes.sebulba.parameters import ParameterStore
from muzerox.runtimes.sebulba.programs import Programs
from muzerox.runtimes.sebulba.queues import BoundedQueue
from muzerox.runtimes.sebulba.ring import SharedRing, Start
from muzerox.selfplay import Choice
from muzerox.types import Batch, EnvSpec, HostEnvironment, Targets, TimeStep, Transition

_START_SECONDS = 300.0  # for environments to start: processes, imports, compilation


class Context(NamedTuple):
    """Sequences to be made into a batch: indices, no observations."""

    number: int  # the update it is for, if none overtakes it
    start: Start


class Ready(NamedTuple):
    """A batch the learner can use as it is."""

    number: int
    version: int | None  # updates the learner had made when it published the parameters that made the targets, if they are made
    start: Start
    batch: Batch
    targets: Targets | None  # None: the learner makes them


@dataclasses.dataclass
class Episodes:
    """Sums over episodes that ended, from any thread."""

    count: int = 0
    return_sum: float = 0.0
    length_sum: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def add(self, returns: np.ndarray, lengths: np.ndarray) -> None:
        """Episodes with these returns and lengths ended."""
        with self.lock:
            self.count += len(returns)
            self.return_sum += float(returns.sum())
            self.length_sum += int(lengths.sum())

    def take(self) -> tuple[int, float, int]:
        """Count and sums; starts from nothing again."""
        with self.lock:
            taken = self.count, self.return_sum, self.length_sum
            self.count, self.return_sum, self.length_sum = 0, 0.0, 0
            return taken


@dataclasses.dataclass
class Shared:
    """What the threads of one pipeline share."""

    config: Config
    spec: EnvSpec
    env: HostEnvironment
    programs: Programs
    meter: Meter
    limiter: RateLimiter
    ring: SharedRing
    parameters: ParameterStore
    contexts: BoundedQueue[Context]
    ready: BoundedQueue[Ready]
    episodes: Episodes
    key: jax.Array  # of self-play and search; streams are fold_in(key, role), then a number
    acting: list[jax.Device]
    searching: list[jax.Device]
    batch_sharding: Any  # where a ready batch lies


def play(shared: Shared, worker: Worker) -> None:
    """Self-play: steps ``num_envs`` environments by search until the pipeline is closed."""
    config, spec, index = shared.config, shared.spec, worker.index
    num_envs, device = config.runtime.num_envs, shared.acting[index % len(shared.acting)]
    generation = shared.ring.begin(index)
    shared.limiter.begin(index, generation)
    key = jax.random.fold_in(jax.random.fold_in(shared.key, 0), index)
    data = jax.device_put(jax.random.key_data(key), device)
    # Other episodes after a failure, and after a run is resumed: what led to the failure is not met again at once.
    seed = np.random.SeedSequence([config.seed, index, generation, int(shared.ring.count[index])]).generate_state(1)[0]
    with worker.within(_START_SECONDS, "to start"):
        batch = shared.env.make(num_envs, int(seed % 2**31))

    def close() -> None:
        failure = sys.exception()  # which a close that hangs must not hide
        with worker.within(config.runtime.step_timeout, f"to close, after {failure!r}"):
            batch.close()

    with closing(close):
        with worker.within(_START_SECONDS, "for their first reset"):
            now = batch.reset()
        score, length = np.zeros(num_envs, np.float64), np.zeros(num_envs, np.int64)
        number, row = int(shared.ring.count[index]), None
        while True:
            version, leaves = shared.parameters.pull(device)
            legal = now.legal if spec.has_legal else None
            called = time.perf_counter()
            choosing = shared.programs.choose(data, np.uint32(number), leaves, now.observation, legal)
            called = time.perf_counter() - called  # the whole search, on devices that are not asynchronous
            if row is not None:  # written and counted while the search for the next one runs, where that is not called
                shared.ring.write(index, generation, row, lambda: shared.limiter.commit(index))
                score += row.reward if spec.num_players == 1 else np.where(length % 2 == 0, row.reward, -row.reward)
                length += 1
                _count_episodes(shared.episodes, now, score, length)
                worker.done()
            shared.limiter.reserve(index, generation, num_envs)
            with shared.meter.wait("action"):
                # jax.device_get takes six times as long where no copy is needed, jax.tree.map twice.
                taken: Any = [None if x is None else np.asarray(x) for x in choosing]
                choice = Choice(*taken)
            shared.meter.add("wait_action_seconds", called)
            shared.meter.observe("acting_staleness", shared.limiter.learned_updates - version)
            with worker.within(config.runtime.step_timeout, "for a step"), shared.meter.wait("environment"):
                following = batch.step(choice.action)
            row = Transition(
                observation=now.observation,
                action=choice.action,
                reward=following.reward,
                terminated=following.terminated,
                truncated=following.truncated,
                policy=choice.policy,
                legal=legal,
                final_observation=following.final_observation,
                random=choice.drawn,
            )
            now, number = following, number + 1


def _count_episodes(episodes: Episodes, timestep: TimeStep, score: np.ndarray, length: np.ndarray) -> None:
    """Counts the episodes that ended and starts their sums from nothing."""
    ended = np.asarray(timestep.ended)
    if ended.any():
        episodes.add(score[ended], length[ended])
        score[ended], length[ended] = 0.0, 0


class ContextBody:
    """A cpu actor. What a failure finds in its hands is put all the same: no context is lost."""

    def __init__(self, shared: Shared, index: int):
        self._shared = shared
        self._number: int | None = None
        self._context: Context | None = None
        self._rng = np.random.default_rng([shared.config.seed, index, shared.limiter.learned_updates])

    def __call__(self, worker: Worker) -> None:
        shared = self._shared
        while True:
            if self._number is None:
                self._number = shared.limiter.next_context()
            if self._context is None:
                start = shared.ring.sample(self._rng, shared.config.train.batch_size)
                self._context = Context(self._number, start)
                shared.meter.add("bytes_contexts", sum(x.nbytes for x in start))
            shared.contexts.put(self._context)
            self._number = self._context = None
            worker.done()


class _Begun(NamedTuple):
    """A batch under way."""

    ready: Ready
    late: int  # starts that had been overwritten


class SearchBody:
    """A search worker. What a failure finds in its hands is searched and put all the same: no context is lost."""

    def __init__(self, shared: Shared, index: int):
        self._shared = shared
        self._context: Context | None = None
        self._ready: Ready | None = None
        self._batch_bytes: int | None = None  # known once it has compiled
        self._device = shared.searching[index]
        self._key_data = jax.device_put(jax.random.key_data(jax.random.fold_in(shared.key, 1)), self._device)

    def __call__(self, worker: Worker) -> None:
        shared = self._shared
        if self._batch_bytes is None:  # while the first rows are played
            made = self._finish(self._begin(Context(0, shared.ring.nowhere(shared.config.train.batch_size))))
            self._batch_bytes = sum(x.nbytes for x in jax.tree.leaves((made.batch, made.targets)))
        while True:
            if self._context is None:
                self._context = shared.contexts.get()
            if self._ready is None:
                self._ready = self._search(self._context)
                shared.meter.add("bytes_batches", self._batch_bytes)
            shared.ready.put(self._ready)
            self._context = self._ready = None
            worker.done()

    def _search(self, context: Context) -> Ready:
        begun = self._begin(context)
        if begun.late:
            self._shared.meter.add("overwritten_starts", begun.late)
        with self._shared.meter.wait("targets"):
            return self._finish(begun)

    def _begin(self, context: Context) -> _Begun:
        """Reads the sequences and has targets made of them; meters nothing, nor waits."""
        shared, programs = self._shared, self._shared.programs
        start, (batch, reread), late = shared.ring.read(context.start, programs.gather)
        if not programs.target:
            return _Begun(Ready(context.number, None, start, batch, None), late)
        version, leaves = shared.parameters.pull(self._device, target=True)
        if isinstance(batch.action, jax.Array):  # NumPy arrays are taken by programs as they are
            batch, reread = placement.put((batch, reread), self._device)
        made = programs.target(self._key_data, np.uint32(context.number), leaves, batch, reread)
        return _Begun(Ready(context.number, version, start, *made), late)

    def _finish(self, begun: _Begun) -> Ready:
        """Waits until the batch is made and lies where the learner takes it."""
        ready = begun.ready
        if not isinstance(ready.batch.action, jax.Array):
            return ready
        batch, targets = jax.block_until_ready(placement.put((ready.batch, ready.targets), self._shared.batch_sharding))
        return ready._replace(batch=batch, targets=targets)
