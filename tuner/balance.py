"""The resource balance factor of a run, and what it says to do in the next round. Pure and vectorised.

Step 2.5 of the method. B is the mean over resources of allocated / demand, the demand being what the run was measured to
use, with headroom, were nothing limited. B > 1 + d: over-allocated, CPU and memory are reduced first. B < 1 - d: starved,
the accelerator is increased first, or what is the bottleneck.
"""

from __future__ import annotations

import enum

import jax.numpy as jnp
from jax.typing import ArrayLike

THRESHOLD = 0.25  # d
DEVICE = 2  # column of the accelerator in ``allocate.RESOURCES``; the columns before are CPU and memory


class Verdict(enum.StrEnum):
    """What a balance factor means."""

    OVER = "over-allocated"
    BALANCED = "balanced"
    STARVED = "starved"


def balance_factor(allocated: ArrayLike, wanted: ArrayLike) -> jnp.ndarray:
    """B, float32 [...]: the mean of allocated / demand over the resources [..., R] that are wanted at all (demand > 0)."""
    allocated, wanted = jnp.asarray(allocated, jnp.float32), jnp.asarray(wanted, jnp.float32)
    counts = wanted > 0
    ratio = jnp.where(counts, allocated / jnp.where(counts, wanted, 1.0), 0.0)
    return jnp.sum(ratio, axis=-1) / jnp.maximum(jnp.sum(counts, axis=-1), 1)


def verdict(factor: float, threshold: float = THRESHOLD) -> Verdict:
    """The verdict on one balance factor."""
    if factor > 1.0 + threshold:
        return Verdict.OVER
    return Verdict.STARVED if factor < 1.0 - threshold else Verdict.BALANCED


def rebalance(allocated: ArrayLike, wanted: ArrayLike, threshold: float = THRESHOLD) -> jnp.ndarray:
    """The next round's allocation before it is clamped, float32 [..., R].

    Over-allocated: CPU and memory go down to their demand; the accelerator only when that alone leaves B above the
    threshold. Starved: the accelerator goes up to its demand; where it has none or has enough, the bottleneck (the resource
    with the least allocated / demand) does. Balanced: nothing changes.
    """
    allocated, wanted = jnp.asarray(allocated, jnp.float32), jnp.asarray(wanted, jnp.float32)
    factor = balance_factor(allocated, wanted)[..., None]
    column = jnp.arange(allocated.shape[-1])
    is_device = jnp.broadcast_to(column == DEVICE, allocated.shape)

    lower = jnp.where(is_device, allocated, jnp.minimum(allocated, wanted))
    still_over = balance_factor(lower, wanted)[..., None] > 1.0 + threshold
    lower = jnp.where(still_over, jnp.minimum(allocated, wanted), lower)

    ratio = jnp.where(wanted > 0, allocated / jnp.where(wanted > 0, wanted, 1.0), jnp.inf)
    is_bottleneck = jnp.broadcast_to(column, allocated.shape) == jnp.argmin(ratio, axis=-1, keepdims=True)
    device_short = jnp.any(is_device & (ratio < 1.0), axis=-1, keepdims=True)
    raised = jnp.where(device_short, is_device, is_bottleneck)
    upper = jnp.where(raised, jnp.maximum(allocated, wanted), allocated)

    return jnp.where(factor > 1.0 + threshold, lower, jnp.where(factor < 1.0 - threshold, upper, allocated))
