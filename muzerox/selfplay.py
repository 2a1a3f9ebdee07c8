"""Self-play: environments advanced by search, one row of transitions at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from muzerox.envs import auto_reset
from muzerox.opponents import random_opponent
from muzerox.types import Algorithm, Environment, Params, TimeStep, Transition


class ActorState(struct.PyTreeNode):
    """E environments in play."""

    env_state: Any  # leaves [E, ...]
    timestep: TimeStep  # leaves [E, ...]
    episode_return: jax.Array  # [E] float32, of the running episode, to the player who moved first
    episode_length: jax.Array  # [E] int32


class EpisodeStats(struct.PyTreeNode):
    """Sums over episodes that ended."""

    count: jax.Array  # [] int32
    return_sum: jax.Array  # [] float32
    length_sum: jax.Array  # [] int32

    @staticmethod
    def zero() -> EpisodeStats:
        """No episodes."""
        return EpisodeStats(count=jnp.int32(0), return_sum=jnp.float32(0.0), length_sum=jnp.int32(0))


def init_actors(key: jax.Array, env: Environment, num_envs: int) -> ActorState:
    """``num_envs`` freshly reset environments."""
    env_state, timestep = jax.vmap(env.reset)(jax.random.split(key, num_envs))
    return ActorState(
        env_state=env_state,
        timestep=timestep,
        episode_return=jnp.zeros(num_envs, jnp.float32),
        episode_length=jnp.zeros(num_envs, jnp.int32),
    )


class Choice(NamedTuple):
    """What self-play does in E states."""

    action: jax.Array  # [E] int32
    policy: jax.Array  # [E, A] float32, the search's improved policy
    drawn: jax.Array | None  # [E] bool, the action was drawn at random; absent when none ever is


def make_choose(algorithm: Algorithm, *, random_action: float = 0.0) -> Callable[..., Choice]:
    """``choose(key, params, observation [E, ...], legal [E, A] or None) -> Choice``.

    A share ``random_action`` of the actions is drawn uniformly among the legal ones: self-play that has learnt to avoid a
    state would otherwise never see it again.
    """

    def choose(key: jax.Array, params: Params, observation: jax.Array, legal: jax.Array | None) -> Choice:
        decision = algorithm.act(key, params, observation, legal, True)
        if not random_action:
            return Choice(decision.action, decision.policy, None)
        # A stream of its own: the search splits this key, and fold_in with a small number is one of the parts.
        key_draw, key_which = jax.random.split(jax.random.fold_in(key, 2**31 - 2))
        drawn = jax.random.bernoulli(key_draw, random_action, decision.action.shape)
        allowed = jnp.ones(decision.policy.shape, jnp.bool_) if legal is None else legal
        action = jnp.where(drawn, random_opponent(key_which, observation, allowed), decision.action)
        return Choice(action, decision.policy, drawn)

    return choose


def make_act(
    env: Environment, algorithm: Algorithm, *, random_action: float = 0.0
) -> Callable[[jax.Array, Params, ActorState, EpisodeStats], tuple[ActorState, EpisodeStats, Transition]]:
    """``act(key, params, actors, stats) -> (actors, stats, row)``: one step of every environment.

    ``row`` is a Transition with leaves [E, ...].
    """
    spec = env.spec
    choose = make_choose(algorithm, random_action=random_action)
    env_step = jax.vmap(auto_reset(env).step)

    def act(
        key: jax.Array, params: Params, actors: ActorState, stats: EpisodeStats
    ) -> tuple[ActorState, EpisodeStats, Transition]:
        key_search, key_env = jax.random.split(key)
        now = actors.timestep
        legal = now.legal if spec.has_legal else None
        action, policy, drawn = choose(key_search, params, now.observation, legal)
        env_state, following = env_step(jax.random.split(key_env, now.reward.shape[0]), actors.env_state, action)
        row = Transition(
            observation=now.observation,
            action=action,
            reward=following.reward,
            terminated=following.terminated,
            truncated=following.truncated,
            policy=policy,
            legal=legal,
            final_observation=following.final_observation if spec.can_truncate else None,
            random=drawn,
        )
        first_moves = spec.num_players == 1 or actors.episode_length % 2 == 0
        episode_return = actors.episode_return + jnp.where(first_moves, following.reward, -following.reward)
        episode_length = actors.episode_length + 1
        ended = following.ended
        stats = EpisodeStats(
            count=stats.count + jnp.sum(ended, dtype=jnp.int32),
            return_sum=stats.return_sum + jnp.sum(jnp.where(ended, episode_return, 0.0)),
            length_sum=stats.length_sum + jnp.sum(jnp.where(ended, episode_length, 0)),
        )
        actors = ActorState(
            env_state=env_state,
            timestep=following,
            episode_return=jnp.where(ended, 0.0, episode_return),
            episode_length=jnp.where(ended, 0, episode_length),
        )
        return actors, stats, row

    return act
