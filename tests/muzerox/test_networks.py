"""The networks: shapes, scales, and the convolution of CPUs against XLA's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import random_params, small_config

from muzerox.errors import ConfigError
from muzerox.networks import make_model
from muzerox.networks.layers import conv_by_matmul, product
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
def test_convolution_by_matmul_is_the_convolution(height: int, width: int) -> None:
    key_x, key_kernel = jax.random.split(jax.random.key(0))
    x, kernel = jax.random.normal(key_x, (2, height, width, 3)), jax.random.normal(key_kernel, (3, 3, 3, 4))

    def reference(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    ours, theirs = conv_by_matmul(x, kernel), reference(x, kernel)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    weight = jax.random.normal(key_x, ours.shape)
    gradients = [
        jax.grad(lambda *a, f=f: jnp.sum(f(*a) * weight), argnums=(0, 1))(x, kernel) for f in (conv_by_matmul, reference)
    ]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


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
    ("shape", "kind", "hidden"),
    [
        ((4,), "auto", (16,)),
        ((3, 3, 2), "auto", (16,)),  # a board this small is dense
        ((3, 3, 2), "resnet", (3, 3, 16)),
        ((4, 6, 2), "auto", (4, 6, 16)),
        ((4, 6, 2), "mlp", (16,)),
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
    params = jax.jit(model.init)(jax.random.key(0))
    observation = 10 * jax.random.normal(jax.random.key(1), (B, *shape))

    def heads_are_zero(params: dict) -> bool:
        policy, value = model.predict(params, model.represent(params, observation))
        return not np.asarray(policy).any() and not np.asarray(value).any()

    assert heads_are_zero(params)  # the first searches see a uniform policy and a value of 0
    params = random_params(jax.random.key(2), params)
    state = jax.jit(model.represent)(params, observation)
    after = [jax.jit(model.dynamics)(params, state, jnp.full(B, action))[0] for action in range(ACTIONS)]
    for hidden in (state, *after):
        flat = np.asarray(hidden).reshape(B, -1)
        np.testing.assert_allclose(flat.min(1), 0.0, atol=1e-6)
        np.testing.assert_allclose(flat.max(1), 1.0, atol=1e-6)
    assert np.abs(np.asarray(after[0]) - np.asarray(after[1])).max() > 1e-3


def test_residual_networks_need_a_grid() -> None:
    with pytest.raises(ConfigError, match="needs observations"):
        make_model(small_config(network__kind="resnet").network, spec(4), POLICIES["O0"])
