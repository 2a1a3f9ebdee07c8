"""Signed-hyperbolic value transform and two-hot categorical encoding.

The transform is from Pohlen et al., Observe and Look Further (arXiv:1805.11593); the categorical representation of
values and rewards is from MuZero (Schrittwieser et al., arXiv:1911.08265, appendix F).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

EPSILON = 1e-3
_ROUNDING = 1e-3  # of what lies at the bound itself: a value that was decoded, and is encoded again


def signed_hyperbolic(x: jax.Array) -> jax.Array:
    """sign(x) (sqrt(|x| + 1) - 1) + 0.001 x, elementwise, float32."""
    # sqrt(|x| + 1) - 1 = |x| / (sqrt(|x| + 1) + 1): the difference would lose small x to rounding in float32.
    return x / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + EPSILON * x


def signed_parabolic(x: jax.Array) -> jax.Array:
    """The inverse of :func:`signed_hyperbolic`, elementwise, float32."""
    # The root u of e u^2 + u = |x| + 1 + e, then u^2 - 1 = (u - 1)(u + 1) with u - 1 written so that float32 does not
    # cancel near 0.
    a = jnp.abs(x)
    root = jnp.sqrt(1.0 + 4.0 * EPSILON * (a + 1.0 + EPSILON))
    u = 2.0 * (a + 1.0 + EPSILON) / (root + 1.0)
    return jnp.sign(x) * (2.0 * a / (root + 1.0 + 2.0 * EPSILON)) * (u + 1.0)


def make_support(bound: float, num_bins: int) -> np.ndarray:
    """[num_bins] float32: evenly spaced in transformed space, from -h(bound) to h(bound)."""
    edge = _edge(bound)
    return np.linspace(-edge, edge, num_bins, dtype=np.float32)


def _along_bins(x: np.ndarray, ndim: int) -> np.ndarray:
    """[num_bins] with ``ndim`` axes before."""
    return x.reshape((1,) * ndim + (-1,))


def _edge(bound: float) -> float:
    """h(bound), known when a program is compiled."""
    return bound / (math.sqrt(bound + 1.0) + 1.0) + EPSILON * bound


def two_hot(x: jax.Array, bound: float, num_bins: int) -> jax.Array:
    """Scalars [...] to distributions [..., num_bins] over the two nearest bins; clipped to the bound."""
    edge = _edge(bound)
    position = (jnp.clip(signed_hyperbolic(x.astype(jnp.float32)), -edge, edge) + edge) / (2.0 * edge) * (num_bins - 1)
    # A hat function a bin: 1 at the bin, 0 one bin away, linear between.
    distance = jnp.abs(jnp.expand_dims(position, -1) - _along_bins(np.arange(num_bins, dtype=np.float32), x.ndim))
    return jnp.maximum(0.0, 1.0 - distance)


def share_clipped(x: jax.Array, mask: jax.Array, bound: float) -> jax.Array:
    """[] float32: the share of the scalars where ``mask`` (same shape) is 1 that :func:`two_hot` clips, but for rounding."""
    clipped = jnp.abs(x) > bound * (1.0 + _ROUNDING)
    return jnp.sum(clipped * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def expected_value(logits: jax.Array, bound: float) -> jax.Array:
    """Logits [..., num_bins] to scalars [...] float32: the inverse transform of the mean over the support."""
    support = make_support(bound, logits.shape[-1])
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    return signed_parabolic(jnp.sum(probabilities * _along_bins(support, logits.ndim - 1), axis=-1))
