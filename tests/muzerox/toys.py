"""What several tests share: small configurations, an environment that counts, an idle algorithm, targets by walking episodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.config import Config
from muzerox.selfplay import EpisodeStats, init_actors, make_act
from muzerox.types import (
    Algorithm,
    Batch,
    Decision,
    Environment,
    EnvSpec,
    LossOutput,
    Params,
    Targets,
    TimeStep,
    Transition,
)

_SMALL: dict[str, Any] = {
    "network.width": 16,
    "network.depth": 1,
    "network.num_bins": 11,
    "search.num_simulations": 4,
    "replay.capacity": 256,
    "replay.min_size": 32,
    "train.batch_size": 8,
    "train.unroll_steps": 3,
    "train.td_steps": 4,
    "train.discount": 0.9,
    "train.target_period": 3,
    "runtime.num_envs": 4,
    "runtime.loop_count": 2,
    "precision.level": "O0",
}


def small_config(env: str = "gymnax:CartPole-v1", **changes: Any) -> Config:
    """A configuration that compiles and runs in seconds; double underscores in ``changes`` stand for dots."""
    return Config(env=env).replace({**_SMALL, **{name.replace("__", "."): value for name, value in changes.items()}})


def idle_algorithm(config: Config) -> Algorithm:
    """Acts at random and learns one number: a record that compiles at once, for tests of everything around it."""
    batch, positions = config.train.batch_size, config.train.unroll_steps + 1

    def act(key: jax.Array, params: Params, observation: jax.Array, legal: jax.Array, explore: bool) -> Decision:
        del params, explore
        action = jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf)).astype(jnp.int32)
        count = observation.shape[0]
        return Decision(action=action, policy=jnp.full((count, 3), 1 / 3), value=jnp.zeros(count))

    def targets(params: Params, batch_: Batch) -> Targets:
        del params
        one, value = jnp.ones((batch, positions)), batch_.partial_return
        return Targets(batch_.policy, value, batch_.reward, one, one, one[:, 1:])

    def loss(params: Params, batch_: Batch, targets: Targets) -> LossOutput:
        del batch_
        error = targets.value[:, 0] - params["w"]
        return LossOutput(loss=jnp.square(error), priority=jnp.abs(error), metrics={})

    return Algorithm(
        init=lambda key: {"w": jax.random.normal(key)},
        act=act,
        value=lambda params, observation: jnp.full(observation.shape[0], params["w"]),
        targets=targets,
        loss=loss,
    )


def counting_env(num_players: int = 1) -> Environment:
    """Episodes of 2 to 6 steps whose observation says which episode and step it is and whose turn.

    Odd episodes are truncated and even ones terminate; the reward depends on episode, step and action; one action of
    three is illegal, in turn.
    """
    spec = EnvSpec(
        id=f"toy:counting-{num_players}",
        observation_shape=(3,),
        observation_dtype="float32",
        num_actions=3,
        num_players=num_players,
        has_legal=True,
        can_truncate=True,
    )

    def show(state: tuple, reward: Any, terminated: Any, truncated: Any) -> TimeStep:
        episode, time, player = state
        observation = jnp.stack([episode / 100, time / 3, player.astype(jnp.float32)]).astype(jnp.float32)
        return TimeStep(
            observation=observation,
            reward=jnp.asarray(reward, jnp.float32),
            terminated=jnp.asarray(terminated),
            truncated=jnp.asarray(truncated),
            final_observation=observation,
            legal=jnp.arange(3) != (episode + time) % 3,
            player=player,
        )

    def reset(key: jax.Array) -> tuple[tuple, TimeStep]:
        episode = jax.random.randint(key, (), 0, 100, dtype=jnp.int32)
        state = (episode, jnp.int32(0), episode % num_players)
        return state, show(state, 0.0, False, False)

    def step(key: jax.Array, state: tuple, action: jax.Array) -> tuple[tuple, TimeStep]:
        del key
        episode, time, player = state
        reward = ((episode * 7 + time * 3 + action) % 11 - 5) / 5
        following = (episode, time + 1, (player + 1) % num_players)
        ends = time + 1 >= 2 + episode % 5
        odd = episode % 2 == 1
        return following, show(following, reward, ends & ~odd, ends & odd)

    return Environment(spec, reset, step)


@jax.jit  # an operation for each leaf would be a program each
def random_params(key: jax.Array, params: Params) -> Params:
    """``params`` moved at random: fresh heads are zero, and a value of 0 everywhere would hide mistakes."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [x + 0.3 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])


class Played(NamedTuple):
    """Self-play as NumPy arrays [T, E, ...]."""

    rows: Transition
    player: np.ndarray  # [T, E] who made the step, as the environment says


def self_play(
    key: jax.Array, env: Environment, algorithm: Algorithm, params: Params, num_envs: int, steps: int, random_action: float
) -> Played:
    """``steps`` rows of ``num_envs`` environments, through the code that training acts with."""
    act = make_act(env, algorithm, random_action=random_action)

    @jax.jit
    def play(key: jax.Array, params: Params) -> tuple:
        key_reset, key_play = jax.random.split(key)

        def body(carry: tuple, key: jax.Array) -> tuple:
            player = carry[0].timestep.player
            actors, stats, row = act(key, params, *carry)
            return (actors, stats), (row, player)

        start = (init_actors(key_reset, env, num_envs), EpisodeStats.zero())
        return jax.lax.scan(body, start, jax.random.split(key_play, steps))[1]

    return Played(*jax.tree.map(np.asarray, play(key, params)))


class Walk(NamedTuple):
    """One environment's rows, [T] each, and the values of what was seen, to the player to move there."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    player: np.ndarray  # who made the step
    following_player: np.ndarray  # who would move after it, had the episode gone on
    value: np.ndarray  # of the observation before the step, to ``player``
    final_value: np.ndarray  # of the observation the step led to, to ``following_player``
    random: np.ndarray  # the action was drawn at random, so that what follows does not count


def n_step_target(walk: Walk, position: int, n: int, discount: float) -> float:
    """The n-step return of the player to move at ``position``, step by step."""
    me = walk.player[position]

    def to_me(amount: float, owner: int) -> float:
        return float(amount) if owner == me else -float(amount)

    total = 0.0
    for i in range(n):
        row = position + i
        if walk.random[row]:
            return total + discount**i * to_me(walk.value[row], walk.player[row])
        total += discount**i * to_me(walk.reward[row], walk.player[row])
        if walk.terminated[row]:
            return total
        if walk.truncated[row]:
            return total + discount ** (i + 1) * to_me(walk.final_value[row], walk.following_player[row])
    return total + discount**n * to_me(walk.value[position + n], walk.player[position + n])


def first_end(walk: Walk, start: int, position: int) -> str | None:
    """How the episode of row ``start`` ended before row ``position``, if it did."""
    for row in range(start, position):
        if walk.terminated[row]:
            return "terminated"
        if walk.truncated[row]:
            return "truncated"
    return None
