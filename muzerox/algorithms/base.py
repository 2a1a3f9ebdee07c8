"""What the MuZero family shares: acting by search, value targets, and the loss of the unrolled model.

Variants differ in the search they plug in. Schrittwieser et al., arXiv:1911.08265.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import mctx
import optax

from muzerox import transforms
from muzerox.config import Config
from muzerox.networks import make_model
from muzerox.parts import by_parts, join_rows, split_rows
from muzerox.precision import POLICIES, cast, pack, resolve, unpack
from muzerox.search import Search
from muzerox.types import Algorithm, Batch, Decision, EnvSpec, LossOutput, Params, Targets

_WRITTEN_OUT = 10  # steps of the unrolled model that are compiled one by one; of more, so many at a time


def make_family(config: Config, spec: EnvSpec, search: Search) -> Algorithm:
    """The Algorithm record of MuZero with ``search``.

    Raises:
      ConfigError: the configured network does not fit the environment's observations.
    """
    policy = POLICIES[resolve(config.precision).level]
    model = make_model(config.network, spec, policy)
    net, train = config.network, config.train
    signed_discount = jnp.float32(train.discount * spec.sign)

    def scalar_value(logits: jax.Array) -> jax.Array:
        return transforms.expected_value(logits, net.value_bound)

    def recurrent(params: Params, key: jax.Array, action: jax.Array, embedding: jax.Array) -> tuple:
        del key
        hidden, reward_logits = model.dynamics(params, unpack(embedding, policy.embedding), action)
        prior_logits, value_logits = model.predict(params, hidden)
        output = mctx.RecurrentFnOutput(
            reward=transforms.expected_value(reward_logits, net.reward_bound),
            discount=jnp.full(action.shape, signed_discount),
            prior_logits=prior_logits,
            value=scalar_value(value_logits),
        )
        return output, pack(hidden, policy.embedding)

    def act(key: jax.Array, params: Params, observation: jax.Array, legal: jax.Array | None, explore: bool) -> Decision:
        params = cast(params, policy.acting)
        parts = math.gcd(config.search.split, observation.shape[0])
        if parts == 1:
            return search_roots(key, params, observation, legal, explore)

        def part(x: tuple[jax.Array, tuple[jax.Array, jax.Array | None]]) -> Decision:
            key, (observation, legal) = x
            return search_roots(key, params, observation, legal, explore)

        return join_rows(jax.lax.map(part, (jax.random.split(key, parts), split_rows((observation, legal), parts))))

    def search_roots(key: jax.Array, params: Params, observation: jax.Array, legal: jax.Array | None, explore: bool) -> Decision:
        hidden = model.represent(params, observation)
        prior_logits, value_logits = model.predict(params, hidden)
        embedding = pack(hidden, policy.embedding)
        root = mctx.RootFnOutput(prior_logits=prior_logits, value=scalar_value(value_logits), embedding=embedding)
        invalid = None if legal is None else 1 - legal.astype(jnp.int32)  # mctx marks what is not allowed
        return search(key, params, root, recurrent, invalid, explore)

    def value(params: Params, observation: jax.Array) -> jax.Array:
        return scalar_value(model.predict(params, model.represent(params, observation))[1])

    def targets(params: Params, batch: Batch) -> Targets:
        assert batch.bootstrap_observation is not None
        positions = batch.bootstrap_weight.shape
        flat = batch.bootstrap_observation.reshape((-1, *batch.bootstrap_observation.shape[2:]))
        bootstrap = by_parts(model.row_bytes, lambda part: value(params, part), flat).reshape(positions)
        target = jnp.where(batch.absorbing, 0.0, batch.partial_return + batch.bootstrap_weight * bootstrap)
        known = ~batch.unknown
        return Targets(
            policy=batch.policy,
            value=target,
            reward=batch.reward,
            policy_mask=(known & ~batch.absorbing).astype(jnp.float32),
            value_mask=known.astype(jnp.float32),
            # The reward of position k was earned by the step that left position k-1.
            reward_mask=known[:, :-1].astype(jnp.float32),
        )

    def unroll(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits of policy and value [K+1, B, .] and reward [K, B, bins] along the stored actions."""
        hidden = model.represent(params, batch.observation)

        def step(hidden: jax.Array, action: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            # Half the gradient flows back through each application of the dynamics (appendix G).
            following, features = model.advance(params, _scale_gradient(hidden, 0.5), action)
            return following, (following, features)

        # Few steps are written out: what a loop keeps for its gradient is copied into arrays of all steps and out again.
        count = batch.action.shape[1]
        _, (followings, features) = jax.lax.scan(step, hidden, batch.action.T, unroll=min(count, _WRITTEN_OUT))
        hiddens = jnp.concatenate([hidden[None], followings])
        # Heads read all positions at once: a product of (K+1)B rows instead of K+1 products of B.
        policy_logits, value_logits = model.predict(params, _rows(hiddens))
        reward_logits = model.reward(params, _rows(features))
        positions = hiddens.shape[:2]
        policy_logits, value_logits = (x.reshape((*positions, -1)) for x in (policy_logits, value_logits))
        return policy_logits, value_logits, reward_logits.reshape((*features.shape[:2], -1))

    def loss(params: Params, batch: Batch, targets: Targets) -> LossOutput:
        policy_logits, value_logits, reward_logits = (x.swapaxes(0, 1) for x in unroll(params, batch))
        value_target = transforms.two_hot(targets.value, net.value_bound, net.num_bins)
        reward_target = transforms.two_hot(targets.reward, net.reward_bound, net.num_bins)
        policy_loss = optax.softmax_cross_entropy(policy_logits, targets.policy) * targets.policy_mask
        value_loss = optax.softmax_cross_entropy(value_logits, value_target) * targets.value_mask
        reward_loss = optax.softmax_cross_entropy(reward_logits, reward_target) * targets.reward_mask
        # The root counts fully, each unrolled position by 1/K (appendix G).
        steps = train.unroll_steps
        scale = jnp.concatenate([jnp.ones(1), jnp.full(steps, 1.0 / steps)])[None, :]
        policy_sum, value_sum = jnp.sum(policy_loss * scale, axis=1), jnp.sum(value_loss * scale, axis=1)
        reward_sum = jnp.sum(reward_loss * scale[:, 1:], axis=1)
        total = train.policy_weight * policy_sum + train.value_weight * value_sum + train.reward_weight * reward_sum
        prediction = scalar_value(jax.lax.stop_gradient(value_logits[:, 0]))
        metrics = {
            "policy_loss": jnp.mean(policy_sum),
            "value_loss": jnp.mean(value_sum),
            "reward_loss": jnp.mean(reward_sum),
            "value": jnp.mean(prediction),
            "value_target": jnp.mean(targets.value[:, 0]),
            "value_clipped": transforms.share_clipped(targets.value, targets.value_mask, net.value_bound),
            "reward_clipped": transforms.share_clipped(targets.reward, targets.reward_mask, net.reward_bound),
        }
        return LossOutput(loss=total, priority=jnp.abs(prediction - targets.value[:, 0]), metrics=metrics)

    return Algorithm(init=model.init, act=act, value=value, targets=targets, loss=loss, row_bytes=model.row_bytes)


def _rows(x: jax.Array) -> jax.Array:
    """[K, B, ...] -> [K B, ...]."""
    return x.reshape((-1, *x.shape[2:]))


def _scale_gradient(x: jax.Array, factor: float) -> jax.Array:
    """``x``, with its gradient scaled by ``factor``."""
    return x * factor + jax.lax.stop_gradient(x) * (1.0 - factor)
