"""Evaluation over environments on the host."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_play import make
from host_simulators import Brittle
from tiny_runs import TINY
from toys import counting_env

from muzerox import Config, evaluate, training
from muzerox.agent import evaluate_run
from muzerox.envs import in_process, make_env, on_host
from muzerox.envs.gymnasium import simulators
from muzerox.envs.host import host_environment
from muzerox.errors import RunFailed
from muzerox.evaluate import Episodes, Stopped, make_episodes, make_host_episodes, summarise
from muzerox.report import Reporter
from muzerox.run_dir import RunDir
from muzerox.runtimes import make_runtime
from muzerox.types import Algorithm, Decision, HostBatch, HostEnvironment, Params, Report, Runtime

LOTTERY = "gymnasium:host_simulators:Lottery-v0"


def player(*, at_random: bool = False) -> Algorithm:
    """Takes the first legal action, or any."""

    def act(key: jax.Array, params: Params, observation: jax.Array, legal: Any, explore: bool) -> Decision:
        assert not explore
        count = observation.shape[0]
        mask = jnp.ones((count, 3), jnp.bool_) if legal is None else legal
        action = mask.argmax(-1) if not at_random else jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf))
        return Decision(action=action.astype(jnp.int32) + params["offset"], policy=mask * 1.0, value=jnp.zeros(count))

    def unused(*_: Any) -> Any:
        raise AssertionError

    return Algorithm(init=unused, act=act, value=unused, targets=unused, loss=unused)


PARAMS = {"offset": jnp.int32(0)}


def watched(env: HostEnvironment, log: list[str]) -> HostEnvironment:
    """Notes what is made, reset and closed."""

    def build(num_envs: int, seed: int) -> HostBatch:
        batch = env.make(num_envs, seed)
        log.append(f"make {num_envs}")

        def reset() -> Any:
            log.append("reset")
            return batch.reset()

        def close() -> None:
            log.append("close")
            batch.close()

        return HostBatch(reset, batch.step, close)

    return env._replace(make=build)


def test_short_episodes_are_not_counted_more_often() -> None:
    """Half of the episodes take one step and half nine: counting whatever ends first would see mostly the short."""
    log: list[str] = []
    play = make_host_episodes(watched(make(LOTTERY), log), player(), 200, num_envs=16)
    episodes = play(0, PARAMS)
    assert episodes.returns.shape == (200,)
    assert set(episodes.lengths.tolist()) == {1, 9}
    assert abs(episodes.lengths.mean() - 5.0) < 4 * 4 / np.sqrt(200)
    np.testing.assert_array_equal(episodes.returns, episodes.lengths)  # its first action is worth 1
    assert episodes.finished.all()
    assert [x.dtype for x in episodes] == [np.float32, np.int32, np.bool_]
    assert log == ["make 16", *["reset"] * 13, "close"]


def test_the_seed_decides() -> None:
    play = make_host_episodes(make(LOTTERY), player(at_random=True), 20)
    one, same, other = play(3, PARAMS), play(jax.random.key(3), PARAMS), play(4, PARAMS)
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.returns, other.returns)
    assert play(3, {"offset": jnp.int32(0)}).returns.shape == (20,)


def test_the_step_limit_leaves_episodes_unfinished() -> None:
    episodes = make_host_episodes(make(LOTTERY), player(), 30, num_envs=8, max_steps=4)(0, PARAMS)
    assert set(zip(episodes.lengths.tolist(), episodes.finished.tolist(), strict=True)) == {(1, True), (4, False)}
    assert summarise(make(LOTTERY), episodes).unfinished == int((~episodes.finished).sum())


@pytest.mark.parametrize("num_players", [1, 2])
def test_agrees_with_evaluation_on_the_device(num_players: int) -> None:
    """The toy's course and rewards follow from its first observation and the actions: where both drew the same start, the
    same must come out. With two players the opponent plays the first legal action as well.
    """
    env = counting_env(num_players)

    def first_legal(key: jax.Array, observation: jax.Array, legal: jax.Array) -> jax.Array:
        del key, observation
        return legal.argmax(-1).astype(jnp.int32)

    device = jax.jit(make_episodes(env, player(), 1500, opponent=first_legal))(jax.random.key(0), PARAMS)
    host = make_host_episodes(on_host(env), player(), 1500, opponent=first_legal, num_envs=500)(0, PARAMS)

    def outcomes(episodes: Episodes) -> set[tuple[int, float]]:
        return {(int(n), round(float(r), 4)) for n, r in zip(episodes.lengths, episodes.returns, strict=True)}

    assert outcomes(device) == outcomes(host)
    assert len(outcomes(host)) > 20
    assert (summarise(env, host).wins is not None) == (num_players == 2)


def test_two_players_take_turns_at_beginning() -> None:
    """An opponent that always errs: the agent's seat decides who moves first, and it wins from both."""
    env = on_host(make_env("pgx:tic_tac_toe"))

    def resign(key: jax.Array, observation: jax.Array, legal: jax.Array) -> jax.Array:
        del key, observation
        return jnp.argmin(legal, -1).astype(jnp.int32)  # a field that is taken, if there is one: an illegal move loses

    episodes = make_host_episodes(env, player(), 5, opponent=resign, num_envs=2)(0, PARAMS)
    assert episodes.finished.all()
    np.testing.assert_array_equal(episodes.returns, 1.0)
    np.testing.assert_array_equal(episodes.lengths, [2, 3, 2, 3, 2])


