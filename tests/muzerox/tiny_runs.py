"""Trainings so small that they take seconds, for tests of what survives them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from muzerox import Config
from muzerox.algorithms import make_algorithm
from muzerox.checkpoint import Checkpoints
from muzerox.envs import make_env
from muzerox.run_dir import RunDir
from muzerox.runtimes import make_runtime, resolve_kind
from muzerox.types import Runtime

TINY = {
    "network.width": 8,
    "network.depth": 1,
    "search.num_simulations": 2,
    "replay.min_size": 128,
    "runtime.num_envs": 8,
    "runtime.loop_count": 2,
    "train.batch_size": 16,
    "train.unroll_steps": 2,
    "train.td_steps": 3,
    "train.target_return": None,
    "train.eval_episodes": 2,
    "train.max_env_steps": 512,
}


def make_tiny_runtime(config: Config) -> Runtime:
    """The runtime of a configuration, as a training makes it."""
    env = make_env(config.env)
    config = resolve_kind(config, env)
    return make_runtime(config, env, make_algorithm(config, env.spec))


def saved_state(run: RunDir, config: Config) -> Any:
    """The newest checkpoint as a process with ``config`` finds it."""
    runtime, checkpoints = make_tiny_runtime(config), Checkpoints(run.checkpoints, writable=False)
    state = checkpoints.restore_state(jax.eval_shape(runtime.init, jax.random.key(0)))
    checkpoints.close()
    runtime.close()
    return state


def plain(tree: Any) -> list[tuple[str, np.ndarray]]:
    """Leaves by name; keys as their data."""

    def leaf(x: Any) -> np.ndarray:
        return np.array(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return [(jax.tree_util.keystr(path), leaf(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def assert_same(a: Any, b: Any) -> None:
    """Every leaf equal, bit for bit, names, dtypes and random keys included."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
    for (name, x), (other, y) in zip(plain(a), plain(b), strict=True):
        assert name == other
        np.testing.assert_array_equal(x, y, err_msg=name)
