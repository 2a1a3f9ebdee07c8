"""The learner: sample, reanalyze, targets, gradient, priorities. One pure update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh

from muzerox import replay, returns
from muzerox.config import Config
from muzerox.parallel import averaged
from muzerox.parts import averaged_over_parts
from muzerox.precision import LossScale, adjust_loss_scale, make_loss_scale
from muzerox.reanalyze import refresh_policy
from muzerox.replay import ReplayState, Sample
from muzerox.types import Algorithm, Batch, EnvSpec, LossOutput, Metrics, Params, Targets, Transition


class LearnerState(struct.PyTreeNode):
    """Everything an update changes besides priorities."""

    params: Params  # float32
    target_params: Params  # float32, a copy of params made every ``train.target_period`` updates
    opt_state: Any  # over the raveled parameters; holds the learning rate as an array: changing it does not recompile
    loss_scale: LossScale
    updates: jax.Array  # [] int32, made or skipped


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) after clipping by global norm; its rates are in the state."""
    train = config.train
    learning_rate: Any = train.learning_rate
    if train.final_learning_rate is not None:
        last = max(1, round(train.max_env_steps * config.replay_ratio / train.batch_size))
        learning_rate = optax.linear_schedule(train.learning_rate, train.final_learning_rate, last)
    adamw = optax.inject_hyperparams(optax.adamw)(learning_rate=learning_rate, weight_decay=train.weight_decay)
    return optax.chain(optax.clip_by_global_norm(train.max_grad_norm), adamw)


def init_learner(key: jax.Array, config: Config, algorithm: Algorithm) -> LearnerState:
    """Fresh parameters; the target network equals them."""
    params = algorithm.init(key)
    return LearnerState(
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        opt_state=make_optimizer(config).init(ravel_pytree(params)[0]),
        loss_scale=make_loss_scale(config.precision),
        updates=jnp.int32(0),
    )


def read_batch(config: Config, spec: EnvSpec, storage: Transition, start: Sample) -> tuple[Batch, tuple | None]:
    """What the loss needs of the sequences at ``start``, and what reanalysis does.

    Args:
      storage: leaves [C, E, ...], rows of a replay ring.

    Returns:
      The batch, and the observations [R, K+1, ...] and legal actions [R, K+1, A] to search again; None where R is 0.
    """
    train = config.train
    unroll = train.unroll_steps
    window = (storage.action, storage.reward, storage.terminated, storage.truncated, storage.random)
    rows = jnp.arange(unroll + train.td_steps)
    action, reward, terminated, truncated, random = replay.read(window, start, rows)
    signed = train.discount * spec.sign
    boot = returns.n_step(reward, terminated, truncated, discount=signed, n=train.td_steps, random=random)
    absorbing, unknown = returns.unroll_masks(terminated[:, :unroll], truncated[:, :unroll])

    bootstrap_observation = replay.read(storage.observation, start, boot.row)
    if storage.final_observation is not None:
        final = replay.read(storage.final_observation, start, boot.row)
        use_final = boot.use_final.reshape(boot.use_final.shape + (1,) * (final.ndim - 2))
        bootstrap_observation = jnp.where(use_final, final, bootstrap_observation)

    positions = jnp.arange(unroll + 1)
    reread = None
    if config.reanalyzed:
        chosen = Sample(*(x[: config.reanalyzed] for x in start))  # of the whole ring: see replay.spread
        reread = replay.read((storage.observation, storage.legal), chosen, positions)
    batch = Batch(
        observation=replay.read(storage.observation, start, jnp.zeros(1, jnp.int32))[:, 0],
        action=action[:, :unroll],
        reward=jnp.where(absorbing[:, :-1], 0.0, reward[:, :unroll]),
        policy=replay.read(storage.policy, start, positions),
        partial_return=boot.partial_return,
        bootstrap_weight=boot.weight,
        bootstrap_observation=bootstrap_observation,
        absorbing=absorbing,
        unknown=unknown,
        importance=start.importance,
    )
    return batch, reread


def reanalyze(key: jax.Array, algorithm: Algorithm, target_params: Params, batch: Batch, reread: tuple | None) -> Batch:
    """The batch with the policies of what :func:`read_batch` set apart searched again by the target network."""
    if reread is None:
        return batch
    assert batch.policy is not None
    return batch.replace(policy=refresh_policy(key, algorithm, target_params, batch.policy, *reread))


