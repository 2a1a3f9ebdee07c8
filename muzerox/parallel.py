"""Data parallelism: what every device of a mesh does with its own share of the rows, written as such (``jax.shard_map``).

Left to itself, XLA splits rows as far as it can follow them: not into trees, where rows share an axis with nodes, nor through a
loss, where they share one with positions, nor out of what was gathered from a ring. What it cannot follow every device computes
whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from muzerox.types import Algorithm, Decision, Params

AXIS = "data"  # of a mesh: environments, replay columns and batches are split over it
_WHOLE, _ROWS = PartitionSpec(), PartitionSpec(AXIS)


def by_rows(mesh: Mesh | AbstractMesh | None, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``function(whole, rows) -> rows``, of which each device computes its share; leaves of ``rows`` are [B, ...].

    On one device, or without a mesh, the function itself.
    """
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=(_WHOLE, _ROWS), out_specs=_ROWS, check_vma=False)


def averaged(
    mesh: Mesh | AbstractMesh | None, function: Callable[[Any, Any], tuple[Any, Any]]
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """``function(whole, rows) -> (means, rows)``: as :func:`by_rows`; what are means over rows are averaged over devices."""
    if mesh is None or mesh.size == 1:
        return function

    def local(whole: Any, rows: Any) -> tuple[Any, Any]:
        means, each = function(whole, rows)
        return jax.lax.pmean(means, AXIS), each

    return jax.shard_map(local, mesh=mesh, in_specs=(_WHOLE, _ROWS), out_specs=(_WHOLE, _ROWS), check_vma=False)


def over(mesh: Mesh, algorithm: Algorithm) -> Algorithm:
    """The algorithm, whose searches and targets each device makes of its own rows; the loss is the learner's to split.

    A device searches with a key of its own, which are those of as many parts on one device (``search.split``): N devices do
    what one does in N parts. Rows that are not a multiple of the devices are filled up.
    """
    if mesh.size == 1:
        return algorithm

    def act(key: jax.Array, params: Params, observation: jax.Array, legal: jax.Array | None, explore: bool) -> Decision:
        def search(whole: Any, rows: Any) -> Decision:
            key, params = whole
            return algorithm.act(jax.random.fold_in(key, jax.lax.axis_index(AXIS)), params, *rows, explore)

        count = observation.shape[0]
        missing = -count % mesh.size
        rows = jax.tree.map(lambda x: jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1)), mode="edge"), (observation, legal))
        decision: Decision = by_rows(mesh, search)((key, params), rows)
        return jax.tree.map(lambda x: x[:count], decision)

    return algorithm._replace(act=act, targets=by_rows(mesh, algorithm.targets))
