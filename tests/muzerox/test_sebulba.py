"""The whole pipeline: counts, order of rows, replay ratio, failures, snapshots, stopping."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from leftovers import threads_beside
from pipelines import HOST, make, pipeline_config
from toys import counting_env

import muzerox
from muzerox.algorithms import make_algorithm
from muzerox.envs import make_env
from muzerox.envs.host import on_host
from muzerox.errors import ConfigError, RunFailed
from muzerox.runtimes import make_runtime, placement, sebulba
from muzerox.runtimes.sebulba import RunState
from muzerox.types import HostBatch, HostEnvironment


def check_rows(state: RunState) -> int:
    """Every worker's rows follow one another as the environment's steps do; returns how many there are.

    An observation holds its episode and step, so that a row lost, repeated or out of order would show.
    """
    assert state.replay is not None
    storage, counts = jax.tree.map(np.asarray, (state.replay.storage, state.replay.count))
    rows, columns = storage.action.shape
    num_envs = columns // len(counts)
    for column in range(columns):
        count = int(counts[column // num_envs])
        kept = range(max(0, count - rows), count)
        for t in kept:
            episode, step = np.round(storage.observation[t % rows, column, :2] * [100, 3])
            after, final = np.round(storage.final_observation[t % rows, column, :2] * [100, 3])
            assert (after, final) == (episode, step + 1)
            if t + 1 < count:
                following = np.round(storage.observation[(t + 1) % rows, column, :2] * [100, 3])
                ended = storage.terminated[t % rows, column] | storage.truncated[t % rows, column]
                assert following[1] == 0 if ended else tuple(following) == (episode, step + 1)
    return int(counts.sum())


@pytest.mark.parametrize(
    ("players", "changes"),
    [(1, {}), (2, {"train__reanalyze_fraction": 0.5, "runtime__cpu_actors": 2, "replay__kind": "uniform"})],
)
def test_a_run_makes_the_steps_and_updates_it_says(players: int, changes: dict[str, Any]) -> None:
    config = pipeline_config(train__max_env_steps=400, train__random_action=0.1, **changes)
    before = threading.enumerate()
    runtime = make(config, on_host(counting_env(players)))
    state = runtime.init(jax.random.key(0))
    last = runtime.updates_at(400)
    updates, waits = 0, set()
    while updates < last:
        state, report = runtime.run(state, 1, min(config.runtime.loop_count, last - updates))
        updates = report.updates
        waits |= set(report.pipeline)
        assert np.isfinite(list(report.metrics.values())).all()
        allowed = sebulba.pipeline.make_pace(config).steps_before(updates + sebulba.pipeline.make_window(config))
        assert report.env_steps < allowed + 4
    assert updates == last
    assert int(state.learner.updates) == last
    saved = runtime.snapshot(state)
    runtime.close()
    assert threads_beside(before) == []
    # Exactly the rows that the last update needs, of four environments each.
    needed = sebulba.pipeline.make_pace(config).steps_before(last)
    assert report.env_steps == state.env_steps == saved.env_steps == -(-needed // 4) * 4
    assert check_rows(saved) * 4 == saved.env_steps
    assert 0.0 <= report.pipeline["batch_staleness_mean"] <= sebulba.pipeline.make_window(config)
    names = ("context_put", "search_put", "search_get", "batch_put", "batch_get", "step_put", "parameters_get")
    assert {f"wait_{name}_seconds" for name in names} <= waits


def test_roles_with_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    changes = {"runtime__role_threads": 1, "runtime__acting_devices": 2, "train__reanalyze_fraction": 0.5}
    config = pipeline_config(train__max_env_steps=600, runtime__learning_devices=2, **changes)
    acting, searching, learning = placement.assign(config.runtime)
    assert acting + learning == list(dict.fromkeys(acting + learning)), "four devices"
    assert searching == learning[:1]
    assert len({device.client for device in acting + learning}) == 3  # an update's batch is split within one of them
    assert all(placement.is_own(device) for device in acting + learning)
    assert not set(jax.devices()) & set(acting + learning)
    assert placement.assign(config.runtime) == (acting, searching, learning)
    assert "NPROC" not in os.environ
    runtime = make(config)
    state, report = runtime.run(runtime.init(jax.random.key(0)), 20)
    assert report.updates == 60
    assert {d for x in jax.tree.leaves(state.learner) for d in x.devices()} == {jax.devices()[0]}
    saved = jax.tree.map(np.asarray, runtime.snapshot(state).replace(key=None))
    runtime.close()
    assert check_rows(saved) * 4 == saved.env_steps
    again = make(config)  # and it goes on from there
    _, report = again.run(saved.replace(key=jax.random.key(1)), 5)
    again.close()
    assert report.updates == 75


def test_a_run_with_threads_of_its_roles_is_evaluated_saved_and_resumed(tmp_path: Path) -> None:
    config = pipeline_config(
        train__max_env_steps=300, train__eval_period=150, train__eval_episodes=2, runtime__role_threads=1
    ).replace("env", "gymnasium:CartPole-v1")
    first = muzerox.train(config, out=tmp_path / "run", quiet=True)
    assert first.env_steps >= 300
    assert first.mean_return is not None
    assert first.mean_return >= 1.0
    more = muzerox.resume(tmp_path / "run", changes={"train.max_env_steps": 600, "runtime.role_threads": 0}, quiet=True)
    assert more.env_steps >= 600
    assert more.updates > first.updates


def test_processor_seconds_of_simulators_in_processes_are_reported() -> None:
    config = pipeline_config(train__max_env_steps=100_000, runtime__step_in="process").replace("env", "gymnasium:CartPole-v1")
    env = make_env(config.env)
    runtime = make_runtime(config, env, make_algorithm(config, env.spec))
    state = runtime.init(jax.random.key(0))
    state, first = runtime.run(state, 1)
    used = 0.0
    for _ in range(30):  # a process counts its time in hundredths of a second
        state, report = runtime.run(state, 20)
        used += report.pipeline["cpu_simulators_seconds"]
    runtime.close()
    assert first.pipeline["cpu_simulators_seconds"] > 0.2  # two interpreters started
    assert used > 0.0


def test_a_snapshot_goes_on_where_it_was_taken() -> None:
    config = pipeline_config(train__max_env_steps=10_000)
    runtime = make(config)
    state, report = runtime.run(runtime.init(jax.random.key(0)), 4)
    saved = jax.tree.map(
        lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x), runtime.snapshot(state)
    )
    runtime.close()
    again = make(config)
    like = jax.eval_shape(again.init, jax.random.key(0))
    assert jax.tree.map(lambda x: x.shape, like) == jax.tree.map(np.shape, saved)
    state, resumed = again.run(saved, 2)
    assert resumed.updates == report.updates + 6
    assert resumed.env_steps >= saved.env_steps
    after = again.snapshot(state)
    again.close()
    assert check_rows(after) * 4 == after.env_steps
    # Where the threads of the first run stopped, episodes were cut.
    for worker, count in enumerate(saved.replay.count):
        columns = slice(worker * 4, worker * 4 + 4)
        ended = after.replay.storage.terminated | after.replay.storage.truncated
        assert ended[count - 1, columns].all()


class Flaky:
    """Environments that fail at random moments: by exceptions, by leaving, and by hanging until released."""

    def __init__(self, *, failures: int, chance: float, kinds: tuple[str, ...]):
        self.left, self.chance, self.kinds = failures, chance, kinds
        self.hung = threading.Event()
        self._lock, self._random = threading.Lock(), random.Random(0)

    def _draw(self) -> str | None:
        with self._lock:
            if self.left and self._random.random() < self.chance:
                self.left -= 1
                return self._random.choice(self.kinds)
            return None

    def environment(self) -> HostEnvironment:
        def build(num_envs: int, seed: int) -> HostBatch:
            inner = HOST.make(num_envs, seed)

            def step(action: Any) -> Any:
                fails = self._draw()
                if fails == "raise before":
                    raise ValueError("the simulator broke")
                if fails == "exit":
                    sys.exit("the simulator left")
                timestep = inner.step(action)
                if fails == "raise after":
                    raise ValueError("the simulator broke after it had stepped")
                if fails == "hang":
                    self.hung.wait(60)
                return timestep

            return inner._replace(step=step)

        return HostEnvironment(HOST.spec, build)


def check_with_failures(failures: int, steps: int, chance: float, kinds: tuple[str, ...], **changes: Any) -> None:
    """All failures are reported, and the ring holds every row that was counted, once; counts, order and threads are right."""
    # A step that a busy machine makes wait for a second is a failure, too, which nobody asked for.
    config = pipeline_config(train__max_env_steps=steps, runtime__step_timeout=1.0, replay__capacity=2 * steps, **changes)
    flaky = Flaky(failures=failures, chance=chance, kinds=kinds)
    before = threading.enumerate()
    runtime = make(config, flaky.environment())
    state = runtime.init(jax.random.key(0))
    last = runtime.updates_at(steps)
    seen = 0.0
    updates = 0
    while updates < last:
        state, report = runtime.run(state, 1, min(config.runtime.loop_count, last - updates))
        seen += report.pipeline.get("failures", 0.0)
        updates = report.updates
    saved = runtime.snapshot(state)
    flaky.hung.set()
    runtime.close()
    assert (flaky.left, seen, updates) == (0, failures, last)
    needed = sebulba.pipeline.make_pace(config).steps_before(last)
    assert saved.env_steps == -(-needed // 4) * 4
    assert check_rows(saved) * 4 == saved.env_steps, "the ring holds every row that was counted, once"
    assert threads_beside(before, seconds=10) == []


def test_failures_of_simulators_cost_no_row_and_no_deadlock() -> None:
    check_with_failures(8, 1200, 0.05, ("raise before", "raise after", "exit", "hang"))


@pytest.mark.slow
def test_fifty_failures_in_one_run() -> None:
    check_with_failures(50, 12_000, 0.03, ("raise before", "raise after", "exit", "hang"))


@pytest.mark.slow
def test_fifty_failures_of_processes_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulators in processes of their own that raise, are killed and hang, at random moments of one run."""
    monkeypatch.setenv("ORDERS", str(tmp_path))
    env = make_env("gymnasium:host_simulators:Ordered-v0")
    steps, failures = 40_000, 50
    # Longer than tests beside this one keep a step waiting: after 2 s, a step was once given up that nobody had told to hang.
    changes = {"runtime__step_in": "process", "runtime__step_timeout": 4.0, "runtime__num_envs": 8, "replay__capacity": 2 * steps}
    config = pipeline_config(**changes, train__max_env_steps=steps, runtime__loop_count=8).replace("env", env.spec.id)
    runtime = make_runtime(config, env, make_algorithm(config, env.spec))
    orders = [f"{kind}-{i}" for i, kind in enumerate(random.Random(0).choices(("raise", "kill", "hang"), k=failures))]
    last = runtime.updates_at(steps)
    state, seen, updates = runtime.init(jax.random.key(0)), 0.0, 0
    while updates < last:
        while orders and len(orders) > failures * (1 - 1.2 * updates / last):
            (tmp_path / orders.pop()).touch()
        state, report = runtime.run(state, 1, min(8, last - updates))
        seen, updates = seen + report.pipeline.get("failures", 0.0), report.updates
    saved = runtime.snapshot(state)
    runtime.close()
    assert (orders, list(tmp_path.iterdir()), seen, updates) == ([], [], failures, last)
    needed = sebulba.pipeline.make_pace(config).steps_before(last)
    assert saved.env_steps == int(saved.replay.count.sum()) * 8 == -(-needed // 8) * 8
    # A simulator shows its steps: what a step led to is what the next one starts from, or zero after an end.
    storage = jax.tree.map(np.asarray, saved.replay.storage)
    for worker, count in enumerate(saved.replay.count):
        rows = jax.tree.map(lambda x, c=count, w=worker: x[:c, w * 8 : (w + 1) * 8], storage)
        goes_on = ~(rows.terminated | rows.truncated)[:-1]
        np.testing.assert_array_equal(rows.final_observation[..., 0], rows.observation[..., 0] + 1)
        np.testing.assert_array_equal(rows.observation[1:, :, 0], np.where(goes_on, rows.final_observation[:-1, :, 0], 0))


def test_contexts_and_batches_survive_failures_of_those_who_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pipeline_config(train__max_env_steps=600)
    runtime = make(config)
    chance, numbers = random.Random(0), []
    put, search = sebulba.workers.BoundedQueue.put, sebulba.workers.SearchBody._search

    def failing_put(queue: Any, item: Any) -> None:
        if chance.random() < 0.2:
            raise ValueError("before the queue had it")
        put(queue, item)
        if queue.name == "batch":
            numbers.append(item.number)

    def failing_search(body: Any, context: Any) -> Any:
        if chance.random() < 0.2:
            raise ValueError("in the search")
        return search(body, context)

    monkeypatch.setattr(sebulba.workers.BoundedQueue, "put", failing_put)
    monkeypatch.setattr(sebulba.workers.SearchBody, "_search", failing_search)
    state = runtime.init(jax.random.key(0))
    state, report = runtime.run(state, 1, runtime.updates_at(600))
    runtime.close()
    assert report.pipeline["failures"] > 5
    assert report.updates == runtime.updates_at(600)
    assert sorted(numbers) == list(range(1, report.updates + 1)), "each context became a batch, once"


def test_environments_that_never_work_end_training_with_one_line() -> None:
    def build(num_envs: int, _: int) -> HostBatch:
        raise OSError(f"no licence for {num_envs} simulators")

    runtime = make(pipeline_config(runtime__max_failures=3), HostEnvironment(HOST.spec, build))
    with pytest.raises(RunFailed, match="failed 3 times in a row; the last: OSError: no licence for 4 simulators"):
        runtime.run(runtime.init(jax.random.key(0)), 1)
    runtime.close()


def test_an_interrupt_ends_a_wait_for_slow_environments() -> None:
    def build(num_envs: int, seed: int) -> HostBatch:
        inner = HOST.make(num_envs, seed)

        def step(action: Any) -> Any:
            time.sleep(0.2)
            return inner.step(action)

        return inner._replace(step=step)

    runtime = make(pipeline_config(replay__min_size=1024), HostEnvironment(HOST.spec, build))
    timer = threading.Timer(1.0, runtime.interrupt)
    timer.start()
    start = time.monotonic()
    _, report = runtime.run(runtime.init(jax.random.key(0)), 1)
    runtime.close()
    assert report.updates == 0
    assert time.monotonic() - start < 10  # the rows alone take 25 s


def test_an_interrupt_is_heeded_that_comes_before_there_is_a_pipeline() -> None:
    runtime = make(pipeline_config(replay__min_size=1024))
    state = runtime.init(jax.random.key(0))
    runtime.interrupt()
    _, report = runtime.run(state, 1)
    runtime.close()
    assert report.updates == 0


def test_prefill_needs_no_self_play_before_the_first_update() -> None:
    config = pipeline_config(replay__min_size=512)
    runtime = make(config)
    state = runtime.prefill(runtime.init(jax.random.key(0)))
    assert state.env_steps == 512
    _, report = runtime.run(state, 1)
    runtime.close()
    assert report.updates == 3


def test_host_environments_do_not_run_under_anakin() -> None:
    with pytest.raises(ConfigError, match=r"runtime.kind = 'anakin': toy:counting-1 runs on the host.*nearest valid: sebulba"):
        make(pipeline_config(runtime__kind="anakin"))
