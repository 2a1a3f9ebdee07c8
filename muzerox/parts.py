"""Rows a few at a time, one part after the other: what a processor makes of a part stays in its caches.

A convolution gathers the neighbours of every cell before it multiplies them. Of a batch of boards these are megabytes a layer,
which a gradient writes and reads again; of a few boards they never leave the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from muzerox.allocation import available_cores

# Of neighbours: what was fastest, or within 15% of it, for five convolutional networks (docs/search.md); a core's cache of the
# second level has 1 to 2 MiB.
_CACHED_BYTES = 1 << 20


def split_rows(tree: Any, parts: int) -> Any:
    """Leaves [B, ...] as [parts, B / parts, ...]."""
    return jax.tree.map(lambda x: x.reshape((parts, -1, *x.shape[1:])), tree)


def join_rows(tree: Any) -> Any:
    """Leaves [parts, B / parts, ...] as [B, ...]."""
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), tree)


def cached_rows(row_bytes: int) -> int:
    """Rows of which a core's cache holds an array of ``row_bytes`` each, one at the least; 0 where rows have none (0)."""
    return max(1, _CACHED_BYTES // row_bytes) if row_bytes else 0


def rows_at_once(count: int, row_bytes: int) -> int:
    """How many of ``count`` rows to take at once where each makes an array of ``row_bytes``: ``count``, halved while it is even
    and too large for a core's cache. All of them where rows are small (0), and on devices of several cores or none: what goes
    one after the other is not shared, which costs a training more than it gains.
    """
    most = cached_rows(row_bytes)
    if not most or jax.default_backend() != "cpu" or len(available_cores()) > jax.local_device_count():
        return count
    while count > most and count % 2 == 0:
        count //= 2
    return count


def by_parts(row_bytes: int, function: Callable[[Any], Any], rows: Any) -> Any:
    """``function(rows) -> rows`` of so many at once as :func:`rows_at_once` says; leaves [B, ...]."""
    count = jax.tree.leaves(rows)[0].shape[0]
    parts = count // rows_at_once(count, row_bytes)
    return function(rows) if parts == 1 else join_rows(jax.lax.map(function, split_rows(rows, parts)))


def averaged_over_parts(row_bytes: int, function: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """``function(whole, rows) -> (means, rows)`` of so many rows at once as :func:`rows_at_once` says; leaves [B, ...].

    What are means over rows are averaged over parts, which have as many rows each: what it says does not change, but for the
    order in which numbers are added.
    """

    def averaged(whole: Any, rows: Any) -> tuple[Any, Any]:
        count = jax.tree.leaves(rows)[0].shape[0]
        parts = count // rows_at_once(count, row_bytes)
        if parts == 1:
            return function(whole, rows)

        def add(total: Any, part: Any) -> tuple[Any, Any]:
            means, each = function(whole, part)
            return jax.tree.map(lambda a, b: a + b / parts, total, means), each

        split = split_rows(rows, parts)
        means = jax.eval_shape(function, whole, jax.tree.map(lambda x: x[0], split))[0]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), means)
        means, each = jax.lax.scan(add, zeros, split)
        return means, join_rows(each)

    return averaged
