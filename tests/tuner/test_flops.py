"""What networks cost, counted from their traces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from muzerox.networks.layers import relu
from tuner.bridge import Config, concrete
from tuner.measuring.flops import count_cost
from tuner.measuring.workload import describe


def test_costs_are_counted_from_the_trace() -> None:
    params = {"a": jnp.zeros((8, 16)), "b": jnp.zeros((3, 3, 4, 5)), "unused": jnp.zeros(100)}

    def function(params: dict[str, jax.Array], x: jax.Array, image: jax.Array) -> jax.Array:
        y = jax.jit(lambda z: z @ params["a"])(x)
        image = jax.lax.conv_general_dilated(image, params["b"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        looped = jax.lax.scan(lambda c, _: (c @ jnp.eye(16), None), y, length=3)[0]
        return looped.sum() + image.sum()

    cost = count_cost(function, params, jax.ShapeDtypeStruct((2, 8), "float32"), jax.ShapeDtypeStruct((1, 6, 7, 4), "float32"))
    assert cost.flops == 2 * 2 * 8 * 16 + 2 * 6 * 7 * 9 * 4 * 5 + 3 * 2 * 2 * 16 * 16
    assert cost.params == 8 * 16 + 9 * 4 * 5
    assert cost.layers == 5


def test_elements_are_those_that_are_written_or_reduced_and_moved_ones_are_counted_apart() -> None:
    params = {"a": jnp.zeros((8, 16))}

    def function(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y = jax.nn.relu(x @ params["a"])  # 2 x 16 each
        y = jnp.pad(y.reshape(2, 4, 4), ((0, 0), (1, 1), (0, 0)))  # 2 x 6 x 4
        return y.astype(jnp.bfloat16).sum(axis=(1, 2), dtype=jnp.bfloat16)  # of 48

    cost = count_cost(function, params, jax.ShapeDtypeStruct((2, 8), "float32"))
    assert cost.moved == 48
    assert cost.elements == 32 + 32 + 48


def test_what_is_read_in_parts_or_compared_counts_once() -> None:
    """However a rectifier or a minimum is written: halves that are computed with are read where they lie."""

    def function(_: Any, x: jax.Array) -> jax.Array:
        y = relu(x)  # 2 x 8
        halves = jnp.where(y[:, :4] <= y[:, 4:], y[:, :4], y[:, 4:])  # 2 x 4
        return jnp.min(halves, axis=1)  # of 2 x 4

    cost = count_cost(function, {}, jax.ShapeDtypeStruct((2, 8), "float32"))
    assert (cost.elements, cost.moved) == (32, 0)
    apart = count_cost(lambda _, x: jnp.concatenate([x[:, 4:], x[:, :4]]), {}, jax.ShapeDtypeStruct((2, 8), "float32"))
    assert apart.moved == 16 + 16
    assert count_cost(lambda _, x: x[:, 4:], {}, jax.ShapeDtypeStruct((2, 8), "float32")).moved == 8


def test_elements_of_a_row_do_not_count_what_is_done_to_parameters() -> None:
    """In 16 bits parameters are made narrower, once for all rows."""
    costs = {}
    for level in ("O0", "O1"):
        config = concrete(Config.preset("gymnax:CartPole-v1").replace({"precision.level": level, "network.width": 64}), "cpu")
        workload = describe(config)
        costs[level] = workload.represent_elements, workload.dynamics_elements, workload.predict_elements
        assert workload.represent_elements < workload.represent_params
    assert costs["O1"] == pytest.approx(costs["O0"], rel=0.05)
