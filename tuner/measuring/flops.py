"""Counting what a JAX function costs from its trace: operations, parameters read, layers, elements of what lies between them.

XLA's own count (``cost_analysis``) counts a loop's body once, and needs a compilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core


class Cost(NamedTuple):
    """Of one call."""

    flops: float  # of matrix products and convolutions; a multiplication and an addition are two
    params: float  # elements of the first argument that are read
    layers: float  # matrix products and convolutions, which run one after the other
    elements: float  # that equations write, or read to reduce: what vector units and memory are bound by
    moved: float  # more elements, that are only put somewhere else: padded, joined, looked up


_MOVING = {"concatenate", "pad", "slice", "gather", "dynamic_slice", "dynamic_update_slice", "scatter"}
_PRODUCTS = {"dot_general", "conv_general_dilated"}
# What is no work, or part of what reads it.
_FREE = {
    *("reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "iota", "copy"),
    *("stop_gradient", "optimization_barrier", "convert_element_type"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
}


def count_cost(function: Callable[..., Any], params: Any, *args: Any) -> Cost:
    """The cost of ``function(params, *args)`` for shapes (arrays or jax.ShapeDtypeStruct). Nothing is computed."""
    closed = jax.make_jaxpr(function)(params, *args)
    leaves = closed.jaxpr.invars[: len(jax.tree.leaves(params))]
    used = {id(var) for eqn in closed.jaxpr.eqns for var in eqn.invars}
    equations = list(_equations(closed.jaxpr))
    products = [_product_flops(eqn) for eqn in equations]
    return Cost(
        flops=float(sum(products)),
        params=float(sum(math.prod(var.aval.shape) for var in leaves if id(var) in used)),
        layers=float(sum(flops > 0 for flops in products)),
        elements=float(sum(_elements(eqn) for eqn in equations if eqn.primitive.name not in _MOVING)),
        moved=float(sum(_elements(eqn) for eqn in equations if eqn.primitive.name in _MOVING)),
    )


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation that is work, those of inner functions too, as often as they run where the trace says how often.

    A slice that is only computed with is read where it lies.
    """
    moved = {id(var) for eqn in jaxpr.eqns if eqn.primitive.name in _MOVING | _PRODUCTS for var in eqn.invars}
    moved |= {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "slice" and id(eqn.outvars[0]) not in moved:
            continue
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = [value for value in eqn.params.values() if isinstance(value, core.Jaxpr | core.ClosedJaxpr)]
        if not inner:
            yield eqn
        for value in inner[:1]:  # a custom derivative names its rules too, which a forward call does not run
            for _ in range(times):
                yield from _equations(value.jaxpr if isinstance(value, core.ClosedJaxpr) else value)


def _elements(eqn: Any) -> int:
    if eqn.primitive.name in _FREE:
        return 0
    reduces = eqn.primitive.name.startswith(("reduce_", "arg"))
    return sum(math.prod(var.aval.shape) for var in (eqn.invars if reduces else eqn.outvars))


def _product_flops(eqn: Any) -> int:
    out = math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else 0
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * out * math.prod(kernel) // features
    return 0
