"""How stages overlap: seconds of a training from the seconds of its stages.

One program does one stage after the other: its seconds are their sum. Under sebulba threads overlap, and several things bound
the pace at once: each kind of thread is a chain of its own stages, Python's lock is held by one thread at a time, a device runs
one program at a time, and cores are shared. Each bound is a weighted sum of stages; the p-norm of the bounds is a soft maximum
(Pollux fits such a power between 1 and 10: Qiao et al., OSDI 2021, arXiv:2008.12260). Under one program there is one bound, the
sum, and the p-norm is just that. All of it is elementwise over candidates.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from predictor.analytic import HANDED, STAGES, Rates, Value, shared_products
from predictor.memory import maybe_targets_by_learner
from predictor.schema import Workload

BOUNDS = ("selfplay", "acting", "context", "search", "learner", "lock", "device", "processors")
POWER = 4  # between stages one after the other (1) and a hard maximum (infinity)

ROLES = {
    "selfplay": ("acting_flops", "acting_bytes", "acting_operations", "tree_operations", "tree_bytes", "environment"),
    "context": ("contexts",),
    "search": ("replay_bytes", "reanalysis_flops", "reanalysis_bytes", "reanalysis_operations", "reanalysis_tree_bytes", "ready"),
    "learner": ("learner_flops", "learner_bytes", "learner_operations", "optimizer_bytes", "dispatch"),
}
ROLES["selfplay"] += ("host_steps", "host_rows")
_PYTHON = ("host_rows", "contexts", "ready", "dispatch")  # hold Python's lock; environments that step in a thread do, too
SPREAD = ("acting_flops", "learner_flops", "reanalysis_flops")  # one thread's large products take every core already
_JITTER = 0.25  # share of its time that a thread with a single slot before it waits, as neither it nor its neighbour is steady


def combine(seconds: jax.Array, p: float = 1.0) -> jax.Array:
    """The p-norm over the last axis, [..., S] -> [...]: 1 is the sum, infinity the maximum."""
    if p == 1.0:
        return jnp.sum(seconds, axis=-1)
    largest = jnp.max(seconds, axis=-1)
    if math.isinf(p):
        return largest
    # Relative to the largest, so that no power leaves the range of float32.
    ratio = seconds / jnp.maximum(largest, 1e-30)[..., None]
    return largest * jnp.sum(ratio**p, axis=-1) ** (1.0 / p)


_DEVICE = tuple(name for name in STAGES if name not in (*_PYTHON, "host_steps"))
_GROUPS = {
    **ROLES,
    "python": _PYTHON,
    "steps": ("host_steps",),
    **{name: (name,) for name in SPREAD},
    "programs": tuple(name for name in ROLES["selfplay"] if name not in ("host_steps", "host_rows")),
    "targets": tuple(name for name in ROLES["search"] if name.startswith("reanalysis")),  # beside the learner on its devices
    "searched": tuple(name for name in ROLES["search"] if name != "ready"),  # by programs on a device, as ``programs`` are
    "learnt": tuple(name for name in ROLES["learner"] if name != "dispatch"),
    "narrow": tuple(name for name in _DEVICE if name not in SPREAD),
    "all": STAGES,
}
_MEMBERS = np.array([[name in names for names in _GROUPS.values()] for name in STAGES], np.float32)  # [S, groups]


def shared_devices(w: Workload, hardware: Rates) -> tuple[jax.Array, jax.Array]:
    """Whether searching shares the devices of acting, and whether learning shares those of both, bool [...] each.

    By the rule that muzerox places roles by: where there are too few devices for each, learning is the last to share.
    """
    apart = w.acting_devices + w.searching_devices + w.learning_devices <= hardware.devices
    learning_apart = jnp.maximum(w.acting_devices, w.searching_devices) + w.learning_devices <= hardware.devices
    return ~jnp.asarray(apart), ~jnp.asarray(learning_apart)


def cores_taken(w: Workload, threads: Value) -> list[Value]:
    """Cores that products of each stage of ``SPREAD`` take of so many threads, [...] each."""
    rows = (w.num_envs / w.search_split, w.batch_size, w.reanalyze_fraction * w.batch_size * (w.unroll_steps + 1.0))
    return [1.0 + shared_products(w, count) * (threads - 1.0) for count in rows]


def bounds(stage_seconds: jax.Array, workload: Workload, hardware: Rates) -> jax.Array:
    """Seconds below which each of ``BOUNDS`` keeps a training, linear in its stages: [..., S] -> [..., B]; fields [] or [C].

    Under one program the last is the sum of all stages and the others are 0.
    """
    w = workload
    sums = jnp.matmul(stage_seconds, _MEMBERS, precision="highest")
    group = {name: sums[..., index] for index, name in enumerate(_GROUPS)}
    on_host, cores = jnp.asarray(hardware.on_host), jnp.maximum(w.cores, 1.0)
    at_once = jnp.where(on_host > 0.0, jnp.minimum(w.selfplay_workers, cores), w.selfplay_workers)
    acting, searching = jnp.maximum(w.acting_devices, 1.0), jnp.maximum(w.searching_devices, 1.0)
    with_search, with_learning = shared_devices(w, hardware)
    # The first device runs its share of the programs of all roles that it has.
    first = jnp.where(with_search, group["programs"] / acting + group["searched"] / searching, 0.0)
    first = (1.0 - on_host) * (first + jnp.where(with_learning, group["learnt"], 0.0))
    # Products take the cores that share them. Those of roles with threads of their own take no more than these, but who acts
    # calls its searches, so that workers are side by side all the same; learning shares its threads with targets.
    own = jnp.where((on_host > 0.0) & (jnp.asarray(w.role_threads) > 0.0), 1.0, 0.0)
    on_all = dict(zip(SPREAD, cores_taken(w, cores), strict=True))
    on_own = dict(zip(SPREAD, cores_taken(w, jnp.clip(w.role_threads, 1.0, cores)), strict=True))
    # Seconds that products take longer on the threads of their role than on all cores.
    more = {name: own * group[name] * (on_all[name] / on_own[name] - 1.0) for name in SPREAD}
    kept = 1.0 - HANDED * own * jnp.where(cores > 1.0, 1.0, 0.0)
    host = group["python"] + group["steps"]
    spread = sum(group[name] * on_all[name] for name in SPREAD)
    on_cores = (on_host * (spread + kept * group["narrow"]) + host) / cores
    threaded = (
        (group["selfplay"] + more["acting_flops"]) / at_once,
        (1.0 - on_host) * group["programs"] / acting,  # more workers than devices take turns
        group["context"] / jnp.maximum(w.cpu_actors, 1.0),
        (group["search"] + more["reanalysis_flops"]) * (1.0 + _JITTER / (w.search_queue_size + 1.0)) / searching,
        (group["learner"] + more["learner_flops"] + more["reanalysis_flops"] + own * group["targets"])
        * (1.0 + _JITTER / (w.batch_queue_size + 1.0)),
        group["python"] + group["steps"] * (1.0 - jnp.asarray(w.step_in_process)),
        first,
        on_cores,
    )
    is_threaded = jnp.asarray(w.sebulba) > 0.0
    serial = (*[jnp.float32(0.0)] * (len(BOUNDS) - 1), group["all"])
    both = [jnp.where(is_threaded, a, b) for a, b in zip(threaded, serial, strict=True)]
    return jnp.stack(jnp.broadcast_arrays(*both), axis=-1)


def total(stage_seconds: jax.Array, workload: Workload, hardware: Rates) -> jax.Array:
    """Seconds of a training from its stages, with their coefficients: [..., S] -> [...]."""
    return combine(bounds(stage_seconds, workload, hardware), POWER)


def bound_weights(workload: Workload, hardware: Rates) -> jax.Array:
    """What a second of each stage adds to each bound, float32 [..., B, S]; fields [] or [C]."""

    def column(stage: jax.Array) -> jax.Array:
        shape = jnp.shape(workload.num_envs)
        return bounds(jnp.broadcast_to(stage.reshape((1,) * len(shape) + (-1,)), (*shape, len(STAGES))), workload, hardware)

    return jax.vmap(column, out_axes=-1)(jnp.eye(len(STAGES)))


def effective_weights(terms: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What a second of each stage adds to the whole, [M, S], where ``terms`` stand: ``sum(terms * it)`` is :func:`total`.

    A p-norm is homogeneous, so it is the sum of its arguments by its gradient (Euler). With it held fixed, coefficients of
    stages are a linear problem again.

    Args:
      terms: [M, S] seconds, with coefficients.
      weights: [M, B, S].
    """
    bounds = np.einsum("mbs,ms->mb", weights, terms)
    largest = np.maximum(bounds.max(1, keepdims=True), 1e-30)
    norm = largest * np.sum((bounds / largest) ** POWER, axis=1, keepdims=True) ** (1.0 / POWER)
    return np.einsum("mb,mbs->ms", (bounds / norm) ** (POWER - 1.0), weights)


def staleness(w: Workload) -> Value:
    """Updates that self-play may be ahead of the learner under sebulba, [...]: what is learnt from may be so old; else 0.

    Contexts and batches under way, and two dispatches: one that is running, and one whose parameters are not published yet.
    """
    under_way = w.search_queue_size + w.batch_queue_size + w.cpu_actors + w.searching_devices
    return w.sebulba * (2.0 * w.loop_count + under_way)


def batch_staleness(w: Workload, hardware: Rates) -> Value:
    """Mean age of a batch's targets when it is learnt from, updates; 0 under one program, and where the learner makes them.

    Parameters are published once a dispatch, while the next one runs; of the room for batches, one half is taken.
    """
    own_threads = (jnp.asarray(hardware.on_host) > 0.0) & (jnp.asarray(w.role_threads) > 0.0)
    on_its_devices = (shared_devices(w, hardware)[1] | own_threads) & (jnp.asarray(w.searching_devices) <= w.learning_devices)
    by_learner = maybe_targets_by_learner(w) * jnp.float32(on_its_devices)
    return w.sebulba * (1.0 - by_learner) * (1.5 * w.loop_count + 0.5 * (w.batch_queue_size + w.searching_devices))