def test_plays_the_environments_of_evaluation() -> None:
    log: list[str] = []
    env = make(LOTTERY)
    other = watched(make("gymnasium:host_simulators:Counting-v0"), log)
    episodes = make_host_episodes(env._replace(make_evaluation=other.make), player(), 2)(0, PARAMS)
    assert episodes.lengths.tolist() == [3, 3]
    assert log == ["make 2", "reset", "close"]


def test_closes_what_fails() -> None:
    log: list[str] = []
    play = make_host_episodes(watched(make("gymnasium:host_simulators:Hostile-v0"), log), player(), 1)
    with pytest.raises(RunFailed, match=r"^the environment failed in an evaluation: ValueError: the simulator broke$"):
        play(0, {"offset": jnp.int32(5)})
    assert log[-1] == "close"


@pytest.mark.parametrize(("offset", "said"), [(2, "ValueError: the simulator broke"), (0, "RuntimeError: and cannot be closed")])
def test_what_cannot_be_closed_is_a_failure_and_hides_none(offset: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Brittle, "alive", [])
    spec = make("gymnasium:host_simulators:Counting-v0").spec
    env = host_environment(spec, lambda num_envs, seed: simulators("host_simulators:Brittle-v0", num_envs, seed))
    with pytest.raises(RunFailed, match=f"^the environment failed in an evaluation: {said}$"):
        make_host_episodes(env, player(), 2)(0, {"offset": jnp.int32(offset)})
    assert not Brittle.alive


def test_stops_at_the_next_step_when_asked() -> None:
    log: list[str] = []
    play = make_host_episodes(watched(make(LOTTERY), log), player(), 200, num_envs=16)
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked == 20

    with pytest.raises(Stopped):
        play(0, PARAMS, stopped)
    assert asked == 20
    assert log[-1] == "close"


def test_simulators_in_their_own_process() -> None:
    here = make("gymnasium:CartPole-v1")
    there = here._replace(make=functools.partial(in_process, "gymnasium:CartPole-v1", timeout=20.0))
    two = Algorithm(*(getattr(player(), name) for name in Algorithm._fields))
    for a, b in zip(*(make_host_episodes(env, two, 3)(1, PARAMS) for env in (here, there)), strict=True):
        np.testing.assert_array_equal(a, b)


def ordered_config(**changes: Any) -> Config:
    return Config.preset("gymnasium:host_simulators:Ordered-v0").replace({**TINY, "replay.capacity": 1024, **changes})


