"""The table of knobs against the configuration, and grids made from it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from muzerox.config import Config, paths
from predictor import Workload
from tuner.bridge import concrete, describe, get
from tuner.loop import space_around
from tuner.space import EFFECTS, KNOBS, Space, feasible, workloads


def space_of(config: Config, effect: str = "neutral") -> Space:
    return space_around(concrete(config, "cpu"), effect, "cpu")


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.path)
def test_every_knob_is_a_key_whose_choices_the_configuration_takes(knob: Any) -> None:
    assert knob.path in paths()
    assert knob.scale in ("log2", "name")
    assert knob.cost in ("live", "rebuild", "restart")
    assert knob.effect in EFFECTS
    room = Config().replace({"replay.capacity": 10**9, "train.td_steps": 1, "runtime.num_envs": 8192})
    for choice in knob.choices:
        changed = room.replace(knob.path, choice)
        assert get(changed, knob.path) == choice
        fields = {field.name for field in dataclasses.fields(Workload)}
        assert set(knob.fields(choice)) <= fields


@pytest.mark.parametrize("knob", [k for k in KNOBS if len(k.choices) > 1], ids=lambda knob: knob.path)
def test_a_choice_sets_in_the_workload_what_the_bridge_reads_from_the_configuration(knob: Any) -> None:
    """The annealer's view of a candidate, and the one of the configuration it becomes, are the same."""
    start = concrete(Config.preset("gymnax:CartPole-v1").replace({"replay.capacity": 10**8}), "cpu")
    base = describe(start)
    for choice in knob.choices[:4]:
        changes = {knob.path: choice}
        if knob.path == "search.split":
            changes["runtime.num_envs"] = 64
        described = describe(start.replace(changes))
        assert dataclasses.replace(base, **knob.fields(choice)) == described


def test_decoding_and_encoding_are_inverse() -> None:
    space = space_of(Config.preset("gymnax:CartPole-v1"))
    assert space.size > 100
    assert space.encode(space.decode(space.start)) == space.start
    rng = np.random.default_rng(0)
    for _ in range(50):
        point = tuple(int(n) for n in rng.integers(0, space.sizes))
        assert space.encode(space.decode(point)) == point


def test_a_starting_value_off_the_grid_becomes_a_choice() -> None:
    space = space_of(Config.preset("gymnax:CartPole-v1").replace({"runtime.num_envs": 48, "runtime.loop_count": 33}))
    assert space.decode(space.start)["runtime.num_envs"] == 48
    assert list(space.options("runtime.num_envs")) == sorted(space.options("runtime.num_envs"))
    assert 33 in space.options("runtime.loop_count")


def test_learning_knobs_stay_fixed_unless_asked_for() -> None:
    config = Config.preset("gymnax:CartPole-v1")
    by_effect = {effect: {knob.path for knob in space_of(config, effect).knobs} for effect in EFFECTS}
    assert by_effect["exact"] < by_effect["neutral"] < by_effect["learning"]
    assert "search.num_simulations" not in by_effect["neutral"]
    assert "runtime.num_envs" not in by_effect["exact"]


def test_batches_of_points_are_workloads_of_their_configurations() -> None:
    start = concrete(Config.preset("gymnax:CartPole-v1"), "cpu")
    space = space_of(start)
    rng = np.random.default_rng(1)
    points = rng.integers(0, space.sizes, (64, len(space.sizes))).astype(np.int32)
    batch = workloads(space.base, space.tables(), jnp.asarray(points))
    allowed = feasible(batch, jnp.float32(space.max_num_envs))
    assert 5 < int(allowed.sum()) < 64
    for index, point in enumerate(points):
        try:
            described = describe(start.replace(space.decode(tuple(point))))
        except ValueError:
            assert not allowed[index]  # what the configuration refuses is never proposed
            continue
        for field in dataclasses.fields(Workload):
            assert float(getattr(batch, field.name)[index]) == pytest.approx(getattr(described, field.name)), field.name
        assert bool(allowed[index]) == (described.num_envs <= space.max_num_envs)
