"""The table of knobs against the configuration, and grids made from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from muzerox.cli import main
from muzerox.config import Config, paths
from muzerox.runtimes.sebulba.pipeline import make_window
from predictor import Workload, staleness
from predictor.graph import EDGE_TYPES, NODE_TYPES
from tuner.bridge import available_cores, concrete, get
from tuner.measuring import workload
from tuner.measuring.workload import describe
from tuner.neighbourhood import space_around
from tuner.space import EFFECTS, KNOBS, Space, feasible, knobs_up_to, workloads


def space_of(config: Config, effect: str = "neutral") -> Space:
    return space_around(concrete(config, "cpu"), effect, "cpu")


def start_of(runtime: str) -> Config:
    """A start of the runtime with room for any choice."""
    env = "gymnasium:CartPole-v1" if runtime == "sebulba" else "gymnax:CartPole-v1"
    return concrete(Config.preset(env).replace({"replay.capacity": 10**9}), "cpu")


RUNTIMES = ("anakin", "sebulba")
# What a choice of a knob needs of another: its path, a value, and the field it sets.
NEEDS = {
    "search.split": [("runtime.num_envs", 64, "num_envs")],
    "runtime.role_threads": [("allocation.cores", 8, "cores")],
}
ROWS = [pytest.param(knob, r, id=f"{knob.path}-{r}") for knob in KNOBS for r in RUNTIMES if knob.runtime in ("", r)]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: f"{knob.path}-{knob.runtime}")
def test_every_knob_is_a_key_whose_choices_the_configuration_takes(knob: Any) -> None:
    assert knob.path in paths()
    assert knob.scale in ("log2", "name")
    assert knob.cost in ("live", "rebuild", "restart")
    assert knob.effect in EFFECTS
    assert knob.runtime in ("", *RUNTIMES)
    assert knob.feeds in (*NODE_TYPES, *EDGE_TYPES)
    room = Config().replace({"replay.capacity": 10**9, "train.td_steps": 1, "runtime.num_envs": 8192})
    for choice in knob.choices:
        changed = room.replace(knob.path, choice)
        assert get(changed, knob.path) == choice
        fields = {field.name for field in dataclasses.fields(Workload)}
        assert set(knob.fields(choice)) <= fields


@pytest.mark.parametrize(("knob", "runtime"), ROWS)
def test_a_choice_sets_in_the_workload_what_the_bridge_reads_from_the_configuration(knob: Any, runtime: str) -> None:
    """The annealer's view of a candidate, and the one of the configuration it becomes, are the same."""
    start = start_of(runtime)
    base = describe(start)
    for choice in knob.choices[:4]:
        changes: dict[str, Any] = {knob.path: choice}
        unchanged: dict[str, Any] = {}
        for other, value, field in NEEDS.get(knob.path, []):
            changes[other] = value
            unchanged[field] = getattr(base, field)
        described = dataclasses.replace(describe(start.replace(changes)), **unchanged)
        assert dataclasses.replace(base, **knob.fields(choice)) == described


def test_knobs_are_those_of_the_runtime() -> None:
    by_runtime = {runtime: {k.path: k for k in knobs_up_to("neutral", runtime)} for runtime in RUNTIMES}
    names = ("selfplay_workers", "cpu_actors", "search_queue_size", "batch_queue_size", "role_threads", "step_in")
    of_threads = {f"runtime.{name}" for name in names}
    assert of_threads.isdisjoint(by_runtime["anakin"])
    assert of_threads <= set(by_runtime["sebulba"])
    # Only one program takes the number of updates as an argument; between threads it is how often parameters are published.
    loops = {runtime: knobs["runtime.loop_count"] for runtime, knobs in by_runtime.items()}
    assert (loops["anakin"].cost, loops["anakin"].effect) == ("live", "exact")
    assert (loops["sebulba"].cost, loops["sebulba"].effect) == ("rebuild", "neutral")
    exact = {knob.path for knob in knobs_up_to("exact", "sebulba")}
    assert exact == {"runtime.step_in", "replay.placement", "allocation.cores"}


def test_threads_are_no_staler_than_the_target_network_or_the_start() -> None:
    space = space_of(Config.preset("gymnasium:CartPole-v1"))
    assert space.max_staleness == 22  # 2 x 8 updates, two queues of 2, an actor, a searching device; the period is 20
    values = {**space.decode(space.start), "runtime.batch_queue_size": 64}
    points = jnp.asarray([space.start, space.encode(values)])
    batch = workloads(space.base, space.tables(), points)
    assert list(np.asarray(feasible(batch, jnp.float32(10**9), jnp.float32(space.max_staleness)))) == [True, False]
    longer = space_of(Config.preset("gymnasium:CartPole-v1").replace("train.target_period", 500))
    assert longer.max_staleness == 500


@pytest.mark.parametrize("env", ["gymnasium:CartPole-v1", "gymnax:CartPole-v1"])
def test_the_bridge_counts_what_the_runtime_lets_get_old(env: str) -> None:
    """The predictor's formula is the pipeline's, which it must not import."""
    config = concrete(Config.preset(env).replace({"runtime.kind": "sebulba", "runtime.cpu_actors": 5}), "cpu")
    assert float(staleness(describe(config))) == make_window(config)


