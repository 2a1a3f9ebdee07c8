"""The signed-hyperbolic transform and the two-hot encoding against float64 NumPy."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muzerox.transforms import expected_value, make_support, share_clipped, signed_hyperbolic, signed_parabolic, two_hot

SHAPES = [(1.0, 21), (100.0, 21), (30.0, 2), (1e4, 601)]  # (bound, bins)
finite = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def reference_h(x: float) -> float:
    """The transform in float64."""
    size = abs(x) / (math.sqrt(abs(x) + 1.0) + 1.0)  # sqrt(|x| + 1) - 1 without its cancellation
    return math.copysign(size, x) + 1e-3 * x


def reference_inverse(y: float) -> float:
    """The x with h(x) = y, by bisection: no formula to get wrong."""
    low, high = 0.0, 1e12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if reference_h(middle) < abs(y) else (low, middle)
    return math.copysign(high, y)


jit_h, jit_inverse = jax.jit(signed_hyperbolic), jax.jit(signed_parabolic)


@settings(max_examples=300)
@given(st.lists(finite, min_size=16, max_size=16))
def test_transform_and_inverse_in_float32(values: list[float]) -> None:
    x = np.array(values, np.float32)
    y = np.asarray(jit_h(x))
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, [reference_h(float(v)) for v in x], rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(np.asarray(jit_inverse(y)), x, rtol=2e-6, atol=1e-37)


def test_inverse_over_the_whole_range() -> None:
    sizes = np.concatenate([[0.0], np.geomspace(1e-30, 1e6, 40_001)])
    x = np.concatenate([-sizes[::-1], sizes]).astype(np.float32)
    back = np.asarray(jit_inverse(jit_h(x)))
    np.testing.assert_allclose(back, x, rtol=2e-6, atol=1e-37)
    assert (np.diff(np.asarray(jit_h(x))) >= 0).all()
    assert back[np.flatnonzero(x == 0.0)].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("y", [0.0, 1e-4, -0.3, 1.0, 17.5, -900.0, 1999.0])
def test_inverse_is_where_bisection_finds_it(y: float) -> None:
    np.testing.assert_allclose(
        float(signed_parabolic(jnp.float32(y))), reference_inverse(float(np.float32(y))), rtol=2e-6, atol=1e-37
    )


def test_gradients_are_finite_at_zero() -> None:
    assert float(jax.grad(signed_hyperbolic)(1e-30)) == pytest.approx(0.501, rel=1e-5)
    assert np.isfinite(jax.grad(signed_parabolic)(0.0))


@pytest.mark.parametrize(("bound", "bins"), SHAPES)
def test_support(bound: float, bins: int) -> None:
    edge = reference_h(bound)
    support = np.asarray(make_support(bound, bins))
    np.testing.assert_allclose(support, [-edge + 2 * edge * i / (bins - 1) for i in range(bins)], rtol=1e-5, atol=1e-5 * edge)


@pytest.mark.parametrize(("bound", "bins"), SHAPES)
@settings(max_examples=60)
@given(st.lists(st.floats(-1.0, 1.0, width=32, allow_subnormal=False), min_size=8, max_size=8))
def test_two_hot(bound: float, bins: int, shares: list[float]) -> None:
    x = (np.array(shares) * bound).astype(np.float32).reshape(2, 4)
    weights = np.asarray(two_hot(jnp.asarray(x), bound, bins))
    assert weights.shape == (2, 4, bins)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    edge = reference_h(bound)
    for index in np.ndindex(x.shape):
        nonzero = np.flatnonzero(weights[index])
        assert 1 <= len(nonzero) <= 2
        assert nonzero[-1] - nonzero[0] <= 1
        assert (weights[index] >= 0).all()
        # The expectation over the support, inverted, is the scalar again, to the rounding of a position among the bins.
        mean = sum(float(w) * (-edge + 2 * edge * i / (bins - 1)) for i, w in enumerate(weights[index]))
        assert abs(mean - reference_h(float(x[index]))) <= 1e-6 * edge
        step = 1e-6 * edge * (2 * math.sqrt(abs(float(x[index])) + 1))  # how far that error moves the inverse
        assert abs(reference_inverse(mean) - float(x[index])) <= 2 * step + 1e-12


def test_the_share_that_is_clipped() -> None:
    x, bound = np.array([-301.0, -300.0, 0.0, 300.0, 3000.0, np.nan], np.float32), 300.0
    mask = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    assert share_clipped(jnp.asarray(x), jnp.asarray(mask), bound) == pytest.approx(2 / 5)
    assert share_clipped(jnp.asarray(x), jnp.zeros(6), bound) == 0.0
    # What was decoded lies within, however it was rounded.
    decoded = expected_value(1e3 * two_hot(jnp.array([-bound, bound]), bound, 21), bound)
    assert share_clipped(decoded, jnp.ones(2), bound) == 0.0


@pytest.mark.parametrize(("bound", "bins"), SHAPES)
def test_two_hot_clips(bound: float, bins: int) -> None:
    weights = np.asarray(two_hot(jnp.array([-1e9, -bound, bound, 1e9], jnp.float32), bound, bins))
    expected = np.zeros((4, bins), np.float32)
    expected[:2, 0] = expected[2:, -1] = 1.0
    np.testing.assert_allclose(weights, expected, atol=1e-4 if bins > 100 else 1e-5)


@pytest.mark.parametrize(("bound", "bins"), SHAPES)
def test_expected_value(bound: float, bins: int) -> None:
    logits = np.random.default_rng(0).normal(size=(3, 5, bins)).astype(np.float32) * 3
    value = np.asarray(expected_value(jnp.asarray(logits), bound))
    assert value.dtype == np.float32
    edge = reference_h(bound)
    for index in np.ndindex(3, 5):
        odds = [math.exp(v) for v in logits[index].astype(float)]
        mean = sum(p / sum(odds) * (-edge + 2 * edge * i / (bins - 1)) for i, p in enumerate(odds))
        np.testing.assert_allclose(value[index], reference_inverse(mean), rtol=1e-3, atol=1e-5 * edge)


def test_expected_value_computes_in_float32_whatever_it_is_given() -> None:
    logits = jnp.log(jnp.maximum(two_hot(jnp.array([37.0]), 100.0, 21), 1e-30))
    assert float(expected_value(logits, 100.0)[0]) == pytest.approx(37.0, rel=1e-5)
    assert expected_value(logits.astype(jnp.bfloat16), 100.0).dtype == jnp.float32
