"""The replay that self-play workers write and cpu actors sample, at the same time.

Rows lie in one ring in one place, as under Anakin, but every worker has columns and a cursor of its own, so that nobody waits
for anybody's environments. Priorities lie on the host, where contexts are drawn: a context holds indices, never observations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from muzerox.config import Config
from muzerox.replay import SMALLEST_PRIORITY, Sample, spread
from muzerox.runtimes.sebulba.queues import Replaced
from muzerox.runtimes.sebulba.rows import make_rows
from muzerox.types import EnvSpec, Transition


class RingState(struct.PyTreeNode):
    """What is saved of a ring. W workers, E environments each."""

    storage: Transition  # leaves [C, W E, ...]
    priority: jax.Array  # [C, W E] float32, already raised to the priority exponent
    max_priority: jax.Array  # [] float32, the largest priority ever given, raised
    count: jax.Array  # [W] int32, rows that each worker has ever written


class Start(NamedTuple):
    """Starts of sequences, by rows that are never used again. NumPy."""

    row: np.ndarray  # [B] int64, counted from the worker's first row ever
    column: np.ndarray  # [B] int32
    importance: np.ndarray  # [B] float32, largest 1


def init(config: Config, spec: EnvSpec) -> RingState:
    """An empty ring. Every row stores the observation it led to: any episode may be cut short by a failure."""
    columns = config.runtime.num_envs * config.selfplay_workers
    rows = config.replay.capacity // columns

    def leaf(dtype: Any, *shape: int) -> jax.Array:
        return jnp.zeros((rows, columns, *shape), dtype)

    observation = leaf(spec.observation_dtype, *spec.observation_shape)
    storage = Transition(
        observation=observation,
        action=leaf(jnp.int32),
        reward=leaf(jnp.float32),
        terminated=leaf(jnp.bool_),
        truncated=leaf(jnp.bool_),
        policy=leaf(jnp.float32, spec.num_actions),
        legal=leaf(jnp.bool_, spec.num_actions) if spec.has_legal else None,
        final_observation=jnp.zeros_like(observation),
        random=leaf(jnp.bool_) if config.train.random_action else None,
    )
    return RingState(
        storage=storage,
        priority=jnp.zeros((rows, columns), jnp.float32),
        max_priority=jnp.float32(1.0),
        count=jnp.zeros(config.selfplay_workers, jnp.int32),
    )


class SharedRing:
    """A ring in use by several threads.

    Args:
      device: where rows lie.
    """

    def __init__(self, config: Config, state: RingState, device: jax.Device):
        self._config = config
        # Two locks, held briefly, the first before the second: of rows (and who may write them), and of priorities and counts.
        # Draws take neither: at worst they see a priority that has just changed.
        self._rows_lock, self._host_lock = threading.Lock(), threading.Lock()
        self._rows = make_rows(state.storage, device)
        self._priority = np.array(state.priority, order="C")
        self._max_priority = float(state.max_priority)
        self._count = np.array(state.count, np.int64)
        self._begun = self._count.copy()  # rows whose writing has begun
        self._generation = [0] * len(self._count)
        self._length, self._num_envs = len(self._priority), config.runtime.num_envs
        self._slots = self._priority.reshape(-1, self._num_envs)  # [C W, E], the same memory: a row of a worker is a slot
        self._row_priority = self._slots.sum(-1).reshape(self._length, -1)  # [C, W]
        self.row_bytes = sum(x.nbytes // self._length for x in jax.tree.leaves(state.storage)) // len(self._count)

    @property
    def count(self) -> np.ndarray:
        """[W] int64, rows that each worker has ever written."""
        return self._count.copy()

    def begin(self, worker: int) -> int:
        """A worker starts over with fresh environments; returns what its rows must be signed with.

        Episodes that its predecessor left unfinished are cut: their values bootstrap, and no sequence runs on into the next.
        """
        with self._rows_lock:
            self._generation[worker] += 1
            if self._count[worker]:
                last = int((self._count[worker] - 1) % self._length)
                self._rows.cut(last, worker * self._num_envs, self._num_envs)
            return self._generation[worker]

    def write(self, worker: int, generation: int, row: Transition, commit: Callable[[], None]) -> None:
        """Adds ``row`` (leaves [E, ...]) at the largest priority ever given. Raises Replaced.

        ``commit`` is called once the row counts, before anyone else can write.
        """
        column = worker * self._num_envs
        with self._rows_lock:
            if generation != self._generation[worker]:
                raise Replaced
            cursor = int(self._count[worker] % self._length)
            self._begun[worker] = self._count[worker] + 1
            self._rows.write(row, cursor, column)
            with self._host_lock:
                self._count[worker] += 1  # before its priority: to a draw meanwhile it is one of the newest, where none starts
                self._priority[cursor, column : column + self._num_envs] = self._max_priority
                self._row_priority[cursor, worker] = self._max_priority * self._num_envs
            commit()

    def nowhere(self, batch_size: int) -> Start:
        """Starts that can be read, whatever has been written."""
        return Start(np.zeros(batch_size, np.int64), np.zeros(batch_size, np.int32), np.ones(batch_size, np.float32))

    def sample(self, rng: np.random.Generator, batch_size: int) -> Start:
        """Starts of sequences that exist, as likely as :func:`muzerox.replay.sample` draws them, and in the same order.

        Uniform draws are stratified here too. Some worker must have written ``Config.sequence_length`` rows.
        """
        config, num_envs = self._config.replay, self._num_envs
        count, mass = self._eligible()
        if config.kind == "uniform":
            mass = (mass > 0).astype(np.float64) * num_envs
        cumulative = np.cumsum(mass.reshape(-1))
        total = cumulative[-1]
        point = ((rng.integers(batch_size) + spread(batch_size)) % batch_size + rng.random(batch_size)) / batch_size * total
        point = np.minimum(point, np.nextafter(total, 0.0))  # rounding can carry the last one to the end, where no slot is
        slot = np.searchsorted(cumulative, point, side="right")
        ring_row, worker = np.divmod(slot, mass.shape[1])
        last = count[worker] - 1
        row = last - (last - ring_row) % self._length  # the newest in the slot, counted from the worker's first
        if config.kind == "uniform":
            env = rng.integers(0, num_envs, batch_size)
            return Start(row, (worker * num_envs + env).astype(np.int32), np.ones(batch_size, np.float32))
        priority = self._slots[slot]  # [B, E]
        inner = np.cumsum(priority, axis=1, dtype=np.float64)
        rest = point - (cumulative[slot] - mass.reshape(-1)[slot])
        env = np.minimum((inner <= rest[:, None]).sum(1), num_envs - 1)
        probability = priority[np.arange(batch_size), env] / total
        starts = np.maximum(np.minimum(count, self._length) - self._config.sequence_length + 1, 0).sum() * num_envs
        weight = (probability * starts) ** -config.importance_exponent
        importance = (weight / weight.max()).astype(np.float32)
        return Start(row, (worker * num_envs + env).astype(np.int32), importance)

    def _eligible(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows each worker has written, int64 [W], and each slot's priority, float64 [C, W], 0 where no sequence can start."""
        mass = self._row_priority.astype(np.float64)  # 0 where nothing was ever written
        count = self._count.copy()  # after the priorities: see write
        for worker, written in enumerate(count):  # from the newest rows on, a sequence would not be whole
            newest = np.arange(max(written - self._config.sequence_length + 1, 0), written)
            mass[newest % self._length, worker] = 0.0
        return count, mass

    def read(self, start: Start, gather: Callable[[Transition, Sample], Any]) -> tuple[Start, Any, int]:
        """``gather(storage, sample)`` of the sequences at ``start``.

        Returns:
          The starts really read, what was gathered, and how many had been overwritten since they were drawn: those are moved to
          the oldest sequence their environment still has.
        """
        late = 0
        while True:
            # Rows that are written in place are read without the lock, which would hold self-play up.
            with contextlib.nullcontext() if self._rows.in_place else self._rows_lock:
                start, moved = self._still_there(start)
                late += moved
                row: Any = (start.row % self._length).astype(np.int32)  # NumPy: the program takes it as it is
                column: Any = start.column
                importance: Any = start.importance
                sample = Sample(row, column, importance)
                gathered = self._rows.read(lambda storage: gather(storage, sample))  # noqa: B023, called at once
            if not self._rows.in_place or self._still_there(start)[1] == 0:
                return start, gathered, late

    def _still_there(self, start: Start) -> tuple[Start, int]:
        """``start`` without rows that are overwritten, or just being so, and how many of those there were."""
        oldest = np.maximum(self._begun[start.column // self._num_envs] - self._length, 0)
        late = int((start.row < oldest).sum())
        return (start._replace(row=np.maximum(start.row, oldest)) if late else start), late

    def update_priority(self, start: Start, error: np.ndarray) -> None:
        """Sets priorities from ``error`` [B] float32, absolute value errors; of rows overwritten since, nothing is set."""
        if self._config.replay.kind == "uniform":
            return
        raised = ((np.abs(error) + SMALLEST_PRIORITY) ** self._config.replay.priority_exponent).astype(np.float32)
        # Of a start drawn twice the larger is written last, and stays.
        order = np.argsort(raised, kind="stable")
        row, column, raised = start.row[order], start.column[order], raised[order]
        worker = column // self._num_envs
        with self._host_lock:
            there = row >= self._count[worker] - self._length
            ring_row, column, worker, raised = row[there] % self._length, column[there], worker[there], raised[there]
            if not len(raised):
                return
            self._priority[ring_row, column] = raised
            self._row_priority[ring_row, worker] = self._slots[ring_row * len(self._count) + worker].sum(1)
            self._max_priority = max(self._max_priority, float(raised[-1]))

    def snapshot(self) -> RingState:
        """A copy on the host."""
        with self._rows_lock, self._host_lock:
            return RingState(
                storage=self._rows.copy(),
                priority=self._priority.copy(),
                max_priority=np.float32(self._max_priority),
                count=self._count.astype(np.int32),
            )