def test_a_step_on_the_host_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MUZEROX_HOME", str(tmp_path))
    workload.host_step_seconds.cache_clear()
    found = workload.host_step_seconds("gymnasium:CartPole-v1")
    assert 1e-7 < found < 1e-2
    monkeypatch.setattr(workload, "_time_steps", lambda _: pytest.fail("measured again"))
    workload.host_step_seconds.cache_clear()
    assert workload.host_step_seconds("gymnasium:CartPole-v1") == found
    assert workload.host_step_seconds("gymnax:CartPole-v1") == 0.0  # a program of the device
    (kept,) = (tmp_path / "environments").iterdir()
    monkeypatch.setattr(workload, "_time_steps", lambda _: 2e-5)
    for damaged in ("{", '{"step_seconds": 1e-08}'):  # the second is what one slow moment once left
        kept.write_text(damaged)
        workload.host_step_seconds.cache_clear()
        assert workload.host_step_seconds("gymnasium:CartPole-v1") == 2e-5
    workload.host_step_seconds.cache_clear()


def test_a_step_is_measured_again_once_its_simulator_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MUZEROX_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "changing_simulator.py"
    module.write_text("import gymnasium\ngymnasium.register('Changing-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n")
    times = iter([1e-5, 2e-5, 3e-5])
    monkeypatch.setattr(workload, "_time_steps", lambda _: next(times))

    def told() -> float:
        workload.host_step_seconds.cache_clear()  # as another process
        return workload.host_step_seconds("gymnasium:changing_simulator:Changing-v0")

    assert (told(), told()) == (1e-5, 1e-5)
    module.write_text(module.read_text() + "# edited\n")
    assert (told(), told()) == (2e-5, 2e-5)
    assert main(["info", "--remeasure"]) == 0
    assert "measured rates" in capsys.readouterr().out
    assert told() == 3e-5, "and what it imports may have changed"
    workload.host_step_seconds.cache_clear()


def test_threads_and_cores_limit_each_other_in_combinations_alone() -> None:
    """A start on one core may be given two, each role with a thread or two; and back."""
    if len(available_cores()) < 2:
        pytest.skip("needs two cores")
    start = Config.preset("gymnasium:CartPole-v1")
    one = space_of(start.replace({"allocation.cores": 1, "runtime.role_threads": 0}))
    two = space_of(start.replace({"allocation.cores": 2, "runtime.role_threads": 2}))
    for space in (one, two):
        assert {0, 1, 2} <= set(space.options("runtime.role_threads"))
        assert {1, 2} <= set(space.options("allocation.cores"))
        assert max(space.options("runtime.role_threads")) <= len(available_cores())
    values = one.decode(one.start) | {"runtime.role_threads": 2}
    both = np.array([one.encode(values), one.encode(values | {"allocation.cores": 2})], np.int32)
    made = workloads(one.base, one.tables(), jnp.asarray(both))
    assert feasible(made, one.max_num_envs, one.max_staleness).tolist() == [False, True]


def test_all_cores_of_a_machine_are_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seldom a power of two; and as many as may be taken."""
    ten = list(range(10))
    for module in ("tuner.bridge", "tuner.neighbourhood", "muzerox.allocation"):
        monkeypatch.setattr(f"{module}.available_cores", lambda: ten)
    start = concrete(Config.preset("gymnax:CartPole-v1").replace("allocation.cores", 2), "cpu")
    assert space_around(start, "neutral", "cpu").options("allocation.cores") == (1, 2, 3, 4, 6, 8, 10)
    assert space_around(start, "neutral", "cpu", 7).options("allocation.cores") == (1, 2, 3, 4, 6, 7)


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


def test_environments_are_no_more_than_an_agent_learns_with() -> None:
    # Of tic_tac_toe's sequences of 13 rows, 512 environments take an eightieth of 532,480 steps.
    preset = Config.preset("pgx:tic_tac_toe")
    steps = 13 * 512 * 80
    limits = [space_of(preset.replace("train.max_env_steps", n)).max_num_envs for n in (steps, steps - 1, 2 * steps)]
    assert limits == [512, 511, 1024]
    many = preset.replace({"train.max_env_steps": steps, "runtime.num_envs": 2048})
    assert space_of(many).max_num_envs == 2048  # who configured more learns with them


@pytest.mark.parametrize("env", ["gymnax:CartPole-v1", "gymnasium:CartPole-v1"])
def test_batches_of_points_are_workloads_of_their_configurations(env: str) -> None:
    start = concrete(Config.preset(env).replace("train.target_period", 200), "cpu")
    space = space_of(start)
    rng = np.random.default_rng(1)
    points = rng.integers(0, space.sizes, (64, len(space.sizes))).astype(np.int32)
    batch = workloads(space.base, space.tables(), jnp.asarray(points))
    allowed = feasible(batch, jnp.float32(space.max_num_envs), jnp.float32(space.max_staleness))
    assert 3 < int(allowed.sum()) < 64
    for index, point in enumerate(points):
        try:
            described = describe(start.replace(space.decode(tuple(point))))
        except ValueError:
            assert not allowed[index]  # what the configuration refuses is never proposed
            continue
        for field in dataclasses.fields(Workload):
            assert float(getattr(batch, field.name)[index]) == pytest.approx(getattr(described, field.name)), field.name
        bounded = described.num_envs * described.selfplay_workers <= space.max_num_envs
        assert bool(allowed[index]) == (bounded and float(staleness(described)) <= space.max_staleness)
