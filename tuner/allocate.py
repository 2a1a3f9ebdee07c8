"""How much of each resource a configuration is given: min(max(minimum, demand), maximum). Pure and vectorised.

Step 2.4 of the method: the demand is a function F of the configuration (here what it is predicted to use), of the
annealing temperature (early, while candidates differ most, each is given room to show what it can do) and of the run
history (measured over predicted use so far). Resources are the last axis, in the order of ``RESOURCES``.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

RESOURCES = ("cores", "memory_bytes", "device_memory_bytes")
HEADROOM = 0.25  # over the predicted use, at the end of annealing: use comes in bursts
EXPLORATION = 0.5  # further headroom at the first temperature
# How much more memory compilation needs than training: of the host, and of the accelerator, where XLA times products.
# Of 25 random configurations on a CPU, compiled anew, one used 0.53 GiB more than was predicted, at the least.
# A CartPole training on an H100 holds 0.9 GiB of the host's where its programs are in the cache, 3.5 where it compiles them.
SAFETY_BYTES = {"cpu": 768 * 2**20, "gpu": 3 * 2**30, "tpu": 3 * 2**30}
DEVICE_SAFETY_BYTES = {"cpu": 0, "gpu": 2**30, "tpu": 2**30}


class Limits(NamedTuple):
    """What the run needs to live, and what the system has: float32 [..., R]."""

    minimum: ArrayLike
    maximum: ArrayLike


def demand(use: ArrayLike, correction: ArrayLike, temperature: ArrayLike) -> jnp.ndarray:
    """F(configuration, temperature, history): what is wanted when nothing limits it.

    Args:
      use: [..., R] predicted use of the configuration.
      correction: [R] measured over predicted use in the history; 1 without any.
      temperature: [] or [..., 1], relative to the first: 1 at the start of annealing, to 0.

    Returns:
      float32 [..., R].
    """
    room = 1.0 + HEADROOM + EXPLORATION * jnp.asarray(temperature, jnp.float32)
    return jnp.asarray(use, jnp.float32) * jnp.asarray(correction, jnp.float32) * room


def allocate(wanted: ArrayLike, limits: Limits) -> jnp.ndarray:
    """``wanted`` [..., R] kept between the limits; a minimum above the maximum yields the maximum. float32 [..., R]."""
    return jnp.minimum(jnp.maximum(jnp.asarray(wanted, jnp.float32), limits.minimum), limits.maximum)


def correction(measured: ArrayLike, predicted: ArrayLike) -> np.ndarray:
    """Measured over predicted use: the median over the history. [H, R] each, NaN where unknown; float32 [R], 1 without any.

    In NumPy: every length of the history would be a program of its own.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.asarray(measured, np.float32) / np.asarray(predicted, np.float32)
    known = [column[np.isfinite(column)] for column in ratios.T]
    return np.array([np.median(column) if column.size else 1.0 for column in known], np.float32)
