"""Linear and 3x3 convolutional layers: operands in the dtype of the precision level, sums in float32.

Parameters are float32. In 16 bits a product of matrices keeps its float32 sums, and the products of its gradient are
made of 16-bit operands too: left to itself, JAX would mix a float32 cotangent with 16-bit operands and multiply in
float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def relu(x: jax.Array) -> jax.Array:
    """max(x, 0), NaN where x is; any shape and dtype.

    XLA compiles a maximum on CPU to code that takes two to four times as long, for the sake of NaN.
    """
    return jnp.where(x <= 0, jnp.zeros_like(x), x)


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[..., I] and [I, O] of one dtype -> [..., O] float32."""
    return _product(x, kernel, ((x.ndim - 1,), (0,)))


def _product(a: jax.Array, b: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    return jax.lax.dot_general(a, b, (contracted, ((), ())), precision=_precision(a.dtype), preferred_element_type=jnp.float32)


def _precision(dtype: Any) -> jax.lax.Precision | None:
    """That of a product's operands: all bits of float32, which GPUs take for TensorFloat32 by default, and TPUs for bfloat16."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 and jax.default_backend() != "cpu" else None


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x, kernel), (x, kernel)


def _backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    cotangent = cotangent.astype(x.dtype)
    to_x = _product(cotangent, kernel, ((x.ndim - 1,), (1,)))
    return to_x.astype(x.dtype), _to_kernel(x, cotangent).astype(kernel.dtype)


def _to_kernel(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """[..., I] and [..., O], summed over all other axes -> [I, O] float32."""
    if jax.default_backend() != "cpu" or x.ndim > 2:
        rows = tuple(range(x.ndim - 1))
        return _product(x, cotangent, (rows, rows))
    # XLA's products on CPU are slow where the rows of both operands are summed over: a third slower than others, and 11 times
    # where one has two columns. So the smaller operand is transposed before, in a way that XLA does not undo. Images have so
    # many rows that transposing them takes longer.
    if cotangent.shape[1] > x.shape[1]:
        return _product(jax.lax.optimization_barrier(x.T), cotangent, ((1,), (0,)))
    return jax.lax.optimization_barrier(_product(jax.lax.optimization_barrier(cotangent.T), x, ((1,), (0,)))).T


product.defvjp(_forward, _backward)


@jax.custom_vjp
def rows(table: jax.Array, index: jax.Array) -> jax.Array:
    """[N, O] and int32 [...] below N -> [..., O], rows of the table; the sums of their gradient are float32.

    On a GPU that gradient is a product with one-hot indices: many rows added to few one by one, in an order of chance, wait for
    one another (256 rows to two, in 16 bits: 0.2 ms, as long as 150 small operations).
    """
    return jnp.take(table, index, axis=0, mode="clip")


def _rows_forward(table: jax.Array, index: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return rows(table, index), (table, index)


def _rows_backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    table, index = saved
    if jax.default_backend() == "cpu":
        sums = jnp.zeros(table.shape, jnp.float32).at[index].add(cotangent.astype(jnp.float32))
    else:
        sums = _to_kernel(jax.nn.one_hot(index, len(table), dtype=cotangent.dtype), cotangent)
    return sums.astype(table.dtype), None


rows.defvjp(_rows_forward, _rows_backward)


class Embed(nnx.Embed):
    """``nnx.Embed`` whose gradient has float32 sums: int32 [...] -> [..., features] in the dtype of the precision level."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return rows(jnp.asarray(self.embedding[...], self.dtype), inputs)


def linear(inputs: int, outputs: int, *, dtype: str, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
    """[..., inputs] -> [..., outputs] float32; ``options`` are those of ``nnx.Linear``."""

    def dot_general(x: jax.Array, kernel: jax.Array, *_args: object, **_kwargs: object) -> jax.Array:
        return product(x, kernel)

    return nnx.Linear(inputs, outputs, dtype=dtype, rngs=rngs, dot_general=dot_general, **options)


def conv_by_matmul(
    x: jax.Array, kernel: jax.Array, strides: tuple[int, ...] = (1, 1), *_args: object, **_kwargs: object
) -> jax.Array:
    """``jax.lax.conv_general_dilated`` for 3x3 kernels and same padding, as one matrix product.

    Args:
      x: [B, H, W, C].
      kernel: [3, 3, C, D] of the same dtype.
      strides: the same in both directions.

    Returns:
      [B, H, W, D] float32, height and width divided by the stride and rounded up. Each cell's nine neighbours side by side times
      the kernel as a matrix.
    """
    if max(strides) == 1:
        return _convolution(x, kernel)
    return product(_neighbours(x, strides[0]), kernel.reshape(-1, kernel.shape[3]))


@jax.custom_vjp
def _convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return product(_neighbours(x), kernel.reshape(-1, kernel.shape[3]))


def _neighbours(x: jax.Array, stride: int = 1) -> jax.Array:
    """[B, H, W, C] -> [B, H, W, 9 C] of every ``stride``-th cell, zeros beyond the edges."""
    _, height, width, _ = x.shape
    padded = jnp.pad(x, ((0, 0), _same(height, stride), _same(width, stride), (0, 0)))
    rows, columns = (slice(0, size, stride) for size in (height, width))

    def shifted(cells: slice, by: int) -> slice:
        return slice(by, by + cells.stop, cells.step)

    return jnp.concatenate([padded[:, shifted(rows, i), shifted(columns, j)] for i in range(3) for j in range(3)], axis=-1)


def _same(size: int, stride: int) -> tuple[int, int]:
    """Zeros before and after, as XLA's padding SAME has them for a kernel of 3."""
    total = max((-(-size // stride) - 1) * stride + 3 - size, 0)
    return total // 2, max(total - total // 2, 1)  # one more does no harm: it is not read


def _convolution_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolution(x, kernel), (x, kernel)


def _convolution_backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Cell p of x meets kernel[k] in the output at p - k: both gradients are products with the neighbours of the cotangent in
    # opposite order. JAX's own gradient keeps the neighbours of x and adds nine padded arrays: three times as slow.
    x, kernel = saved
    inputs, outputs = kernel.shape[2:]
    around = _neighbours(cotangent.astype(x.dtype))
    opposite = kernel[::-1, ::-1].swapaxes(2, 3).reshape(9 * outputs, inputs)
    to_x = _product(around, opposite, ((3,), (0,)))
    cells = (0, 1, 2)
    to_kernel = _product(x, around, (cells, cells)).reshape(inputs, 3, 3, outputs)
    return to_x.astype(x.dtype), to_kernel[:, ::-1, ::-1].transpose(1, 2, 0, 3).astype(kernel.dtype)


_convolution.defvjp(_convolution_forward, _convolution_backward)


def conv_3x3(inputs: int, outputs: int, *, use_bias: bool, dtype: str, rngs: nnx.Rngs, stride: int = 1) -> nnx.Conv:
    """[B, H, W, inputs] -> [B, H, W, outputs]: a 3x3 convolution; height and width are divided by ``stride`` and rounded up.

    XLA's convolutions on CPU, and their gradients above all, are many times slower than its matrix products.
    """
    by_matmul = {"conv_general_dilated": conv_by_matmul} if jax.default_backend() == "cpu" else {}
    options = {"strides": stride, "use_bias": use_bias, "dtype": dtype, "precision": _precision(dtype)}
    return nnx.Conv(inputs, outputs, (3, 3), rngs=rngs, **options, **by_matmul)
