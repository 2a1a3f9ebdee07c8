"""The networks: shapes, scales, and the convolution of CPUs against XLA's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toys import random_params, small_config

from muzerox.compilation import ONCE
from muzerox.errors import ConfigError
from muzerox.networks import make_model
from muzerox.networks.layers import conv_3x3, conv_by_matmul, linear, product, relu, rows
from muzerox.networks.torso import scale_hidden
from muzerox.precision import POLICIES
from muzerox.types import EnvSpec

B, ACTIONS = 5, 3


def spec(*shape: int) -> EnvSpec:
    return EnvSpec(
        id="toy:shape",
        observation_shape=shape,
        observation_dtype="float32",
        num_actions=ACTIONS,
        num_players=1,
        has_legal=False,
        can_truncate=False,
    )


@pytest.mark.parametrize("height", [1, 4])
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 0.0), ("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_convolution_by_matmul_is_the_convolution(height: int, width: int, dtype: str, rounding: float) -> None:
    """Of 16-bit operands too, where sums stay float32: the cotangent and the gradients are rounded, once each."""
    key_x, key_kernel, key_weight = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(key_x, (2, height, width, 3)).astype(dtype)
    kernel = jax.random.normal(key_kernel, (3, 3, 3, 4)).astype(dtype)
    exact = (x.astype(jnp.float32), kernel.astype(jnp.float32))

    def reference(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    ours, theirs = jax.jit(conv_by_matmul)(x, kernel), jax.jit(reference)(*exact)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    weight = jax.random.normal(key_weight, ours.shape)
    got = jax.jit(jax.grad(lambda *a: jnp.sum(conv_by_matmul(*a) * weight), argnums=(0, 1)))(x, kernel)
    want = jax.jit(jax.grad(lambda *a: jnp.sum(reference(*a) * weight), argnums=(0, 1)))(*exact)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=1e-4, atol=1e-5 + 2 * rounding * np.abs(b).max())


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2.0**-22), ("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_rows_are_looked_up_and_their_gradient_is_rounded_once(
    backend: str, dtype: str, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 rows go to each of two: sums in 16 bits would be off by several roundings."""
    rng = np.random.default_rng(0)
    table, weight = jnp.asarray(rng.normal(size=(3, 7)), dtype), jnp.asarray(rng.normal(size=(2, 300, 7)), dtype)
    index = jnp.asarray(rng.integers(0, 2, (2, 300)), jnp.int32)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    np.testing.assert_array_equal(rows(table, index), np.asarray(table)[np.asarray(index)])
    got = jax.grad(lambda table: jnp.sum((rows(table, index) * weight).astype(jnp.float32)))(table)
    want = np.zeros((3, 7))
    np.add.at(want, np.asarray(index), np.asarray(weight, np.float64))
    assert got.dtype == table.dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 2e-3)])
def test_a_product_sums_in_float32_and_so_does_its_gradient(dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    x, kernel, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 50, 30), (30, 20), (2, 50, 20)))
    low = [jnp.asarray(a, dtype) for a in (x, kernel)]
    out = jax.jit(product)(*low)
    assert out.dtype == jnp.float32
    exact = np.asarray(low[0], np.float32) @ np.asarray(low[1], np.float32)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)  # sums lose nothing at any level
    to_x, to_kernel = jax.jit(jax.grad(lambda *a: jnp.sum(product(*a) * weight), argnums=(0, 1)))(*low)
    assert to_x.dtype == to_kernel.dtype == dtype
    for got, want in ((to_x, weight @ kernel.T), (to_kernel, np.einsum("bti,bto->io", x, weight))):
        assert np.abs(np.asarray(got, np.float32) - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(
    ("backend", "dtype", "exact"), [("gpu", "float32", True), ("gpu", "bfloat16", False), ("cpu", "float32", False)]
)
def test_float32_is_not_rounded_to_less_by_accelerators(
    backend: str, dtype: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which they do by default: products, convolutions and their gradients."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    layers = [linear(4, 3, dtype=dtype, rngs=nnx.Rngs(0)), conv_3x3(4, 3, use_bias=True, dtype=dtype, rngs=nnx.Rngs(0))]
    for layer, shape in zip(layers, ((2, 4), (2, 5, 5, 4)), strict=True):
        graph, params = nnx.split(layer)
        traced = jax.make_jaxpr(jax.grad(lambda p, x, g=graph: nnx.merge(g, p)(x).astype(jnp.float32).sum(), argnums=(0, 1)))
        operations = str(traced(params, jnp.ones(shape, dtype)))
        multiplied = operations.count("dot_general[") + operations.count("conv_general_dilated[")
        assert multiplied >= 3
        assert operations.count("HIGHEST") >= multiplied if exact else "HIGHEST" not in operations


@pytest.mark.parametrize("size", [(84, 84), (21, 11), (7, 8), (1, 2)])
def test_convolution_of_stride_two_is_the_convolution(size: tuple[int, int]) -> None:
    x = jax.random.normal(jax.random.key(0), (2, *size, 3))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))

    def by_xla(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def ours(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return conv_by_matmul(x, kernel, (2, 2))

    np.testing.assert_allclose(jax.jit(ours)(x, kernel), by_xla(x, kernel), rtol=1e-4, atol=1e-4)
    weight = jax.random.normal(jax.random.key(2), by_xla(x, kernel).shape)
    got, want = (jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * weight), (0, 1)))(x, kernel) for f in (ours, by_xla))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_large_images_become_small_hidden_states_and_bytes_fractions() -> None:
    spec = EnvSpec(id="toy:pixels", observation_shape=(84, 84, 4), observation_dtype="uint8", num_actions=ACTIONS)
    model = make_model(small_config().network, spec, POLICIES["O0"])
    params = jax.jit(model.init, compiler_options=ONCE)(jax.random.key(0))
    pixels = np.random.default_rng(0).integers(0, 256, (B, 84, 84, 4), dtype=np.uint8)
    state = jax.jit(model.represent)(params, pixels)
    assert state.shape == (B, 6, 6, 16)
    scaled = jax.jit(model.represent)(params, pixels.astype(np.float32) / 255)
    np.testing.assert_allclose(state, scaled, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(state[0]) - np.asarray(state[1])).max() > 1e-3
    assert jax.jit(model.dynamics)(params, state, jnp.zeros(B, jnp.int32))[0].shape == state.shape


