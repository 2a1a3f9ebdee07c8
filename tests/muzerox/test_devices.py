"""Eight devices, in processes of their own: XLA is told how many to pretend when it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from muzerox.runtimes import placement

SEBULBA = """
from toys import counting_env
from muzerox.envs.host import on_host

config = small_config("gymnasium:CartPole-v1", runtime__kind="sebulba", runtime__selfplay_workers=4, replay__capacity=4096,
    runtime__acting_devices=2, runtime__searching_devices=2, runtime__learning_devices=4, train__reanalyze_fraction=0.5)
env = on_host(counting_env())
runtime = make_runtime(config, env, make_algorithm(config, env.spec))
state, report = runtime.run(runtime.init(jax.random.key(0)), 40)
devices = sorted(d.id for d in jax.tree.leaves(state.learner.params)[0].sharding.device_set)
print(json.dumps({"updates": report.updates, "devices": devices, "metrics": report.metrics}))
runtime.close()
"""

ANAKIN = """
from muzerox.envs import make_env
from muzerox.learner import make_update
from muzerox.parallel import over
from muzerox.runtimes.placement import make_mesh

env = make_env(ENV)
found = []
for devices in (1, 8):
    config = small_config(ENV, runtime__kind="anakin", runtime__num_devices=devices, runtime__num_envs=16, train__batch_size=32,
        replay__capacity=1024, runtime__loop_count=1, train__reanalyze_fraction=REANALYZED, search__split=8 // devices,
        **SETTINGS)
    algorithm = make_algorithm(config, env.spec)
    runtime, mesh = make_runtime(config, env, algorithm), make_mesh(devices)
    state, rows = runtime.init(jax.random.key(7)), []
    for _ in range(8):
        state, report = runtime.run(state, 1)
        rows.append({"env_steps": report.env_steps, **report.metrics})
    found.append({"rows": rows, "devices": len(state.replay.priority.sharding.device_set)})
    # What one device computes, without the parts that one after the other would not count.
    whole = over(mesh, make_algorithm(config.replace("search.split", 1), env.spec))
    now = state.actors.timestep
    act = jax.jit(lambda key, params, observation, legal: whole.act(key, params, observation, legal, True))
    update = jax.jit(make_update(config, env.spec, whole, mesh))
    legal = now.legal if env.spec.has_legal else None
    for name, program in (
        ("act", act.lower(state.key, state.learner.params, now.observation, legal)),
        ("update", update.lower(state.key, state.learner, state.replay)),
    ):
        found[-1][name] = program.compile().cost_analysis()["flops"]
print(json.dumps(found))
"""


THOROUGH = (pytest.mark.slow, pytest.mark.thorough)
BY_MCTX = {"search__algorithm": "muzero", "search__engine": "mctx"}


def on_eight_devices(program: str) -> Any:
    """What ``program`` prints, read as JSON."""
    head = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax
from toys import small_config
from muzerox.algorithms import make_algorithm
from muzerox.compilation import enable_cache
from muzerox.runtimes import make_runtime
enable_cache()
"""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"  # of a flag given twice, the last counts
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", head + program], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sebulba_where_two_devices_act_two_search_and_four_learn() -> None:
    found = on_eight_devices(SEBULBA)
    assert found["updates"] == 80
    assert found["devices"] == [4, 5, 6, 7]
    assert found["metrics"]["loss"] > 0


@pytest.mark.parametrize(
    ("env", "reanalyzed", "settings"),
    [
        pytest.param("gymnax:CartPole-v1", 0.25, {}, id="mlp"),
        pytest.param("pgx:tic_tac_toe", 0.25, {"network__kind": "resnet", "network__width": 8}, id="resnet", marks=THOROUGH),
        pytest.param("gymnax:CartPole-v1", 0.0, BY_MCTX, id="mctx", marks=THOROUGH),
    ],
)
def test_anakin_on_eight_devices_learns_what_it_learns_on_one_in_eight_parts(
    env: str, reanalyzed: float, settings: dict[str, Any]
) -> None:
    """And each device does about an eighth of it."""
    given = f"ENV, REANALYZED, SETTINGS = {env!r}, {reanalyzed}, {settings!r}\n"
    one, eight = on_eight_devices(given + ANAKIN)
    assert (one["devices"], eight["devices"]) == (1, 8)
    for name in ("act", "update"):
        assert eight[name] < one[name] / 4.0, (name, eight[name] / one[name])
    for a, b in zip(one["rows"], eight["rows"], strict=True):
        assert a["env_steps"] == b["env_steps"]
        for name in ("loss", "policy_loss", "value_loss", "reward_loss", "grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), name


STARTED = """
import jax
from muzerox.errors import ConfigError
from muzerox.runtimes.placement import make_mesh, offer_cpu_devices

found = []
for count in (len(os.sched_getaffinity(0)) + 1, 2, 1):
    offer_cpu_devices(count)
found.append(len(jax.devices()))
offer_cpu_devices(3)  # JAX has started
try:
    make_mesh(3)
except ConfigError as error:
    found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a core")
def test_a_cpu_gives_a_device_a_core_if_it_is_asked_before_jax_starts() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    code = f"import json, os\n{STARTED}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    devices, error = json.loads(process.stdout)
    assert devices == 2  # neither more than there are cores, nor one
    expected = "this machine has 2" if len(os.sched_getaffinity(0)) == 2 else "JAX has started with 2"
    assert "runtime.num_devices = 3" in error
    assert expected in error


def test_devices_that_xla_was_told_of_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(jax.config, "update", lambda *change: asked.append(change))
    monkeypatch.setattr(placement, "available_cores", lambda: [0, 1, 2, 3])
    placement.offer_cpu_devices(2)  # conftest.py has told XLA
    assert asked == []
    monkeypatch.delenv("XLA_FLAGS")
    placement.offer_cpu_devices(2)
    assert asked == [("jax_num_cpu_devices", 2)]
