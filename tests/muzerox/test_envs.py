"""Environments in JAX: the contract over their suites, automatic reset, perspective of two players."""

from __future__ import annotations

import dataclasses
import itertools
import os
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnax
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pgx

from muzerox.envs import auto_reset, check_env, env_ids, is_host, make_env, unavailable
from muzerox.envs.contract import ContractError
from muzerox.errors import EnvironmentUnavailable
from muzerox.types import Environment, EnvSpec, TimeStep

CHECKED = [
    "gymnax:CartPole-v1",
    "gymnax:Acrobot-v1",
    "gymnax:MountainCar-v0",
    "gymnax:Breakout-MinAtar",
    "gymnax:Catch-bsuite",
    "gymnax:DeepSea-bsuite",
    "gymnax:MemoryChain-bsuite",
    "gymnax:DiscountingChain-bsuite",
    "gymnax:FrozenLake-misc",
    "gymnax:GaussianBandit-misc",
    "pgx:tic_tac_toe",
    "pgx:connect_four",
    "pgx:kuhn_poker",
    "pgx:hex",
    "pgx:minatar-breakout",
]
IN_JAX = [env_id for env_id in env_ids() if not is_host(env_id)]
SLOW = sorted(set(IN_JAX) - set(CHECKED))


@pytest.fixture(scope="module", autouse=True)
def _compile_fast() -> Iterator[None]:
    """These programs run for milliseconds; nearly all of the time is compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def cartpole() -> Environment:
    return make_env("gymnax:CartPole-v1")


@pytest.fixture(scope="module")
def tic_tac_toe() -> Environment:
    return make_env("pgx:tic_tac_toe")


def make_countdown() -> Environment:
    """Three steps an episode; small, so that it compiles fast."""
    spec = EnvSpec(id="toy:countdown", observation_shape=(4,), observation_dtype="float32", num_actions=2, can_truncate=True)

    def show(left: jax.Array, action: jax.Array) -> TimeStep:
        observation = jnp.zeros(4).at[left].set(1.0)
        return TimeStep(
            observation=observation,
            reward=action.astype(jnp.float32),
            terminated=left == 0,
            truncated=jnp.bool_(False),
            final_observation=observation,
            legal=jnp.ones(2, jnp.bool_),
            player=jnp.int32(0),
        )

    def reset(_: jax.Array) -> tuple[Any, TimeStep]:
        return {"left": jnp.int32(3)}, show(jnp.int32(3), jnp.int32(0))

    def step(_: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        left = state["left"] - 1
        return {"left": left}, show(left, action)

    return Environment(spec, reset, step)


# The contract


@pytest.mark.parametrize("env_id", CHECKED)
def test_contract(env_id: str) -> None:
    env = make_env(env_id)
    assert env.spec.id == env_id
    assert check_env(env, steps=48, num_envs=4)["steps"] == 192


@pytest.mark.slow
@pytest.mark.parametrize("env_id", SLOW)
def test_contract_of_the_rest(env_id: str) -> None:
    with jax.numpy_rank_promotion("allow"):  # pgx's boards of chess and go promote
        check_env(make_env(env_id))


def test_contract_sees_both_ends(cartpole: Environment) -> None:
    assert check_env(cartpole)["terminated"] > 0
    seen = check_env(make_env("gymnax:MountainCar-v0"), steps=201, num_envs=4)
    assert seen["truncated"] == 4  # nobody climbs the hill by chance in 200 steps


def test_every_id_is_served_or_explained() -> None:
    ids = IN_JAX
    left_out = {env_id: why for env_id, why in unavailable().items() if env_id.startswith(("gymnax:", "pgx:"))}
    assert len(set(env_ids())) == len(env_ids())
    assert not set(ids) & set(left_out)
    exist = {f"gymnax:{name}" for name in gymnax.registered_envs} | {f"pgx:{name}" for name in pgx.available_envs()}
    listed_nowhere = {f"pgx:{name}" for name in typing.get_args(pgx.EnvId)} - exist  # needs a download of its own
    assert exist <= set(ids) | set(left_out) <= exist | listed_nowhere
    assert not set(ids) & listed_nowhere
    for env_id, reason in left_out.items():
        assert len(reason) > 10
        with pytest.raises(EnvironmentUnavailable, match=f"{env_id}.*cannot be served") as caught:
            make_env(env_id)
        assert reason in str(caught.value)
        assert caught.value.nearest in ids


def test_reasons_are_true() -> None:
    for env_id, reason in unavailable().items():
        suite, _, name = env_id.partition(":")
        if suite == "gymnax" and "continuous" in reason:
            env, params = gymnax.make(name)
            assert not hasattr(env.action_space(params), "n")
    assert pgx.make("sparrow_mahjong").num_players == 3


def with_step(env: Environment, change: Callable[[TimeStep], TimeStep], **spec: Any) -> Environment:
    """``env`` whose time steps after reset and step are changed, and whose spec may say something else."""

    def reset(key: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = env.reset(key)
        return state, change(timestep)

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = env.step(key, state, action)
        return state, change(timestep)

    return Environment(dataclasses.replace(env.spec, **spec), reset, step)


def _nan(t: TimeStep) -> TimeStep:
    return t.replace(reward=t.reward * jnp.nan)


def _infinite(t: TimeStep) -> TimeStep:
    observation = t.observation / 0.0
    return t.replace(observation=observation, final_observation=observation)


def _unlike(t: TimeStep) -> TimeStep:
    return t.replace(final_observation=t.final_observation + 1.0)


def _half(t: TimeStep) -> TimeStep:
    return t.replace(observation=t.observation.astype("float16"), final_observation=t.final_observation.astype("float16"))


def same(t: TimeStep) -> TimeStep:
    return t


BROKEN: dict[str, tuple[Callable[[TimeStep], TimeStep], dict[str, Any], str]] = {
    "shape": (same, {"observation_shape": (5,)}, r"observation has shape \(4,\), spec says \(5,\)"),
    "dtype": (_half, {}, "observation has dtype float16, spec says float32"),
    "actions": (same, {"num_actions": 3}, r"legal has shape \(2,\)"),
    "reward": (lambda t: t.replace(reward=jnp.int32(1)), {}, "reward has dtype int32, must be float32"),
    "player": (lambda t: t.replace(player=jnp.bool_(0)), {}, "player has dtype bool, must be int32"),
    "NaN": (_nan, {}, "a reward is not finite"),
    "infinite": (_infinite, {}, "an observation is not finite"),
    "no action": (lambda t: t.replace(legal=t.legal & False), {"has_legal": True}, "a state has no legal action"),
    "mask": (lambda t: t.replace(legal=jnp.array([True, False])), {}, "has_legal is False but some action is illegal"),
    "both ends": (lambda t: t.replace(truncated=t.terminated), {}, "a step is both terminated and truncated"),
    "cut": (lambda t: t.replace(truncated=~t.terminated), {"can_truncate": False}, "can_truncate is False"),
    "final": (_unlike, {}, "final_observation differs from observation although the episode goes on"),
    "players": (same, {"num_players": 3}, "3 players are not supported"),
    "single": (lambda t: t.replace(player=jnp.int32(1)), {}, "the only player must be 0"),
    "turns": (same, {"num_players": 2}, "turns do not alternate strictly"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_contract_catches(name: str) -> None:
    change, spec, message = BROKEN[name]
    with pytest.raises(ContractError, match=message) as caught:
        check_env(with_step(make_countdown(), change, **spec), steps=8, num_envs=2)
    assert str(caught.value).startswith("toy:countdown: ")


def test_contract_holds_for_what_the_broken_are_made_from() -> None:
    assert check_env(make_countdown(), steps=9, num_envs=2) == {"terminated": 6, "truncated": 0, "steps": 18}


def test_contract_catches_a_turn_not_passed(tic_tac_toe: Environment) -> None:
    broken = with_step(tic_tac_toe, lambda t: t.replace(player=t.player * 0))
    with pytest.raises(ContractError, match="turns do not alternate strictly"):
        check_env(broken, steps=12, num_envs=2)


def test_contract_catches_a_state_that_changes_type() -> None:
    env = make_countdown()

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = env.step(key, state, action)
        return {"left": state["left"] * 1.0}, timestep

    with pytest.raises(ContractError, match="changes type from reset to step"):
        check_env(env._replace(step=step), steps=4, num_envs=2)


def test_contract_catches_chance_outside_the_key() -> None:
    env = make_countdown()
    count = np.zeros(())

    def draw() -> np.ndarray:
        count[...] += 1
        return np.float32(count)

    def step(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, TimeStep]:
        state, timestep = env.step(key, state, action)
        reward = jax.experimental.io_callback(draw, jax.ShapeDtypeStruct((), jnp.float32))
        return state, timestep.replace(reward=reward)

    with pytest.raises(ContractError, match="the same keys gave different episodes"):
        check_env(env._replace(step=step), steps=4, num_envs=2)


# Ends of episodes and automatic reset


def steps(env: Environment) -> Callable[..., tuple[Any, TimeStep]]:
    # To the last bit: by XLA's usual emitters, where tests are compiled with others.
    others = "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]
    return jax.jit(env.step, compiler_options={"xla_cpu_use_fusion_emitters": True} if others else None)


def test_truncated_at_the_limit(cartpole: Environment) -> None:
    """500 steps on the clock: the limit cuts the episode, and the last observation is kept beside the new one."""
    plain, looped = steps(cartpole), steps(auto_reset(cartpole))
    state, _ = cartpole.reset(jax.random.key(0))
    state = state.replace(time=jnp.full_like(state.time, 498))
    state, timestep = looped(jax.random.key(1), state, jnp.int32(0))
    assert not timestep.ended
    np.testing.assert_array_equal(timestep.observation, timestep.final_observation)
    last, expected = plain(jax.random.split(jax.random.key(2))[0], state, jnp.int32(1))
    state, timestep = looped(jax.random.key(2), state, jnp.int32(1))
    assert (bool(timestep.terminated), bool(timestep.truncated)) == (False, True)
    assert timestep.reward == 1.0
    np.testing.assert_array_equal(timestep.final_observation, expected.final_observation)
    np.testing.assert_array_equal(timestep.final_observation, [last.x, last.x_dot, last.theta, last.theta_dot])
    assert state.time == 0  # the next episode has begun
    np.testing.assert_array_equal(timestep.observation, [state.x, state.x_dot, state.theta, state.theta_dot])
    assert not np.array_equal(timestep.observation, timestep.final_observation)
    assert np.abs(timestep.observation).max() <= 0.05  # CartPole starts near the middle
    _, timestep = looped(jax.random.key(3), state, jnp.int32(0))
    assert not timestep.ended


def test_terminated_before_the_limit(cartpole: Environment) -> None:
    state, _ = cartpole.reset(jax.random.key(0))
    falling = state.replace(theta=jnp.float32(0.209), theta_dot=jnp.float32(1.0))
    after, timestep = steps(auto_reset(cartpole))(jax.random.key(1), falling, jnp.int32(1))
    assert (bool(timestep.terminated), bool(timestep.truncated)) == (True, False)
    assert timestep.final_observation[2] > 0.2095
    assert abs(float(timestep.observation[2])) <= 0.05
    assert after.time == 0


def test_both_at_once_is_terminated(cartpole: Environment) -> None:
    state, _ = cartpole.reset(jax.random.key(0))
    falling = state.replace(theta=jnp.float32(0.209), theta_dot=jnp.float32(1.0), time=jnp.full_like(state.time, 499))
    _, timestep = steps(cartpole)(jax.random.key(1), falling, jnp.int32(1))
    assert (bool(timestep.terminated), bool(timestep.truncated)) == (True, False)


def test_a_whole_episode_is_cut_at_500(cartpole: Environment) -> None:
    """A simple controller balances the pole until the limit."""

    def body(carry: tuple, key: jax.Array) -> tuple:
        state, observation = carry
        action = (observation[2] * 3.0 + observation[3] + observation[1] * 0.1 + observation[0] * 0.05 > 0).astype(jnp.int32)
        state, timestep = cartpole.step(key, state, action)
        return (state, timestep.observation), timestep

    state, first = cartpole.reset(jax.random.key(0))
    _, played = jax.jit(lambda keys: jax.lax.scan(body, (state, first.observation), keys))(
        jax.random.split(jax.random.key(1), 500)
    )
    assert not played.terminated.any()
    assert np.flatnonzero(played.truncated).tolist() == [499]


# Two players


def play(env: Environment, moves: list[int], seed: int = 0) -> list[TimeStep]:
    """Time steps of a scripted game, the one after reset first."""
    step = steps(env)
    state, timestep = env.reset(jax.random.key(seed))
    seen = [timestep]
    for i, move in enumerate(moves):
        assert seen[-1].legal[move]
        state, timestep = step(jax.random.key(i), state, jnp.int32(move))
        seen.append(timestep)
    return seen


GAMES: dict[str, tuple[list[int], float]] = {
    "the first player wins": ([0, 3, 1, 4, 2], 1.0),
    "the second player wins": ([0, 3, 1, 4, 8, 5], 1.0),
    "a draw": ([0, 1, 2, 4, 3, 5, 7, 6, 8], 0.0),
}


@pytest.mark.parametrize("seed", [0, 1])  # pgx draws who begins
@pytest.mark.parametrize("name", GAMES)
def test_tic_tac_toe(name: str, seed: int, tic_tac_toe: Environment) -> None:
    moves, outcome = GAMES[name]
    seen = play(tic_tac_toe, moves, seed)
    board = np.zeros(9, int)  # 1 the first player's, 2 the second's
    for i, (timestep, following) in enumerate(itertools.pairwise(seen)):
        mine, theirs = (1, 2) if i % 2 == 0 else (2, 1)
        planes = np.stack([board == mine, board == theirs], -1).reshape(3, 3, 2)
        np.testing.assert_array_equal(timestep.observation, planes)  # the mover's stones are in the first plane
        np.testing.assert_array_equal(timestep.legal, board == 0)
        assert timestep.player == (seen[0].player + i) % 2
        board[moves[i]] = mine
        last = i == len(moves) - 1
        assert following.reward == (outcome if last else 0.0)  # to the player who just moved
        assert bool(following.terminated) == last
        assert not following.truncated


def test_an_illegal_move_loses(tic_tac_toe: Environment) -> None:
    state, _ = tic_tac_toe.reset(jax.random.key(0))
    step = steps(tic_tac_toe)
    state, _ = step(jax.random.key(0), state, jnp.int32(4))
    _, timestep = step(jax.random.key(0), state, jnp.int32(4))
    assert timestep.terminated
    assert timestep.reward == -1.0


def test_a_new_game_begins_with_its_own_perspective(tic_tac_toe: Environment) -> None:
    looped = auto_reset(tic_tac_toe)
    *_, timestep = play(looped, GAMES["the first player wins"][0])
    assert timestep.terminated
    assert timestep.reward == 1.0
    assert timestep.legal.all()
    assert not timestep.observation.any()
    assert timestep.final_observation.sum() == 5


def test_connect_four_alternates() -> None:
    seen = play(make_env("pgx:connect_four"), [0, 1, 0, 1, 0, 1, 0])
    assert [float(t.reward) for t in seen] == [0.0] * 7 + [1.0]
    assert bool(seen[-1].terminated)
    assert all(int(a.player) != int(b.player) for a, b in itertools.pairwise(seen))
    assert seen[0].legal.all()


def test_kinds_of_suites() -> None:
    board, arcade = make_env("pgx:connect_four").spec, make_env("pgx:minatar-breakout").spec
    assert (board.num_players, board.has_legal, board.sign, board.can_truncate) == (2, True, -1, False)
    assert (arcade.num_players, arcade.has_legal, arcade.sign) == (1, False, 1)
    assert make_env("gymnax:Breakout-MinAtar").spec.observation_dtype == "bool"  # a byte a cell in the replay
    assert make_env("gymnax:FrozenLake-misc").spec.observation_shape == (16,)  # a category as one-hot