def make_batch(
    key: jax.Array, config: Config, spec: EnvSpec, algorithm: Algorithm, target_params: Params, state: ReplayState, start: Sample
) -> Batch:
    """Reads what the loss needs of the sequences at ``start``; reanalyzes their configured share."""
    return reanalyze(key, algorithm, target_params, *read_batch(config, spec, state.storage, start))


class Applied(NamedTuple):
    """What one gradient step says of its batch."""

    priority: jax.Array  # [B] float32, new priorities before they are raised
    finite: jax.Array  # [] bool; False: the step was left out, and its priorities mean nothing
    metrics: Metrics  # scalars


def make_apply(
    config: Config, algorithm: Algorithm, mesh: Mesh | AbstractMesh | None = None
) -> Callable[[LearnerState, Batch, Targets], tuple[LearnerState, Applied]]:
    """``apply(learner, batch, targets) -> (learner, Applied)``: one step of the optimizer; each device of a mesh takes the
    gradient of its share of the batch.

    A gradient that is not finite leaves parameters and optimizer state as they were, counts in the metric ``skipped`` and,
    with a dynamic loss scale, halves it.
    """
    optimizer = make_optimizer(config)
    train = config.train

    def of_rows(whole: tuple[Params, jax.Array], rows: tuple[Batch, Targets]) -> tuple[tuple[Params, Metrics], tuple]:
        """Gradient and metrics, which are means over rows, and losses and priorities [B] of these."""
        (params, scale), (batch, targets) = whole, rows

        def scaled_loss(params: Params) -> tuple[jax.Array, LossOutput]:
            output = algorithm.loss(params, batch, targets)
            return jnp.mean(output.loss * batch.importance) * scale, output

        grads, output = jax.grad(scaled_loss, has_aux=True)(params)
        return (grads, output.metrics), (output.loss, output.priority)

    differentiate = averaged(mesh, averaged_over_parts(algorithm.row_bytes, of_rows))

    def apply(learner: LearnerState, batch: Batch, targets: Targets) -> tuple[LearnerState, Applied]:
        scale = learner.loss_scale.scale
        (grads, metrics), (loss, priority) = differentiate((learner.params, scale), (batch, targets))
        # One vector instead of a few dozen arrays: a third of the program's operations would be the optimizer's.
        old, unravel = ravel_pytree(learner.params)
        gradient = ravel_pytree(grads)[0] / scale
        grad_norm = jnp.linalg.norm(gradient)
        finite = jnp.isfinite(grad_norm)
        change, opt_state = optimizer.update(gradient, learner.opt_state, old)
        params, opt_state = _select(finite, (old + change, opt_state), (old, learner.opt_state))
        updates = learner.updates + 1
        new_params = unravel(params)
        learner = LearnerState(
            params=new_params,
            target_params=jax.lax.cond(updates % train.target_period == 0, lambda: new_params, lambda: learner.target_params),
            opt_state=opt_state,
            loss_scale=adjust_loss_scale(config.precision, learner.loss_scale, finite),
            updates=updates,
        )
        metrics = {
            **metrics,
            "loss": jnp.mean(loss),
            "grad_norm": grad_norm,
            "loss_scale": scale,
            "skipped": (~finite).astype(jnp.int32),
        }
        return learner, Applied(priority, finite, metrics)

    return apply


def make_update(
    config: Config, spec: EnvSpec, algorithm: Algorithm, mesh: Mesh | AbstractMesh | None = None
) -> Callable[[jax.Array, LearnerState, ReplayState], tuple[LearnerState, ReplayState, Metrics]]:
    """``update(key, learner, replay) -> (learner, replay, metrics)``: sample, make targets, and one step of the optimizer.

    A step left out because its gradient is not finite leaves priorities as they were too. Over a ``mesh`` of several devices,
    whose ``algorithm`` is that of :func:`muzerox.parallel.over`, each takes its share of the batch.
    """
    apply = make_apply(config, algorithm, mesh)
    train = config.train

    def update(key: jax.Array, learner: LearnerState, ring: ReplayState) -> tuple[LearnerState, ReplayState, Metrics]:
        key_sample, key_search = jax.random.split(key)
        start = replay.sample(config.replay, key_sample, ring, train.batch_size, config.sequence_length)
        batch = make_batch(key_search, config, spec, algorithm, learner.target_params, ring, start)
        targets = algorithm.targets(learner.target_params, batch)
        learner, applied = apply(learner, batch, targets)
        error = jnp.where(applied.finite, applied.priority, 0.0)
        ring = jax.lax.cond(applied.finite, lambda r: replay.update_priority(config.replay, r, start, error), lambda r: r, ring)
        return learner, ring, applied.metrics

    return update


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)
