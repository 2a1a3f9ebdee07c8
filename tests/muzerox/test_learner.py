"""From self-play to targets against NumPy walks over the recorded rows; masks, reanalysis and the target network."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import Played, Walk, counting_env, first_end, n_step_target, random_params, self_play, small_config

from muzerox import replay
from muzerox.algorithms import make_algorithm
from muzerox.config import Config
from muzerox.envs import make_env
from muzerox.learner import init_learner, make_batch, make_optimizer, make_update
from muzerox.replay import ReplayState, Sample
from muzerox.types import Algorithm, Batch, Environment, Params, Targets

E, ROWS = 3, 40
ENVIRONMENTS = {
    "gymnax:CartPole-v1": lambda: make_env("gymnax:CartPole-v1"),
    "pgx:tic_tac_toe": lambda: make_env("pgx:tic_tac_toe"),
    "counting": lambda: counting_env(1),
    "counting, two players": lambda: counting_env(2),
    "counting, random actions": lambda: counting_env(2),
}


class Scene(NamedTuple):
    """A ring filled by self-play, and the rows as they were played."""

    config: Config
    env: Environment
    algorithm: Algorithm
    params: Params
    played: Played
    ring: ReplayState


@functools.cache
def scene(name: str) -> Scene:
    # A ring of 28 rows takes 40: it wraps around.
    config = small_config(
        replay__capacity=28 * E,
        runtime__num_envs=E,
        train__batch_size=16,
        search__num_simulations=2,
        train__random_action=0.3 if "random" in name else 0.0,
    )
    env = ENVIRONMENTS[name]()
    algorithm = make_algorithm(config, env.spec)
    params = random_params(jax.random.key(1), algorithm.init(jax.random.key(0)))
    played = self_play(jax.random.key(2), env, algorithm, params, E, ROWS, config.train.random_action)
    ring = replay.init(config.replay, jax.tree.map(lambda x: x[0], played.rows))
    ring, _ = jax.jit(lambda ring, rows: jax.lax.scan(lambda r, row: (replay.add(r, row), None), ring, rows))(ring, played.rows)
    return Scene(config, env, algorithm, params, played, ring)


def walks_of(stage: Scene) -> list[Walk]:
    """What happened in each environment, with the network's values of everything seen."""
    rows, player, players = *stage.played, stage.env.spec.num_players
    final = rows.observation if rows.final_observation is None else rows.final_observation
    shape = stage.env.spec.observation_shape
    flat = np.stack([rows.observation, final]).reshape(-1, *shape)
    value, final_value = np.asarray(jax.jit(stage.algorithm.value)(stage.params, flat)).reshape(2, ROWS, E)
    random = np.zeros((ROWS, E), bool) if rows.random is None else rows.random
    columns = (rows.reward, rows.terminated, rows.truncated, player, (player + 1) % players, value, final_value, random)
    return [Walk(*(column[:, env] for column in columns)) for env in range(E)]


def all_starts(stage: Scene) -> tuple[Sample, list[tuple[int, int]]]:
    """Every start that the ring can give, and the (time, environment) it was played at."""
    config, capacity = stage.config, stage.ring.priority.shape[0]
    times = range(ROWS - capacity, ROWS - config.sequence_length + 1)
    cells = [(time, env) for time in times for env in range(E)]
    row, env = np.array([(time % capacity, env) for time, env in cells], np.int32).T
    return Sample(jnp.asarray(row), jnp.asarray(env), jnp.linspace(0.1, 1.0, len(cells))), cells


@functools.cache
def reader(algorithm: Algorithm, config: Config, env: Environment) -> Any:
    @jax.jit
    def read(params: Params, ring: ReplayState, start: Sample) -> tuple[Batch, Targets]:
        batch = make_batch(jax.random.key(4), config, env.spec, algorithm, params, ring, start)
        return batch, algorithm.targets(params, batch)

    return read