@pytest.mark.parametrize(
    ("shape", "kind", "hidden"),
    [
        ((4,), "auto", (16,)),
        ((3, 3, 2), "auto", (16,)),  # a board this small is dense
        ((3, 3, 2), "resnet", (3, 3, 16)),
        ((4, 6, 2), "auto", (4, 6, 16)),
        ((4, 6, 2), "mlp", (16,)),
        ((19, 19, 2), "auto", (19, 19, 16)),  # every cell of a board counts
        ((40, 33, 3), "auto", (5, 5, 16)),
    ],
)
@pytest.mark.parametrize("level", POLICIES)
def test_shapes_and_dtypes(shape: tuple[int, ...], kind: str, hidden: tuple[int, ...], level: str) -> None:
    config = small_config(network__kind=kind).network
    model = make_model(config, spec(*shape), POLICIES[level])
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    observation = jax.ShapeDtypeStruct((B, *shape), jnp.float32)
    state = jax.eval_shape(model.represent, params, observation)
    assert state.shape == (B, *hidden)
    following, reward = jax.eval_shape(model.dynamics, params, state, jax.ShapeDtypeStruct((B,), jnp.int32))
    policy, value = jax.eval_shape(model.predict, params, following)
    assert following.shape == state.shape
    assert reward.shape == value.shape == (B, config.num_bins)
    assert policy.shape == (B, ACTIONS)
    assert {x.dtype for x in (state, following, reward, policy, value)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("shape", [(4,), (4, 5, 2)])
def test_hidden_states_are_scaled_and_actions_matter(shape: tuple[int, ...]) -> None:
    model = make_model(small_config().network, spec(*shape), POLICIES["O0"])
    params = jax.jit(model.init, compiler_options=ONCE)(jax.random.key(0))
    observation = 10 * jax.random.normal(jax.random.key(1), (B, *shape))

    policy, value = jax.jit(lambda params: model.predict(params, model.represent(params, observation)))(params)
    assert not np.asarray(policy).any(), "the first searches see a uniform policy"
    assert not np.asarray(value).any(), "and a value of 0"
    params = random_params(jax.random.key(2), params)
    state = jax.jit(model.represent)(params, observation)
    dynamics = jax.jit(model.dynamics)
    after = [dynamics(params, state, jnp.full(B, action))[0] for action in range(ACTIONS)]
    for hidden in (state, *after):
        flat = np.asarray(hidden).reshape(B, -1)
        np.testing.assert_allclose(flat.min(1), 0.0, atol=1e-6)
        np.testing.assert_allclose(flat.max(1), 1.0, atol=1e-6)
    assert np.abs(np.asarray(after[0]) - np.asarray(after[1])).max() > 1e-3


def test_residual_networks_need_a_grid() -> None:
    with pytest.raises(ConfigError, match="needs observations"):
        make_model(small_config(network__kind="resnet").network, spec(4), POLICIES["O0"])


def scaled_by_jax(x: jax.Array) -> jax.Array:
    axes = tuple(range(1, x.ndim))
    low, high = jnp.min(x, axes, keepdims=True), jnp.max(x, axes, keepdims=True)
    return (x - low) / jnp.maximum(high - low, 1e-5)


@pytest.mark.parametrize("shape", [(5, 64), (5, 6), (5, 7), (3, 6, 7, 16), (3, 1)])
def test_scaled_hidden_states_and_their_gradients_are_what_jax_derives(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    slope = rng.normal(size=shape).astype(np.float32)
    tied = np.round(x)  # many share the smallest and the largest number
    for given in (x, tied, 1e-6 * x, np.zeros_like(x)):
        found, back = jax.vjp(scale_hidden, given)
        wanted, derived = jax.vjp(scaled_by_jax, given)
        np.testing.assert_array_equal(found, wanted)
        scale = float(np.abs(derived(slope)[0]).max())
        np.testing.assert_allclose(back(slope)[0], derived(slope)[0], rtol=1e-4, atol=1e-5 * scale)
    assert np.isnan(scale_hidden(np.full(shape, np.nan, np.float32))).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_relu_is_that_of_jax_and_keeps_nan(dtype: str) -> None:
    x = jnp.array([-2.0, -0.0, 0.0, 3.0, np.inf, -np.inf, np.nan], dtype)
    assert relu(x).dtype == x.dtype
    np.testing.assert_array_equal(*(np.asarray(f(x), np.float32) for f in (relu, jax.nn.relu)))
    gradients = [jax.grad(lambda x, f=f: jnp.sum(f(x)[:4]).astype(jnp.float32))(x) for f in (relu, jax.nn.relu)]
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in gradients))
