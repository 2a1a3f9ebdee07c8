"""The fused program: pace of playing and learning, portions, devices, and no compilation after the first."""

from __future__ import annotations

import functools
import logging
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import counting_env, idle_algorithm, small_config

from muzerox import replay
from muzerox.algorithms import make_algorithm
from muzerox.envs import make_env
from muzerox.runtimes import anakin
from muzerox.types import Batch, LossOutput, Params, Report, Runtime, Skips, Targets

PACES = [  # environments, batch, ratio, updates a dispatch
    (4, 8, 4.0, 3),
    (4, 8, 0.5, 2),
    (3, 8, 0.3, 1),
    (5, 8, 0.3, 4),
    (16, 2, 1.0, 5),  # more environments than sequences in a batch
    (16, 2, 4.0, 7),  # most updates go without a step
    (3, 7, 1.7, 6),
]


@pytest.mark.parametrize(("num_envs", "batch", "ratio", "loop_count"), PACES)
def test_the_replay_ratio_is_kept(num_envs: int, batch: int, ratio: float, loop_count: int) -> None:
    config = small_config(
        "toy:counting",
        runtime__num_envs=num_envs,
        runtime__loop_count=loop_count,
        train__batch_size=batch,
        train__replay_ratio=ratio,
        replay__capacity=50 * num_envs,
        replay__min_size=37,
    )
    runtime = anakin.build(config, counting_env(), idle_algorithm(config))
    state = runtime.init(jax.random.key(0))
    warm_up = num_envs * max(-(-37 // num_envs), config.sequence_length)  # rows for 37 transitions and for one sequence
    exact = Fraction(str(ratio))
    for dispatches in range(1, 7):
        state, report = runtime.run(state, 3)
        assert report.updates == 3 * dispatches * loop_count
        assert report.env_steps % num_envs == 0
        assert int(state.replay.filled) == min(report.env_steps // num_envs, 50)
        # The first update follows the warm-up at once; each later one is paid for by steps made before it.
        due = (report.updates - 1) * batch / exact
        assert due - num_envs < report.env_steps - warm_up <= due
        assert runtime.updates_at(report.env_steps) <= report.updates < runtime.updates_at(report.env_steps + 1)
    assert runtime.updates_at(1) == runtime.updates_at(warm_up) == 1


@functools.cache
def cartpole(loop_count: int, num_devices: int = 1, placement: str = "device", split: int = 1) -> Runtime:
    config = small_config(
        runtime__loop_count=loop_count,
        runtime__num_devices=num_devices,
        search__split=split,
        replay__placement=placement,
        train__replay_ratio=1.5,
    )
    env = make_env("gymnax:CartPole-v1")
    return anakin.build(config, env, make_algorithm(config, env.spec))


def _run(runtime: Runtime, calls: list[Any]) -> tuple[Any, list[Report]]:
    """Calls of n dispatches, or of (n, updates a dispatch)."""
    state, reports = runtime.init(jax.random.key(7)), []
    for call in calls:
        state, report = runtime.run(state, *(call if isinstance(call, tuple) else (call,)))
        reports.append(report)
    return state, reports


def _numbers(state: Any) -> list[np.ndarray]:
    def plain(leaf: jax.Array) -> np.ndarray:
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    return [plain(leaf) for leaf in jax.tree.leaves(state)]


def test_portions_change_nothing() -> None:
    """Sixteen updates as 2 dispatches of 8, 4 of 4 (in two calls), 16 of 1, and 3 of 5 and 1: the same state, bit for bit."""
    runtimes = [cartpole(8), cartpole(1)]  # built together, they compile side by side
    reference, (report,) = _run(runtimes[0], [2])
    assert report.updates == 16
    for runtime, calls in ((runtimes[0], [(3, 4), (1, 4)]), (runtimes[1], [16]), (runtimes[1], [(3, 5), 1])):
        state, reports = _run(runtime, calls)
        assert (reports[-1].updates, reports[-1].env_steps) == (report.updates, report.env_steps)
        assert sum(r.episodes for r in reports) == report.episodes
        for a, b in zip(_numbers(reference), _numbers(state), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_replay_in_the_memory_of_the_host_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []

    def compute_on(function: Any, **options: Any) -> Any:
        computed.append(options["compute_type"])
        return by_host(function, **options)

    by_host = replay.compute_on
    monkeypatch.setattr(replay, "compute_on", compute_on)
    near, (report,) = _run(cartpole(8), [2])
    assert not computed
    far, (report_far,) = _run(cartpole(8, placement="host"), [2])
    assert set(computed) == {"device_host"}  # its rows are written and read there, by the program that trains
    assert report == report_far
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(far.replay.storage)} == {"pinned_host"}
    assert far.replay.priority.sharding.memory_kind == near.replay.priority.sharding.memory_kind == "device"
    for a, b in zip(_numbers(near), _numbers(far), strict=True):
        np.testing.assert_array_equal(a, b)


def test_two_devices_learn_what_one_learns_in_two_parts() -> None:
    runtimes = [cartpole(1, split=2), cartpole(1, num_devices=2)]
    (one, losses_one), (two, losses_two) = (_run(runtime, [1] * 4) for runtime in runtimes)
    for a, b in zip(losses_one, losses_two, strict=True):
        assert a.env_steps == b.env_steps
        for name in ("loss", "policy_loss", "value_loss", "reward_loss", "grad_norm"):
            assert b.metrics[name] == pytest.approx(a.metrics[name], rel=1e-3, abs=1e-5), name
    assert len(two.replay.priority.sharding.device_set) == 2
    assert two.replay.storage.observation.addressable_shards[0].data.shape[1] == 2  # of four environments
    assert two.learner.updates.sharding.is_fully_replicated
    np.testing.assert_array_equal(one.replay.storage.action, two.replay.storage.action)


@pytest.mark.parametrize("placement", ["device", "host"])
def test_rows_that_stand_in_for_the_first_change_no_pace(placement: str) -> None:
    """Timing skips playing the rows that the first update waits for; what comes after is due when it would have been."""
    runtime = cartpole(8, placement=placement)
    _, played = _run(runtime, [1, 1])
    state = runtime.prefill(runtime.init(jax.random.key(7)))
    assert int(state.replay.filled) == int(state.rows) == int(state.replay.cursor) > 0
    assert int(state.learner.updates) == 0
    np.testing.assert_allclose(np.asarray(state.replay.storage.policy)[: int(state.rows)].sum(-1), 1.0, rtol=1e-6)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.replay.storage)}
    assert kinds == {"device" if placement == "device" else "pinned_host"}
    for report in played:
        state, timed = runtime.run(state, 1)
        assert (timed.env_steps, timed.updates) == (report.env_steps, report.updates)
        assert timed.skips.total == 0
        assert np.isfinite(timed.metrics["loss"])


def test_running_again_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    runtime = cartpole(1)
    state, _ = _run(runtime, [1, 1])
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        state, _ = runtime.run(state, 1)
        state, _ = runtime.run(state, 5)
        state, _ = runtime.run(state, 2, 3)  # another number of updates a dispatch
        assert [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()] == []
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))  # the log does show a compilation
        assert any("ompil" in record.getMessage() for record in caplog.records)