def batch_and_targets(stage: Scene, start: Sample) -> tuple[Batch, Targets]:
    read = reader(stage.algorithm, stage.config, stage.env)
    return jax.tree.map(np.asarray, read(stage.params, stage.ring, start))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_batches_and_targets_line_up_with_what_was_played(name: str) -> None:
    stage = scene(name)
    rows, train = stage.played.rows, stage.config.train
    start, cells = all_starts(stage)
    batch, targets = batch_and_targets(stage, start)
    np.testing.assert_array_equal(batch.importance, start.importance)
    walks = walks_of(stage)
    ends = set()
    for b, (time, env) in enumerate(cells):
        np.testing.assert_array_equal(batch.observation[b], rows.observation[time, env])
        for k in range(train.unroll_steps + 1):
            end = first_end(walks[env], time, time + k)
            ends.add(end)
            assert batch.absorbing[b, k] == (end == "terminated")
            assert batch.unknown[b, k] == (end == "truncated")
            assert targets.policy_mask[b, k] == (end is None)
            assert targets.value_mask[b, k] == (end != "truncated")
            if end is None:
                np.testing.assert_array_equal(targets.policy[b, k], rows.policy[time + k, env])
                value = n_step_target(walks[env], time + k, train.td_steps, train.discount)
                np.testing.assert_allclose(targets.value[b, k], value, rtol=1e-4, atol=1e-4)
            if end == "terminated":
                assert targets.value[b, k] == 0.0
            if k == 0:
                continue
            # Position k is reached by action a_{t+k-1}, which earned r_{t+k-1}: known unless the episode was truncated
            # before that step, and zero if it had terminated before it.
            before = first_end(walks[env], time, time + k - 1)
            assert targets.reward_mask[b, k - 1] == (before != "truncated")
            if before is None:
                assert batch.action[b, k - 1] == rows.action[time + k - 1, env]
                assert targets.reward[b, k - 1] == rows.reward[time + k - 1, env]
            if before == "terminated":
                assert targets.reward[b, k - 1] == 0.0
    assert "terminated" in ends or name == "gymnax:CartPole-v1"
    assert "truncated" in ends or not name.startswith("counting")
    for field in (*jax.tree.leaves(targets), batch.reward, batch.partial_return, batch.bootstrap_weight):
        assert field.dtype == np.float32


def test_random_actions_are_legal_and_as_many_as_asked() -> None:
    env, algorithm, params = (getattr(scene("counting, random actions"), name) for name in ("env", "algorithm", "params"))
    rows = self_play(jax.random.key(3), env, algorithm, params, 64, 100, 0.3).rows
    assert abs(rows.random.mean() - 0.3) < 0.03  # five standard deviations
    assert np.take_along_axis(rows.legal, rows.action[..., None], axis=-1).all()
    # The two legal actions of a state are equally likely where the action was drawn.
    first_legal = np.argmax(rows.legal, axis=-1) == rows.action
    assert abs(first_legal[rows.random].mean() - 0.5) < 0.06
    without = self_play(jax.random.key(3), env, algorithm, params, 64, 5, 0.0).rows
    assert without.random is None


def test_the_counting_environment_shows_where_it_is() -> None:
    """Observation, reward and ends of the toy are what its rules say: the recorded rows are to be trusted."""
    rows, player = scene("counting, two players").played
    for time, env in np.ndindex(ROWS, E):
        episode, step, turn = np.round(rows.observation[time, env] * [100, 3, 1]).astype(int)
        assert turn == player[time, env] == (episode + step) % 2
        assert rows.reward[time, env] == np.float32(((episode * 7 + step * 3 + rows.action[time, env]) % 11 - 5) / 5)
        assert not rows.legal[time, env, (episode + step) % 3]
        assert rows.action[time, env] != (episode + step) % 3
        last = step + 1 == 2 + episode % 5
        assert rows.terminated[time, env] == (last and episode % 2 == 0)
        assert rows.truncated[time, env] == (last and episode % 2 == 1)
        final = np.round(rows.final_observation[time, env] * [100, 3, 1]).astype(int)
        assert final.tolist() == [episode, step + 1, 1 - turn]
        if time + 1 < ROWS:
            following = np.round(rows.observation[time + 1, env] * [100, 3, 1]).astype(int)
            assert following[1] == 0 if last else following.tolist() == final.tolist()


def test_what_is_masked_does_not_move_the_gradient() -> None:
    stage = scene("counting, two players")
    start, _ = all_starts(stage)
    batch, targets = batch_and_targets(stage, start)
    assert not targets.policy_mask.all()
    assert not targets.value_mask.all()
    assert not targets.reward_mask.all()

    @jax.jit
    def gradient(batch: Batch, targets: Targets) -> tuple[Any, jax.Array]:
        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            output = stage.algorithm.loss(params, batch, targets)
            return jnp.mean(output.loss * batch.importance), output.loss

        return jax.grad(loss, has_aux=True)(stage.params)

    rng = np.random.default_rng(0)

    def scramble(values: np.ndarray, keep: np.ndarray) -> np.ndarray:
        keep = keep.reshape(keep.shape + (1,) * (values.ndim - keep.ndim)) > 0
        return np.where(keep, values, rng.permutation(rng.random(values.shape))).astype(values.dtype)

    scrambled = targets.replace(
        policy=scramble(targets.policy, targets.policy_mask),
        value=scramble(targets.value, targets.value_mask),
        reward=scramble(targets.reward, targets.reward_mask),
    )
    # After a truncation the actions are another episode's, and the model may be unrolled along anything.
    other = rng.integers(0, 3, batch.action.shape, dtype=np.int32)
    elsewhere = batch.replace(action=np.where(batch.unknown[:, :-1], other, batch.action))
    first, again = gradient(batch, targets), gradient(elsewhere, scrambled)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(first[0]))

    # And what is not masked does: one known target at a time.
    for name in ("policy", "value", "reward"):
        cell = tuple(np.argwhere(getattr(targets, f"{name}_mask") > 0)[-1])
        values = getattr(targets, name).copy()
        values[cell] = values[cell][::-1] + 0.1 if name == "policy" else values[cell] - 0.25
        moved = gradient(batch, targets.replace(**{name: values}))[1]
        assert (np.asarray(moved) != np.asarray(first[1])).tolist() == [b == cell[0] for b in range(len(moved))]


