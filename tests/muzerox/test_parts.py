"""Rows a few at a time: the same numbers as of all rows at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import small_config

from muzerox import parts, replay
from muzerox.algorithms import make_algorithm
from muzerox.envs import make_env
from muzerox.learner import init_learner, make_apply, make_batch
from muzerox.networks import make_model
from muzerox.precision import POLICIES
from muzerox.runtimes import make_runtime

CONFIG = small_config("pgx:connect_four", network__kind="resnet", network__width=8, network__depth=1, train__batch_size=16)
ROW_BYTES = 4 * 9 * 6 * 7 * 8  # nine neighbours of 42 cells of 8 channels


@pytest.fixture(autouse=True)
def a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "available_cores", lambda: [0])


@pytest.mark.parametrize(
    ("count", "row_bytes", "at_once"),
    [
        (128, 24_192, 32),
        (128, 1 << 20, 1),
        (128, 8 << 20, 1),
        (100, 24_192, 25),
        (101, 24_192, 101),
        (32, 24_192, 32),
        (4096, 0, 4096),
    ],
)
def test_rows_are_halved_until_they_fit(count: int, row_bytes: int, at_once: int) -> None:
    assert parts.rows_at_once(count, row_bytes) == at_once


def test_a_device_of_several_cores_takes_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "available_cores", lambda: list(range(jax.local_device_count() + 1)))
    assert parts.rows_at_once(128, 24_192) == 128


def test_an_accelerator_takes_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert parts.rows_at_once(128, 24_192) == 128


@pytest.mark.parametrize(("kind", "expected"), [("resnet", ROW_BYTES), ("mlp", 0)])
def test_networks_say_what_a_row_takes(kind: str, expected: int) -> None:
    network = CONFIG.replace("network.kind", kind).network
    assert make_model(network, make_env(CONFIG.env).spec, POLICIES["O0"]).row_bytes == expected


@pytest.mark.parametrize("at_once", [8, 2, 1])
def test_an_update_in_parts_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    env = make_env(CONFIG.env)
    algorithm = make_algorithm(CONFIG, env.spec)
    runtime = make_runtime(CONFIG, env, algorithm)
    ring = runtime.prefill(runtime.init(jax.random.key(0))).replay
    # Heads start at zero: what rows differ by would not be seen. Importance weights differ, too.
    key, noise = jax.random.key(1), jax.random.key(2)
    learner = init_learner(key, CONFIG, algorithm)
    learner = learner.replace(params=jax.tree.map(lambda x: x + 0.1 * jax.random.normal(noise, x.shape), learner.params))
    start = replay.sample(CONFIG.replay, key, ring, 16, CONFIG.sequence_length)._replace(importance=jnp.linspace(0.1, 1.0, 16))
    found = []
    for cached in (1 << 30, at_once * ROW_BYTES):
        monkeypatch.setattr(parts, "_CACHED_BYTES", cached)
        batch = make_batch(key, CONFIG, env.spec, algorithm, learner.params, ring, start)
        targets = jax.jit(lambda params, batch: algorithm.targets(params, batch))(learner.params, batch)
        found.append((targets, *jax.jit(make_apply(CONFIG, algorithm))(learner, batch, targets)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.extended):
            np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-6)
    assert float(found[0][2].metrics["grad_norm"]) > 0.0


def test_targets_of_parts_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"x": jnp.arange(12.0).reshape(4, 3), "none": None}
    monkeypatch.setattr(parts, "_CACHED_BYTES", 4)
    seen = []

    def function(part: dict) -> jax.Array:
        seen.append(part["x"].shape)
        return 2.0 * part["x"]

    np.testing.assert_array_equal(parts.by_parts(4, function, rows), 2.0 * rows["x"])
    assert set(seen) == {(1, 3)}