def test_the_state_is_donated() -> None:
    runtime = cartpole(1)
    before, _ = _run(runtime, [1])
    runtime.run(before, 1)
    assert before.replay.storage.observation.is_deleted()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.learner.params))


def test_puct_trains() -> None:
    config = small_config("toy:counting-2", search__algorithm="muzero")
    env = counting_env(2)
    runtime = anakin.build(config, env, make_algorithm(config, env.spec))
    state = runtime.init(jax.random.key(0))
    before = jax.device_get(state.learner.params)
    state, report = runtime.run(state, 4)
    assert report.updates == 8
    assert report.skips.total == 0
    assert report.episodes > 0
    assert all(np.isfinite(value) for value in report.metrics.values())
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, jax.device_get(state.learner.params))
    assert all(jax.tree.leaves(changed))


def test_skipped_updates_are_counted_and_their_losses_left_out() -> None:
    """A dynamic scale that starts far too high: the first updates overflow, the report says how many."""
    config = small_config("toy:counting", precision__loss_scale="dynamic", precision__initial_loss_scale=2.0**30)
    algorithm = idle_algorithm(config)

    def loss(params: Params, batch: Batch, targets: Targets) -> LossOutput:
        output = algorithm.loss(params, batch, targets)
        narrow = output.loss.astype(jnp.float16)  # and so is its gradient, which is the scale over the batch
        return output.replace(loss=narrow.astype(jnp.float32))

    runtime = anakin.build(config, counting_env(), algorithm._replace(loss=loss))
    state, report = runtime.run(runtime.init(jax.random.key(0)), 10)
    assert report.updates == 20
    assert 2 <= report.skips.total < 20
    assert report.skips == Skips(20, report.skips.total, report.skips.total, 0, report.skips.total)
    assert float(state.learner.loss_scale.scale) == 2.0 ** (30 - report.skips.total)
    assert all(np.isfinite(value) for value in report.metrics.values())

    state, skips = runtime.init(jax.random.key(0)), Skips()
    for n, count in ((1, 1), (3, 2), (1, 5), (2, 4)):  # however they are portioned out
        state, part = runtime.run(state, n, count)
        skips = skips.then(part.skips)
    assert skips == report.skips
