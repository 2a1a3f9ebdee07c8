"""The compiled programs of the pipeline: choose actions, gather sequences, make targets, learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from muzerox.compilation import apart, compiler_options
from muzerox.config import Config
from muzerox.learner import LearnerState, make_apply, read_batch, reanalyze
from muzerox.parallel import by_rows
from muzerox.replay import Sample
from muzerox.selfplay import Choice, make_choose
from muzerox.types import Algorithm, Batch, EnvSpec, Metrics, Params, Skips, Targets, Transition

_CARRIED = 4096  # bytes of an observation, at most, of which a batch carries those that value targets end with to the learner


class Learned(NamedTuple):
    """What a dispatch of up to N updates leaves behind."""

    params: Params  # copies that no later dispatch takes back
    target_params: Params
    priority: jax.Array  # [N, B] float32, NaN where an update was left out
    sums: Metrics  # over updates that were finite
    skips: Skips


class Programs(NamedTuple):
    """Jitted; each runs where its arguments lie.

    What is called for every row or batch takes a key's data and the leaves of parameters: walking through nested dictionaries and
    turning a key into an array takes as long as the rest of a call.
    """

    choose: Callable[..., Choice]  # (key data, number, leaves of params, observation [E, ...], legal) -> Choice
    gather: Callable[..., tuple[Batch, Any]]  # (storage, Sample) -> batch, what is to be searched again
    # (key data, number, leaves of target params, batch, reread); None: learn makes targets
    target: Callable[..., tuple[Batch, Targets]] | None
    learn: Callable[..., tuple[LearnerState, Learned]]  # (learner, N times (batch, targets), count); learner is donated


def make_programs(
    config: Config,
    spec: EnvSpec,
    algorithm: Algorithm,
    everywhere: Sharding,
    shards: Sharding,
    *,
    searching_apart: bool,
    threads: int | None = None,
) -> Programs:
    """The programs of a configuration; ``everywhere`` and ``shards`` say where the learner and its batches lie.

    Where nothing is searched again, and who would make value targets has no device for it (``searching_apart``), the learner's
    program makes them: a program less to call for every batch, and from the newest target parameters. Not from images, which
    stay where a batch is made.

    ``threads`` are those of a CPU device that was made for a role; None for JAX's own devices.
    """
    options = compiler_options(threads)
    choose_action = make_choose(algorithm, random_action=config.train.random_action)
    mesh = shards.mesh if isinstance(shards, NamedSharding) else None
    apply = jax.jit(make_apply(config, algorithm, mesh), inline=True)  # traced once, though its shapes are asked for first
    make_targets = by_rows(mesh, algorithm.targets)  # where the learner does
    observation_bytes = math.prod(spec.observation_shape) * jnp.dtype(spec.observation_dtype).itemsize
    targets_apart = bool(config.reanalyzed) or searching_apart or observation_bytes > _CARRIED

    structure = jax.tree.structure(jax.eval_shape(algorithm.init, jax.random.key(0)))

    def choose(data: jax.Array, number: jax.Array, leaves: list[jax.Array], observation: jax.Array, legal: Any) -> Choice:
        key = apart(jax.random.fold_in)(jax.random.wrap_key_data(data), number)
        return choose_action(key, jax.tree.unflatten(structure, leaves), observation, legal)

    def gather(storage: Transition, sample: Sample) -> tuple[Batch, Any]:
        return read_batch(config, spec, storage, sample)

    def target(data: jax.Array, number: jax.Array, leaves: list[jax.Array], batch: Batch, reread: Any) -> tuple[Batch, Targets]:
        key, params = jax.random.fold_in(jax.random.wrap_key_data(data), number), jax.tree.unflatten(structure, leaves)
        batch = reanalyze(key, algorithm, params, batch, reread)
        targets = algorithm.targets(params, batch)
        # The learner needs neither: most of a batch's bytes stay where it was made.
        return batch.replace(bootstrap_observation=None, policy=None), targets

    def learn(learner: LearnerState, ready: tuple, count: jax.Array) -> tuple[LearnerState, Learned]:
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *ready)
        updates, size = len(ready), config.train.batch_size

        def update(i: jax.Array, carry: tuple) -> tuple:
            learner, priority, sums, skips = carry
            batch, targets = jax.tree.map(lambda x: x[i], stacked)
            learner, applied = apply(learner, batch, targets or make_targets(learner.target_params, batch))
            skip = applied.metrics.pop("skipped")
            sums = jax.tree.map(lambda total, x: total + jnp.where(skip > 0, 0.0, x), sums, applied.metrics)
            priority = priority.at[i].set(jnp.where(applied.finite, applied.priority, jnp.nan))
            return learner, priority, sums, skips.then(Skips.of(skip))

        batch, targets = ready[0]
        targets = targets or jax.eval_shape(make_targets, learner.target_params, batch)
        shapes = jax.eval_shape(apply, learner, batch, targets)[1].metrics
        zeros = {name: jnp.float32(0.0) for name in shapes if name != "skipped"}
        none = jax.tree.map(jnp.int32, Skips())
        start = (learner, jnp.full((updates, size), jnp.nan, jnp.float32), zeros, none)
        learner, priority, sums, skips = jax.lax.fori_loop(0, count, update, start)
        params, target_params = jax.tree.map(jnp.copy, (learner.params, learner.target_params))
        return learner, Learned(params, target_params, priority, sums, skips)

    return Programs(
        choose=jax.jit(choose, compiler_options=options),
        gather=jax.jit(gather, compiler_options=options),
        target=jax.jit(target, compiler_options=options) if targets_apart else None,
        learn=jax.jit(
            learn,
            donate_argnums=0,
            in_shardings=(everywhere, shards, everywhere),
            out_shardings=(everywhere, everywhere),
            compiler_options=options,
        ),
    )
