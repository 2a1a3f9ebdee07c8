"""Mixed-precision policies by level, and loss scaling.

A policy says in which dtype matrices are multiplied, in which the copies for acting are kept, and in which a search
tree stores hidden states. Parameters of the learner, search statistics, targets and losses are float32 at every level. Products
of O0 keep all bits of float32 on GPU and TPU, too, where JAX by default does not.

Micikevicius et al., Mixed Precision Training (arXiv:1710.03740); the level names follow NVIDIA Apex.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from muzerox.config import PrecisionConfig
from muzerox.types import Skips

_DOUBLINGS = 40  # of 1, to the largest loss scale
_OVERFLOWS = 10  # in a row, under a scale that does not move: a batch may be out of range, so many of them are no accident


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Dtypes of one precision level."""

    compute: str  # matrix products and activations, in training and acting
    acting: str  # parameters a search reads
    embedding: str  # hidden states a search tree stores
    loss_scale: str  # none or dynamic, unless the configuration says otherwise


POLICIES: dict[str, Policy] = {
    "O0": Policy(compute="float32", acting="float32", embedding="float32", loss_scale="none"),
    "O1": Policy(compute="bfloat16", acting="float32", embedding="float32", loss_scale="none"),
    "O1_float16": Policy(compute="float16", acting="float32", embedding="float32", loss_scale="dynamic"),
    "O2": Policy(compute="bfloat16", acting="bfloat16", embedding="bfloat16", loss_scale="none"),
}


def default_level(backend: str) -> str:
    """The level ``auto`` stands for on a backend: bfloat16 does not pay on CPU."""
    return "O0" if backend == "cpu" else "O1"


def resolve(config: PrecisionConfig) -> PrecisionConfig:
    """The configuration with ``auto`` replaced by what it means on this machine."""
    level = default_level(jax.default_backend()) if config.level == "auto" else config.level
    scale = POLICIES[level].loss_scale if config.loss_scale == "auto" else config.loss_scale
    return dataclasses.replace(config, level=level, loss_scale=scale)


def cast(tree: Any, dtype: str) -> Any:
    """Floating-point leaves of ``tree`` in ``dtype``; other leaves as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def pack(x: jax.Array, dtype: str) -> jax.Array:
    """``x`` as a tree stores it: in ``dtype``; on CPU 16 bits as the whole number with the same bits.

    XLA widens what a processor cannot compute with: to write a row of an array of bfloat16 it would turn all of it to float32
    and back.
    """
    narrow = x.astype(dtype)
    if narrow.dtype.itemsize != 2 or jax.default_backend() != "cpu":
        return narrow
    return jax.lax.bitcast_convert_type(narrow, jnp.uint16)


def unpack(x: jax.Array, dtype: str) -> jax.Array:
    """What was packed, in ``dtype``."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


class LossScale(struct.PyTreeNode):
    """State of the loss scale."""

    scale: jax.Array  # [] float32, factor on the loss before differentiation
    good_steps: jax.Array  # [] int32, finite updates since the scale last changed


def make_loss_scale(config: PrecisionConfig) -> LossScale:
    """The first state: 1 without loss scaling, ``initial_loss_scale`` otherwise."""
    scale = 1.0 if resolve(config).loss_scale == "none" else config.initial_loss_scale
    return LossScale(scale=jnp.float32(scale), good_steps=jnp.int32(0))


def adjust_loss_scale(config: PrecisionConfig, state: LossScale, finite: jax.Array) -> LossScale:
    """After an update: halve on overflow (never below 1), double after ``loss_scale_period`` finite updates.

    ``finite`` is [] bool. Only a dynamic scale moves.
    """
    if resolve(config).loss_scale != "dynamic":
        return state
    good = jnp.where(finite, state.good_steps + 1, 0)
    grow = good >= config.loss_scale_period
    grown = jnp.where(grow, jnp.minimum(state.scale * 2.0, 2.0**_DOUBLINGS), state.scale)
    scale = jnp.where(finite, grown, jnp.maximum(state.scale * 0.5, 1.0))
    return LossScale(scale=scale, good_steps=jnp.where(grow, 0, good))


def has_diverged(config: PrecisionConfig, skips: Skips) -> bool:
    """Whether the gradients of more updates in a row overflowed than may where nothing is wrong.

    With a dynamic loss scale as many may as halve it to 1.
    """
    return bool(skips.longest > (_DOUBLINGS if resolve(config).loss_scale == "dynamic" else _OVERFLOWS))
