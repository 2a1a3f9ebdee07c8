"""Where the rows of a ring lie: on an accelerator, or in the host's memory, which is written in place."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from muzerox.types import Transition


class Rows(Protocol):
    """Storage of a ring. Whoever writes holds the ring's lock."""

    in_place: bool  # a row is written over while others read: they must look afterwards whether what they read is still there

    def write(self, row: Transition, cursor: int, column: int) -> None:
        """Sets ``row`` (leaves [E, ...]) at a row and from a column on."""

    def cut(self, cursor: int, column: int, num_envs: int) -> None:
        """Ends the episodes that go on at a row of ``num_envs`` columns."""

    def read(self, gather: Callable[[Transition], Any]) -> Any:
        """``gather(storage)``."""

    def copy(self) -> Transition:
        """Everything, in NumPy arrays of its own."""


def make_rows(storage: Transition, device: jax.Device) -> Rows:
    """Rows on ``device``, at first those of ``storage`` (leaves [C, W E, ...]), which nobody may use any more."""
    return HostRows(storage, device) if device.platform == "cpu" else DeviceRows(storage, device)


class DeviceRows:
    """Rows that programs of an accelerator write and read, one after the other."""

    in_place = False

    def __init__(self, storage: Transition, device: jax.Device):
        self._storage: Transition = jax.device_put(storage, device)

    def write(self, row: Transition, cursor: int, column: int) -> None:
        """See Rows."""
        self._storage = _write(self._storage, row, np.int32(cursor), np.int32(column))

    def cut(self, cursor: int, column: int, num_envs: int) -> None:
        """See Rows."""
        columns = np.arange(num_envs, dtype=np.int32) + np.int32(column)
        truncated = _cut(self._storage.truncated, self._storage.terminated, np.int32(cursor), columns)
        self._storage = self._storage.replace(truncated=truncated)

    def read(self, gather: Callable[[Transition], Any]) -> Any:
        """See Rows; does not wait for the program."""
        return gather(self._storage)

    def copy(self) -> Transition:
        """See Rows."""
        return jax.tree.map(np.asarray, self._storage)  # a copy already: they lie on an accelerator


@functools.partial(jax.jit, donate_argnums=0)
def _write(storage: Transition, row: Transition, cursor: jax.Array, column: jax.Array) -> Transition:
    def write(ring: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(ring, new[None].astype(ring.dtype), (cursor, column) + (0,) * (ring.ndim - 2))

    return jax.tree.map(write, storage, row)


@functools.partial(jax.jit, donate_argnums=0)
def _cut(truncated: jax.Array, terminated: jax.Array, cursor: jax.Array, columns: jax.Array) -> jax.Array:
    return truncated.at[cursor, columns].set(~terminated[cursor, columns])


class HostRows:
    """Rows in the host's memory: NumPy writes them, which calls no program, and programs of the CPU read them where they lie."""

    in_place = True

    def __init__(self, storage: Transition, device: jax.Device):
        # Memory that came from NumPy may still be somebody's: programs share it. What programs made is this ring's alone.
        owned = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.array(x), storage)
        self._storage: Transition = jax.block_until_ready(jax.device_put(owned, device))
        self._memory: Transition = jax.tree.map(_memory, self._storage)
        self._leaves: list[np.ndarray] = jax.tree.leaves(self._memory)

    def write(self, row: Transition, cursor: int, column: int) -> None:
        """See Rows."""
        for ring, new in zip(self._leaves, jax.tree.leaves(row), strict=True):
            ring[cursor, column : column + len(new)] = new

    def cut(self, cursor: int, column: int, num_envs: int) -> None:
        """See Rows."""
        at = cursor, slice(column, column + num_envs)
        self._memory.truncated[at] = ~np.asarray(self._memory.terminated[at])

    def read(self, gather: Callable[[Transition], Any]) -> Any:
        """See Rows; NumPy arrays, done when they are returned."""
        return jax.tree.map(np.asarray, gather(self._storage))

    def copy(self) -> Transition:
        """See Rows."""
        return jax.tree.map(np.array, self._memory)


def _memory(x: jax.Array) -> np.ndarray:
    """The memory of an array of the CPU, to be written; it lives as long as ``x`` does."""
    taken: Any = (ctypes.c_uint8 * x.nbytes).from_address(x.unsafe_buffer_pointer())
    return np.frombuffer(taken, x.dtype).reshape(x.shape)
