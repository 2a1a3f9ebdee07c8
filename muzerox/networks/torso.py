"""Torsos: the bodies of the three networks, without their heads.

Each torso maps a float array with one batch axis to another; ``dtype`` is the dtype of matrix products and
activations, parameters are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx

from muzerox.networks.layers import conv_3x3, linear, relu

SHORT_SIDE = 8  # of an image's hidden state, cells at most
LONG_SIDE = 32  # observations with a longer side are images to be made smaller; boards are not
_NARROWEST = 1e-5  # that a hidden state's range is taken for


class MLP(nnx.Module):
    """[B, inputs] -> [B, width]: ``depth`` linear layers, each normalised by its root mean square and rectified."""

    def __init__(self, inputs: int, width: int, depth: int, *, dtype: str, rngs: nnx.Rngs):
        sizes = [inputs] + [width] * depth
        self.layers = nnx.List([linear(a, b, dtype=dtype, rngs=rngs) for a, b in pairwise(sizes)])
        self.norms = nnx.List([nnx.RMSNorm(b, dtype=dtype, rngs=rngs) for b in sizes[1:]])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = relu(norm(layer(x)))
        return x


class ResidualBlock(nnx.Module):
    """[B, H, W, C] -> [B, H, W, C]: pre-activation block of two 3x3 convolutions (He et al., arXiv:1603.05027).

    Root-mean-square normalisation over channels (Zhang and Sennrich, arXiv:1910.07467) instead of batch normalisation:
    no running statistics, so acting, learning and reanalysis see the same function.
    """

    def __init__(self, channels: int, *, dtype: str, rngs: nnx.Rngs):
        def conv() -> nnx.Conv:
            return conv_3x3(channels, channels, use_bias=False, dtype=dtype, rngs=rngs)

        self.norm_in = nnx.RMSNorm(channels, dtype=dtype, rngs=rngs)
        self.conv_in = conv()
        self.norm_out = nnx.RMSNorm(channels, dtype=dtype, rngs=rngs)
        self.conv_out = conv()

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv_in(relu(self.norm_in(x)))
        return x + self.conv_out(relu(self.norm_out(y)))


class ResNet(nnx.Module):
    """[B, H, W, inputs] -> [B, H, W, channels]: a 3x3 stem and ``depth`` residual blocks."""

    def __init__(self, inputs: int, channels: int, depth: int, *, dtype: str, rngs: nnx.Rngs):
        self.stem = conv_3x3(inputs, channels, use_bias=True, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([ResidualBlock(channels, dtype=dtype, rngs=rngs) for _ in range(depth)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Downsample(nnx.Module):
    """[B, H, W, inputs] -> [B, h, w, outputs]: sides of large images halved until none is longer than 8; boards pass unchanged.

    As in MuZero (appendix F) and EfficientZero: convolutions of stride 2 twice, the first to half the channels, then averages of
    3x3 cells; a residual block after each.
    """

    def __init__(self, inputs: int, channels: int, height: int, width: int, *, dtype: str, rngs: nnx.Rngs):
        halve: list[nnx.Conv] = []
        blocks: list[ResidualBlock] = []
        while max(height, width) > (SHORT_SIDE if blocks else LONG_SIDE):
            if len(halve) < 2:
                outputs = channels if blocks else max(channels // 2, 1)
                halve.append(conv_3x3(inputs, outputs, use_bias=True, dtype=dtype, rngs=rngs, stride=2))
                inputs = outputs
            blocks.append(ResidualBlock(inputs, dtype=dtype, rngs=rngs))
            height, width = -(-height // 2), -(-width // 2)
        self.halve, self.blocks = nnx.List(halve), nnx.List(blocks)
        self.outputs, self.height, self.width = inputs, height, width

    def __call__(self, x: jax.Array) -> jax.Array:
        for i, block in enumerate(self.blocks):
            small = self.halve[i](x) if i < len(self.halve) else nnx.avg_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            x = block(small)
        return x


def scale_hidden(x: jax.Array) -> jax.Array:
    """Each example's hidden state to [0, 1] by its minimum and maximum, float32 (MuZero, appendix G)."""
    return _scaled(flatten(x.astype(jnp.float32))).reshape(x.shape)


@jax.custom_vjp
def _scaled(x: jax.Array) -> jax.Array:
    """[B, n] float32."""
    return _scaled_forward(x)[0]


def _scaled_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    low = jnp.min(_halved(x, lambda a, b: jnp.where(a <= b, a, b)), axis=1, keepdims=True)
    high = jnp.max(_halved(x, lambda a, b: jnp.where(a >= b, a, b)), axis=1, keepdims=True)
    return (x - low) / jnp.maximum(high - low, _NARROWEST), (x, low, high)


def _scaled_backward(saved: tuple[jax.Array, jax.Array, jax.Array], slope: jax.Array) -> tuple[jax.Array]:
    """What JAX derives, in fewer passes: the smallest and the largest number move all others; those that tie share."""
    x, low, high = saved
    span = jnp.maximum(high - low, _NARROWEST)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(_halved(x, jnp.add), axis=1, keepdims=True)

    # Narrower ones are divided by a constant.
    along = jnp.where(high - low > _NARROWEST, total(slope * (x - low)) / span, 0.0)
    lowest, highest = (x == low).astype(jnp.float32), (x == high).astype(jnp.float32)
    to_low, to_high = (along - total(slope)) / total(lowest), -along / total(highest)
    return ((slope + lowest * to_low + highest * to_high) / span,)


_scaled.defvjp(_scaled_forward, _scaled_backward)


def _halved(x: jax.Array, join: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """[B, n] -> [B, n / 16 at the least]: halves joined, element by element, so that less is left to reduce.

    XLA reduces rows on CPU number by number; halves are joined many at a time.
    """
    for _ in range(4 if jax.default_backend() == "cpu" else 0):
        half, odd = divmod(x.shape[1], 2)
        if odd or half < 8:
            break
        x = join(x[:, :half], x[:, half:])
    return x


def from_bytes(x: jax.Array, dtype: str) -> jax.Array:
    """Observations as ``dtype``; bytes, which are pixels, to [0, 1]."""
    return x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x.astype(dtype)


def flatten(x: jax.Array) -> jax.Array:
    """[B, ...] -> [B, prod(...)]."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))
