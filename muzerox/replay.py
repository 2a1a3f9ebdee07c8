"""A prioritized ring of environment rows on the device, as pure functions.

A row holds one transition of every environment; a sample is a start (row, environment) from which consecutive rows
can be read. Everything is fixed-shape and lives where the state lives: nothing is copied when a row is added to a
donated state. Prioritized experience replay: Schaul et al., arXiv:1511.05952.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.experimental import compute_on as experimental

from muzerox.config import ReplayConfig
from muzerox.types import Transition

# Of two functions jax 0.11 keeps the second, by the name of the first.
compute_on: Callable[..., Any] = getattr(experimental, "compute_on2", experimental.compute_on)

SMALLEST_PRIORITY = 1e-3  # keeps every transition reachable


class ReplayState(struct.PyTreeNode):
    """The ring. ``row_priority`` is ``priority.sum(1)``, kept up to date so that sampling reads C sums, not C x E."""

    storage: Transition  # leaves [C, E, ...]
    priority: jax.Array  # [C, E] float32, already raised to the priority exponent
    row_priority: jax.Array  # [C] float32
    max_priority: jax.Array  # [] float32, the largest priority ever given, raised
    cursor: jax.Array  # [] int32, the row written next
    filled: jax.Array  # [] int32, rows written, at most C


class Sample(NamedTuple):
    """Starts of sequences and their importance weights."""

    row: jax.Array  # [B] int32
    env: jax.Array  # [B] int32
    importance: jax.Array  # [B] float32, largest 1


def init(config: ReplayConfig, example: Transition) -> ReplayState:
    """An empty ring of ``capacity // E`` rows shaped like ``example``, a row with leaves [E, ...]."""
    num_envs = example.action.shape[0]
    rows = config.capacity // num_envs
    storage = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), example)
    return ReplayState(
        storage=storage,
        priority=jnp.zeros((rows, num_envs), jnp.float32),
        row_priority=jnp.zeros(rows, jnp.float32),
        max_priority=jnp.float32(1.0),
        cursor=jnp.int32(0),
        filled=jnp.int32(0),
    )


def add(state: ReplayState, row: Transition) -> ReplayState:
    """The ring with ``row`` (leaves [E, ...]) in place of the oldest, at the largest priority given so far."""
    rows, num_envs = state.priority.shape
    fresh = jnp.full((num_envs,), state.max_priority)
    return state.replace(
        storage=jax.tree.map(lambda ring, x: _where_it_lies(_write, ring, state.cursor, x), state.storage, row),
        priority=state.priority.at[state.cursor].set(fresh),
        row_priority=state.row_priority.at[state.cursor].set(state.max_priority * num_envs),
        cursor=(state.cursor + 1) % rows,
        filled=jnp.minimum(state.filled + 1, rows),
    )


@functools.cache
def spread(size: int) -> np.ndarray:
    """Each of ``size`` shares once, int32 [size], by golden section: those of any few places in a row are evenly spread.

    In the order in which they lie in the ring, who takes a part of every batch, as reanalysis does, would always get the same end
    of it. Begun at a random share, all are as often at each place; to sort random numbers takes longer, and spreads less evenly.
    """
    section = (math.sqrt(5.0) - 1.0) / 2.0
    return np.argsort(np.argsort(np.arange(size) * section % 1.0)).astype(np.int32)