def order_in_evaluation(order: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation begins with an order in the folder, which its environments find before those of self-play."""
    folder.mkdir()
    monkeypatch.setenv("ORDERS", str(folder))
    orders = [order]

    def give_orders(*args: Any) -> Any:
        play = make_host_episodes(*args)

        def ordered(*args: Any) -> Episodes:
            while orders:
                (folder / orders.pop()).touch()
            return play(*args)

        return ordered

    monkeypatch.setattr(evaluate, "make_host_episodes", give_orders)


def evaluated_at(run: RunDir) -> list[int]:
    return [row["updates"] for row in run.metrics() if row["kind"] == "evaluation"]


@pytest.mark.parametrize("due", [256, 512])  # half-way, and at the end
def test_an_evaluation_that_a_signal_stops_is_owed(due: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = ordered_config(**{"train.eval_period": due}), RunDir(tmp_path / "run")
    order_in_evaluation("term", tmp_path / "orders", monkeypatch)
    first = training.train(config, run.path, quiet=True)
    assert (first.finished, first.mean_return, evaluated_at(run)) == (False, None, [])
    assert run.last_saved() == first.updates
    second = training.resume(run.path, quiet=True)
    assert second.finished
    assert evaluated_at(run) == sorted({first.updates, second.updates})
    whole = RunDir(tmp_path / "whole")
    training.train(config, whole.path, quiet=True)
    assert evaluated_at(run) == evaluated_at(whole)


def test_no_evaluation_begins_after_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the updates are made after which the first evaluation is due; on the device, where none can be stopped."""
    config, run = Config.preset("gymnax:CartPole-v1").replace({**TINY, "train.eval_period": 256}), RunDir(tmp_path / "run")

    def make_signalled(*args: Any) -> Runtime:
        runtime = make_runtime(*args)

        def run_on(state: Any, n: int, loop_count: int) -> Any:
            state, report = runtime.run(state, n, loop_count)
            if report.updates == runtime.updates_at(256):
                signal.raise_signal(signal.SIGTERM)
            return state, report

        return runtime._replace(run=run_on)

    with monkeypatch.context() as patched:
        patched.setattr(training, "make_runtime", make_signalled)
        first = training.train(config, run.path, quiet=True)
    assert (first.finished, evaluated_at(run)) == (False, [])
    second = training.resume(run.path, quiet=True)
    assert evaluated_at(run) == [first.updates, second.updates]


def test_a_signal_before_the_first_update_tells_no_time_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the rows are played that the first update waits for."""
    config, run = ordered_config(**{"replay.min_size": 1024, "train.max_env_steps": 4096}), RunDir(tmp_path / "run")
    (tmp_path / "orders").mkdir()
    (tmp_path / "orders" / "term").touch()
    monkeypatch.setenv("ORDERS", str(tmp_path / "orders"))
    result = training.train(config, run.path, quiet=True)
    assert (result.updates, result.finished, result.first_update_seconds) == (0, False, None)


def test_what_was_learnt_before_simulators_fail_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the next checkpoint is due."""
    changes = {"train.checkpoint_period": 1e6, "train.max_env_steps": 100_000, "runtime.max_failures": 2}
    config, run, folder = ordered_config(**changes), RunDir(tmp_path / "run"), tmp_path / "orders"
    folder.mkdir()
    monkeypatch.setenv("ORDERS", str(folder))
    made: list[int] = []
    watch = Reporter.training

    def order_once_learnt(reporter: Reporter, report: Report, *args: Any) -> None:
        watch(reporter, report, *args)
        made.append(report.updates)
        if report.updates >= 40:
            for number in range(20):
                (folder / f"raise-{number}").touch()

    with monkeypatch.context() as patched:
        patched.setattr(Reporter, "training", order_once_learnt)
        with pytest.raises(RunFailed, match=r"^selfplay \d failed 2 times in a row; the last: ValueError: the simulator broke$"):
            training.train(config, run.path, quiet=True)
    saved = run.last_saved()
    assert saved >= made[-1] >= 40
    for left in folder.iterdir():
        left.unlink()
    more = training.resume(run.path, changes={"train.max_env_steps": 2048}, quiet=True)
    assert more.finished
    assert more.updates >= saved
    assert next(row["updates"] for row in run.metrics() if row["kind"] == "saved") == saved


@pytest.mark.parametrize(
    ("step_in", "order", "said"),
    [("process", "kill", "its process was ended by signal SIGKILL during step"), ("thread", "raise", "the simulator broke")],
)
def test_a_training_whose_evaluation_fails_is_saved(
    step_in: str, order: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end, when self-play has nothing left to do and leaves the order to the evaluation's environments."""
    config, run = ordered_config(**{"train.eval_period": 100_000, "runtime.step_in": step_in}), RunDir(tmp_path / "run")
    order_in_evaluation(order, tmp_path / "orders", monkeypatch)
    with pytest.raises(RunFailed, match=f"^the environment failed in an evaluation: .*{said}$"):
        training.train(config, run.path, quiet=True)
    assert run.last_saved() == max(row["updates"] for row in run.metrics() if row["kind"] == "train")
    result = training.resume(run.path, quiet=True)
    assert result.finished
    assert (result.updates, result.episodes) == (run.last_saved(), 2)
    (tmp_path / "orders" / order).touch()
    with pytest.raises(RunFailed, match=f"^the environment failed in an evaluation: .*{said}$"):
        evaluate_run(run.path, episodes=2)  # where the run's simulators step


def test_a_whole_game_of_atari_by_its_score() -> None:
    """No action scores in Pong: a whole game is lost by 21."""
    env = make("ale:Pong?threads=2&max_frames=1200")
    episodes = make_host_episodes(env, player(), 2)(0, PARAMS)
    assert episodes.finished.all()
    assert (episodes.lengths == 300).all()
    assert (episodes.returns < -3).all()
