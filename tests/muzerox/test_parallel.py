"""What each device of a mesh does by itself, against one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import random_params, small_config

from muzerox.algorithms import make_algorithm
from muzerox.envs import make_env
from muzerox.parallel import averaged, by_rows, over
from muzerox.runtimes.placement import make_mesh


@pytest.mark.parametrize("rows", [6, 5, 1])
def test_a_device_searches_its_share_with_a_key_of_its_own(rows: int) -> None:
    """Shares of rows that do not divide are filled up, and what fills them is dropped."""
    env = make_env("gymnax:CartPole-v1")
    algorithm = make_algorithm(small_config(), env.spec)
    params, key = random_params(jax.random.key(3), algorithm.init(jax.random.key(0))), jax.random.key(1)
    observation = jax.random.normal(jax.random.key(2), (rows, *env.spec.observation_shape))
    found = jax.jit(lambda x: over(make_mesh(2), algorithm).act(key, params, x, None, True))(observation)
    share = -(-rows // 2)
    filled = jnp.concatenate([observation, observation[-1:].repeat(2 * share - rows, 0)])
    parts = [algorithm.act(jax.random.fold_in(key, i), params, x, None, True) for i, x in enumerate(jnp.split(filled, 2))]
    expected = jax.tree.map(lambda *x: np.concatenate(x)[:rows], *parts)
    np.testing.assert_array_equal(found.action, expected.action)
    np.testing.assert_allclose(found.policy, expected.policy, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-4, atol=1e-6)


def test_on_one_device_nothing_is_split() -> None:
    def function(whole: float, rows: float) -> tuple[float, float]:
        return whole, rows

    algorithm = make_algorithm(small_config(), make_env("gymnax:CartPole-v1").spec)
    for mesh in (None, make_mesh(1)):
        assert by_rows(mesh, function) is function
        assert averaged(mesh, function) is function
    assert over(make_mesh(1), algorithm) is algorithm


def test_means_are_those_over_all_rows() -> None:
    x = jnp.arange(8.0)
    mean, each = jax.jit(averaged(make_mesh(2), lambda w, x: (jnp.mean(w * x), w * x)))(3.0, x)
    assert float(mean) == pytest.approx(10.5)
    np.testing.assert_array_equal(each, 3.0 * x)