def test_reanalysis_replaces_the_policies_of_the_first_half() -> None:
    stage = scene("counting, two players")
    half = stage.config.replace("train.reanalyze_fraction", 0.5)
    start, cells = all_starts(stage)
    start = Sample(*(x[:16] for x in start))
    target_params = random_params(jax.random.key(9), stage.params)
    stage = stage._replace(params=target_params)
    stored, _ = batch_and_targets(stage, start)
    fresh, _ = batch_and_targets(stage._replace(config=half), start)
    positions = stage.config.train.unroll_steps + 1
    rows = stage.played.rows
    seen = [(time + k, env) for time, env in cells[:8] for k in range(positions)]
    observation, legal = (np.stack([x[cell] for cell in seen]) for x in (rows.observation, rows.legal))
    again = jax.jit(stage.algorithm.act, static_argnums=4)(jax.random.key(4), target_params, observation, legal, True)
    np.testing.assert_allclose(fresh.policy[:8], np.asarray(again.policy).reshape(8, positions, -1), rtol=1e-4, atol=1e-6)
    assert np.abs(fresh.policy[:8] - stored.policy[:8]).max() > 0.1
    np.testing.assert_array_equal(fresh.policy[8:], stored.policy[8:])
    jax.tree.map(np.testing.assert_array_equal, fresh.replace(policy=0), stored.replace(policy=0))


def test_target_network_and_priorities() -> None:
    """The target network is copied every ``target_period`` updates; drawn starts take the loss's value error."""
    stage = scene("counting, two players")
    config = stage.config
    learner = jax.jit(lambda key: init_learner(key, config, stage.algorithm))(jax.random.key(0))
    update = jax.jit(make_update(config, stage.env.spec, stage.algorithm))
    loss = jax.jit(stage.algorithm.loss)
    sample = jax.jit(lambda key, ring: replay.sample(config.replay, key, ring, 16, config.sequence_length))
    ring, copied = stage.ring, learner.params
    for number in range(1, 8):
        key = jax.random.key(number)
        start = sample(jax.random.split(key)[0], ring)
        before, old_ring = learner, ring
        learner, ring, metrics = update(key, learner, ring)
        assert int(learner.updates) == number
        assert not _equal(learner.params, before.params)
        if number % config.train.target_period == 0:
            copied = learner.params
        assert _equal(learner.target_params, copied)
        assert np.isfinite(float(metrics["loss"]))

        batch, targets = batch_and_targets(stage._replace(params=before.target_params, ring=old_ring), start)
        error = np.asarray(loss(before.params, batch, targets).priority)
        expected = np.asarray(old_ring.priority).copy()
        cells = list(zip(np.asarray(start.row).tolist(), np.asarray(start.env).tolist(), strict=True))
        for cell in set(cells):
            largest = max(float(e) for c, e in zip(cells, error, strict=True) if c == cell)
            expected[cell] = (largest + 1e-3) ** stage.config.replay.priority_exponent
        np.testing.assert_allclose(ring.priority, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("final", [None, 2.5e-4, 0.0])
def test_steps_shrink_in_a_line_until_the_last_environment_step(final: float | None) -> None:
    """80 steps at 4 samples a step are 20 updates of 16; a constant gradient moves Adam by its step size."""
    config = small_config(
        train__max_env_steps=80,
        train__replay_ratio=4.0,
        train__batch_size=16,
        train__weight_decay=0.0,
        train__learning_rate=1e-3,
        train__final_learning_rate=final,
    )
    optimizer, params = make_optimizer(config), jnp.zeros(3)
    state, moved = optimizer.init(params), []
    for _ in range(25):
        change, state = optimizer.update(jnp.full(3, 1e-2), state, params)
        moved.append(-float(change[0]))
    left = np.maximum(1.0 - np.arange(25) / 20, 0.0)
    end = 1e-3 if final is None else final
    np.testing.assert_allclose(moved, end + (1e-3 - end) * left, rtol=1e-3, atol=1e-9)


def _equal(a: Params, b: Params) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
