"""What a workload says of a configuration, against the code that it is said of."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import mctx
import pytest

from muzerox import Config
from muzerox.algorithms import make_algorithm
from muzerox.runtimes.sebulba import ring
from muzerox.search.selection import gumbel_rounds
from muzerox.selfplay import EpisodeStats, init_actors, make_act
from predictor import Hardware, Outcome, RuntimePredictor, Workload
from predictor.analytic import halving_rounds, row_bytes
from predictor.overlap import shared_devices
from tuner.bridge import concrete, environment
from tuner.measuring.workload import describe, whole_training
from tuner.resources import devices_of


@pytest.mark.parametrize("num_simulations", [2, 4, 8, 16, 32, 50, 64, 128])
@pytest.mark.parametrize(("env", "actions"), [("gymnax:CartPole-v1", 2), ("gymnax:Breakout-MinAtar", 3), ("pgx:connect_four", 7)])
def test_rounds_side_by_side_are_those_of_the_search(env: str, actions: int, num_simulations: int) -> None:
    config = concrete(Config.preset(env).replace("search.num_simulations", num_simulations), "gpu")
    rounds = gumbel_rounds(actions, num_simulations, config.search.max_considered_actions, mctx.qtransform_completed_by_mix_value)
    assert float(halving_rounds(describe(config))) == pytest.approx(len(rounds), abs=1.0)


def bytes_of(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def stored_row(config: Config) -> float:
    """Bytes of a transition in the ring that the runtime makes."""
    env, key = environment(config.env), jax.random.key(0)
    if config.runtime.kind == "sebulba":
        storage = jax.eval_shape(lambda: ring.init(config, env.spec)).storage
        return bytes_of(storage) / (len(storage.action) * storage.action.shape[1])
    algorithm = make_algorithm(config, env.spec)

    def row(key: jax.Array) -> Any:
        actors = init_actors(key, env, config.runtime.num_envs)
        return make_act(env, algorithm)(key, algorithm.init(key), actors, EpisodeStats.zero())[2]

    return bytes_of(jax.eval_shape(row, key)) / config.runtime.num_envs


@pytest.mark.parametrize(
    ("env", "kind", "observations"),
    [
        ("gymnax:Breakout-MinAtar", "anakin", 2.0),
        ("gymnax:CartPole-v1", "anakin", 2.0),
        ("pgx:connect_four", "anakin", 1.0),
        ("pgx:connect_four", "sebulba", 2.0),
        ("gymnasium:CartPole-v1", "sebulba", 2.0),
    ],
)
def test_a_row_holds_the_observations_that_the_ring_keeps(env: str, kind: str, observations: float) -> None:
    """The one an episode was cut at is kept beside the one it began a step from."""
    config = concrete(Config.preset(env).replace("runtime.kind", kind), "cpu")
    workload = describe(config)
    assert workload.stored_observations == observations
    assert float(row_bytes(workload)) == pytest.approx(stored_row(config), abs=20.0)  # what is small is not counted one by one


@pytest.mark.parametrize(("env", "rows"), [("pgx:connect_four", 43), ("gymnax:CartPole-v1", 0)])
def test_rows_that_a_core_learns_from_at_once_are_told(env: str, rows: int) -> None:
    """A row of connect_four's makes 9 neighbours of 42 cells of 16 channels, 24,192 bytes."""
    assert describe(concrete(Config.preset(env), "cpu")).cached_rows == rows


def test_a_share_of_an_accelerators_memory_is_told() -> None:
    config = concrete(Config.preset("gymnax:CartPole-v1"), "gpu")
    assert describe(config).device_share == 1.0
    assert describe(config.replace("allocation.device_memory", 0.25)).device_share == 0.25


def test_a_training_does_not_fit_where_its_deepest_searches_do_not(machine: Hardware) -> None:
    changes = {"search.num_simulations": 4, "search.final_simulations": 512, "runtime.num_envs": 2048}
    config, plain = concrete(Config.preset("gymnax:CartPole-v1").replace(changes), "cpu"), RuntimePredictor()
    first, deepest = (plain.predict(describe(config.searching(count)), machine).peak_bytes for count in (4, 512))
    for limit, outcome in (((first + deepest) / 2.0, Outcome.OUT_OF_MEMORY), (1.1 * deepest, Outcome.OK)):
        kept = config.replace("allocation.memory_gib", limit / 2**30)
        assert plain.predict(describe(kept), machine).outcome is Outcome.OK
        told = whole_training(plain, kept, machine)
        assert (told["outcome"], told["error"] is None) == (outcome, outcome is Outcome.OK)


def test_roles_share_devices_by_the_rule_that_allocates_them(machine: Hardware, workload: Workload) -> None:
    names = ("acting_devices", "searching_devices", "learning_devices")
    start = concrete(Config.preset("gymnasium:CartPole-v1"), "gpu")
    for *counts, devices in itertools.product((1, 2), (1, 2), (1, 2), (2, 3, 4, 5, 8)):
        acting, searching, learning = counts
        gpus = dataclasses.replace(machine, platform="gpu", devices=devices)
        config = start.replace({f"runtime.{name}": count for name, count in zip(names, counts, strict=True)})
        roles = dataclasses.replace(workload, **dict(zip(names, map(float, counts), strict=True)))
        with_search, with_learning = map(bool, shared_devices(roles, gpus))
        first = max(acting, searching) if with_search else acting + searching
        assert devices_of(config, gpus) == (max(first, learning) if with_learning else first + learning), (counts, devices)