def sample(config: ReplayConfig, key: jax.Array, state: ReplayState, batch_size: int, length: int) -> Sample:
    """``batch_size`` starts, with replacement, from which ``length`` consecutive rows exist.

    Prioritized draws are stratified: one from each of ``batch_size`` equal shares of the total priority, in an order that spreads
    any part of a batch over the whole ring (see :func:`spread`). The caller makes sure that at least ``length`` rows are filled.
    """
    rows, num_envs = state.priority.shape
    oldest = jnp.where(state.filled == rows, state.cursor, 0)
    starts = state.filled - length + 1  # rows that can start a sequence, counted from the oldest
    if config.kind == "uniform":
        key_row, key_env = jax.random.split(key)
        row = (oldest + jax.random.randint(key_row, (batch_size,), 0, starts)) % rows
        env = jax.random.randint(key_env, (batch_size,), 0, num_envs)
        return Sample(row, env, jnp.ones(batch_size, jnp.float32))

    age = (jnp.arange(rows) - oldest) % rows
    mass = jnp.where(age < starts, state.row_priority, 0.0)
    cumulative = jnp.cumsum(mass)
    total = cumulative[-1]
    drawn = jax.random.uniform(key, (batch_size + 1,))
    first = (drawn[-1] * batch_size).astype(jnp.int32)
    point = ((first + spread(batch_size)) % batch_size + drawn[:-1]) / batch_size * total
    row = jnp.searchsorted(cumulative, point, side="right").astype(jnp.int32)
    # Rounding can carry the last point past the end: the newest row that can start a sequence is its neighbour.
    newest = (oldest + starts - 1) % rows
    row = jnp.where((row < rows) & (age[jnp.minimum(row, rows - 1)] < starts), jnp.minimum(row, rows - 1), newest)
    inner = jnp.cumsum(state.priority[row], axis=1)  # [B, E]
    rest = point - (cumulative[row] - mass[row])
    env = jnp.minimum(jnp.sum(inner <= rest[:, None], axis=1), num_envs - 1).astype(jnp.int32)
    probability = state.priority[row, env] / total
    weight = (probability * (starts * num_envs)) ** -config.importance_exponent
    return Sample(row, env, weight / jnp.max(weight))


def read(tree: Any, start: Sample, offsets: jax.Array) -> Any:
    """Leaves [C, E, ...] at rows ``start.row + offsets`` (modulo C) of the sampled environments.

    ``offsets`` is int32 [M] for the same offsets everywhere or [B, M]; returns leaves [B, M, ...].
    """
    offsets = jnp.broadcast_to(offsets.reshape((-1, offsets.shape[-1])), (start.row.shape[0], offsets.shape[-1]))

    def gather(ring: jax.Array) -> jax.Array:
        row = (start.row[:, None] + offsets) % ring.shape[0]
        found = _where_it_lies(_gather, ring, row, start.env[:, None])
        return jax.device_put(found, jax.memory.Space.Device) if _on_host(ring) else found

    return jax.tree.map(gather, tree)


def _write(ring: jax.Array, cursor: jax.Array, row: jax.Array) -> jax.Array:
    return ring.at[cursor].set(row)


def _gather(ring: jax.Array, row: jax.Array, env: jax.Array) -> jax.Array:
    return ring[row, env]


def _on_host(ring: jax.Array) -> bool:
    return jax.typeof(ring).memory_space == jax.memory.Space.Host


def _where_it_lies(function: Callable[..., jax.Array], ring: jax.Array, *args: jax.Array) -> jax.Array:
    """``function(ring, *args)``, computed by the host where ``ring`` lies in its memory: only rows cross the bus."""
    if not _on_host(ring):
        return function(ring, *args)
    host = jax.memory.Space.Host
    by_host = compute_on(jax.jit(function), compute_type="device_host", out_memory_spaces=host)
    return cast(jax.Array, by_host(ring, *jax.device_put(args, host)))


def update_priority(config: ReplayConfig, state: ReplayState, start: Sample, error: jax.Array) -> ReplayState:
    """The ring with the priorities of ``start`` set from ``error`` [B] float32, absolute value errors."""
    if config.kind == "uniform":
        return state
    raised = (jnp.abs(error) + SMALLEST_PRIORITY) ** config.priority_exponent
    # A start drawn twice takes the larger: a plain set would leave the order of writes to the device.
    index = (start.row, start.env)
    priority = state.priority.at[index].set(0.0).at[index].max(raised)
    row_priority = state.row_priority.at[start.row].set(jnp.sum(priority[start.row], axis=1))
    return state.replace(
        priority=priority, row_priority=row_priority, max_priority=jnp.maximum(state.max_priority, jnp.max(raised))
    )
