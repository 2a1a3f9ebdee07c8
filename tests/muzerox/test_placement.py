"""Which devices and threads have which role, and that none decides otherwise."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import small_config

from muzerox.algorithms import make_algorithm
from muzerox.allocation import available_cores
from muzerox.config import Config
from muzerox.envs import make_env
from muzerox.errors import ConfigError
from muzerox.learner import LearnerState, init_learner
from muzerox.replay import Sample
from muzerox.runtimes import placement
from muzerox.runtimes.sebulba import ring
from muzerox.runtimes.sebulba.programs import make_programs

TASKS = Path("/proc/self/task")


def sebulba_config(**changes: Any) -> Config:
    return small_config("gymnasium:CartPole-v1", runtime__kind="sebulba", **changes)


@pytest.mark.parametrize("threads", [1, 2])
def test_programs_of_roles_decide_what_those_of_all_threads_decide(threads: int) -> None:
    config = sebulba_config(runtime__role_threads=threads)
    env = make_env(config.env)
    algorithm = make_algorithm(config, env.spec)
    acting, _, learning = placement.assign(config.runtime)
    shardings = placement.learner_shardings(learning)
    params = algorithm.init(jax.random.key(0))
    observation = np.random.default_rng(0).random((8, *env.spec.observation_shape), np.float32).astype(env.spec.observation_dtype)
    legal = np.ones((8, env.spec.num_actions), np.bool_) if env.spec.has_legal else None

    def program(device: jax.Device, own: int | None) -> tuple[Any, tuple]:
        programs = make_programs(config, env.spec, algorithm, *shardings, searching_apart=False, threads=own)
        data, there = jax.device_put((jax.random.key_data(jax.random.key(1)), jax.tree.leaves(params)), device)
        return programs.choose, (data, np.uint32(3), there, observation, legal)

    def choose(device: jax.Device, own: int | None) -> Any:
        function, arguments = program(device, own)
        return jax.tree.map(np.asarray, function(*arguments))

    def scheduled(own: int | None) -> str:
        function, arguments = program(acting[0], own)
        return function.lower(*arguments).compile().as_text()

    mine, theirs = choose(acting[0], threads), choose(jax.devices()[0], None)
    np.testing.assert_array_equal(mine.action, theirs.action)
    np.testing.assert_allclose(mine.policy, theirs.policy, atol=1e-5)
    assert (scheduled(threads) == scheduled(None)) == (threads > 1), "one thread has an order of its own, several XLA's"


def test_the_learner_makes_the_targets_that_who_searches_would_make() -> None:
    config = sebulba_config(runtime__loop_count=2)
    env = make_env(config.env)
    algorithm = make_algorithm(config, env.spec)
    shardings = placement.learner_shardings(jax.devices()[:1])
    by_learner, by_search = (
        make_programs(config, env.spec, algorithm, *shardings, searching_apart=apart) for apart in (False, True)
    )
    size, rng = config.train.batch_size, np.random.default_rng(0)
    rows = ring.init(config, env.spec).storage
    storage = rows.replace(
        observation=rng.normal(size=rows.observation.shape).astype(np.float32),
        final_observation=rng.normal(size=rows.observation.shape).astype(np.float32),
        reward=rng.normal(size=rows.reward.shape).astype(np.float32),
        truncated=rng.random(rows.reward.shape) < 0.1,
        policy=rng.dirichlet(np.ones(env.spec.num_actions), rows.reward.shape).astype(np.float32),
    )
    start = Sample(np.arange(size, dtype=np.int32) % 8, np.zeros(size, np.int32), np.ones(size, np.float32))
    batch, reread = by_search.gather(storage, start)

    def learner() -> LearnerState:
        online, target = (init_learner(jax.random.key(seed), config, algorithm) for seed in (0, 1))
        return online.replace(target_params=target.params)  # targets are theirs, not the online ones'

    assert by_learner.target is None
    assert by_search.target is not None
    target_leaves = jax.tree.leaves(learner().target_params)
    made = by_search.target(jax.random.key_data(jax.random.key(2)), np.uint32(0), target_leaves, batch, reread)
    ours, learned = by_learner.learn(learner(), ((batch, None),) * 2, np.int32(2))
    theirs, also_learned = by_search.learn(learner(), (made,) * 2, np.int32(2))
    np.testing.assert_allclose(learned.priority, also_learned.priority, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours.params, theirs.params)


@pytest.mark.skipif(not TASKS.exists(), reason="counts what threads do by Linux's /proc")
@pytest.mark.parametrize("env_id", ["gymnasium:CartPole-v1", "gymnasium:Acrobot-v1"])
def test_a_search_on_one_thread_is_never_handed_to_it(env_id: str) -> None:
    """XLA's executor would, as soon as more than eight operations are ready at once: self-play would wait for it to wake up."""
    changes = {"runtime.role_threads": 1, "runtime.num_envs": 16, "search.num_simulations": 16, "network.width": 64}
    config = Config.preset("gymnasium:CartPole-v1").replace(changes | {"env": env_id})
    env = make_env(config.env)
    algorithm = make_algorithm(config, env.spec)
    before = set(TASKS.iterdir())
    device = placement.cpu_devices(f"acting in {env_id}", 1, 1, asynchronous=False)[0]
    own = set(TASKS.iterdir()) - before
    assert own
    shardings = placement.learner_shardings([device])
    choose = make_programs(config, env.spec, algorithm, *shardings, searching_apart=False, threads=1).choose
    leaves = jax.tree.leaves(algorithm.init(jax.random.key(0)))
    data, leaves = jax.device_put((jax.random.key_data(jax.random.key(1)), leaves), device)
    observation = np.zeros((16, *env.spec.observation_shape), np.float32)

    def woken() -> int:
        text = [(task / "status").read_text() for task in own]
        return sum(int(line.split()[1]) for status in text for line in status.splitlines() if "voluntary_ctxt" in line)

    jax.block_until_ready(choose(data, np.uint32(0), leaves, observation, None))
    time.sleep(0.2)  # the thread that compiled goes to sleep
    asleep = woken()
    for number in range(50):
        jax.block_until_ready(choose(data, np.uint32(number), leaves, observation, None))
    assert woken() == asleep


@pytest.mark.parametrize(("name", "value"), [("role_threads", 1000), ("acting_devices", 1000), ("learning_devices", 8)])
def test_roles_get_no_more_threads_than_there_are_cores(name: str, value: int) -> None:
    changes = {"runtime__role_threads": 1, "train__batch_size": 8, f"runtime__{name}": value}
    cores = len(available_cores())
    config = sebulba_config(**changes)
    if value <= cores:
        pytest.skip("a machine of eight cores or more")
    with pytest.raises(ConfigError, match=f"this machine has {cores} cores"):
        placement.assign(config.runtime)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [((1, 1, 1), ([0], [0], [1])), ((1, 1, 2), ([0], [0], [0, 1])), ((2, 2, 2), ([0, 1], [0, 1], [0, 1]))],
)
def test_roles_share_devices_only_where_they_must(kind: tuple[int, int, int], expected: Any) -> None:
    names = ("runtime__acting_devices", "runtime__searching_devices", "runtime__learning_devices")
    runtime = sebulba_config(**dict(zip(names, kind, strict=True))).runtime
    found = placement.assign(runtime)  # the tests have two devices
    assert [[device.id for device in role] for role in found] == list(expected)
    with pytest.raises(ConfigError, match="this machine has 2"):
        placement.assign(sebulba_config(runtime__acting_devices=3).runtime)
