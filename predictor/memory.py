"""Bytes that a training holds: what the ring, the trees, the queues and the copies of parameters take. Elementwise.

Under sebulba each worker has trees of its own, batches wait in a queue and in the learner's hands, and parameters lie published
beside the learner's own.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from predictor.analytic import Rates, Value, parameter_count, reanalyzed_roots, row_bytes
from predictor.schema import Workload

_COPIES = 6.0  # of parameters: online, target, two moments, gradient, update
_DISPATCHES = 3.0  # worth of batches in the learner's hands: collected, dispatched, and stacked by the program


def replay_resident_bytes(w: Workload) -> Value:
    """The ring: observations, policy targets, scalars and priorities."""
    return w.capacity * row_bytes(w)


def tree_resident_bytes(w: Workload) -> Value:
    """The trees of the largest batch of roots searched at once: self-play's or reanalysis's; under sebulba both are."""
    acting = w.selfplay_workers * w.num_envs / w.search_split
    reanalyzed = reanalyzed_roots(w)
    roots = jnp.where(jnp.asarray(w.sebulba) > 0.0, acting + w.searching_devices * reanalyzed, jnp.maximum(acting, reanalyzed))
    return roots * (w.num_simulations + 1.0) * (w.hidden_size * w.embedding_bits / 8.0 + 24.0 * w.num_actions)


def learner_resident_bytes(w: Workload) -> Value:
    """Activations kept for the gradient of a batch."""
    layers = w.represent_layers + w.unroll_steps * (w.dynamics_layers + w.predict_layers)
    return 4.0 * w.batch_size * (layers * w.hidden_size + (2.0 * w.unroll_steps + 1.0) * w.num_bins)


def batch_bytes(w: Workload) -> Value:
    """A batch that the learner can use as it is: first observations, actions, rewards, targets and masks."""
    positions = w.unroll_steps + 1.0
    return w.batch_size * (w.observation_bytes + 4.0 + positions * (4.0 * w.num_actions + 22.0) + 16.0 * w.unroll_steps)


def queue_resident_bytes(w: Workload) -> Value:
    """Sebulba: batches that wait, are being made or are in the learner's hands, and contexts, which are indices."""
    waiting = w.batch_queue_size + w.searching_devices + _DISPATCHES * w.loop_count
    bootstrap = w.batch_size * (w.unroll_steps + 1.0) * w.observation_bytes  # observations that value targets end with
    carried = bootstrap * maybe_targets_by_learner(w)
    contexts = 16.0 * w.batch_size * (w.search_queue_size + w.cpu_actors)
    return w.sebulba * (waiting * (batch_bytes(w) + carried) + w.searching_devices * bootstrap + contexts)


def maybe_targets_by_learner(w: Workload) -> Value:
    """1 where the learner's program makes value targets, if searching has no devices of its own; as muzerox's ``make_programs``.

    Nothing is searched again, and observations are no images.
    """
    return jnp.float32((jnp.asarray(w.reanalyze_fraction) == 0.0) & (jnp.asarray(w.observation_bytes) <= 4096.0))


def published_bytes(w: Workload) -> Value:
    """Sebulba: parameters and target parameters, of two dispatches, and a copy on each device that searches."""
    return w.sebulba * 4.0 * parameter_count(w) * (4.0 + w.acting_devices + w.searching_devices)


def saved_bytes(w: Workload) -> Value:
    """What a checkpoint holds, and its copy in host memory while it is saved: ring, and parameters four times."""
    return replay_resident_bytes(w) + 4.0 * 4.0 * parameter_count(w)


def _working_bytes(w: Workload) -> Value:
    """All but the ring."""
    parts = tree_resident_bytes(w) + learner_resident_bytes(w) + queue_resident_bytes(w)
    return parts + _COPIES * 4.0 * parameter_count(w) + published_bytes(w)


def resident_bytes(workload: Workload) -> jax.Array:
    """Bytes a training holds, [...] float32, on its devices and beside them, without those of the process itself."""
    return jnp.asarray(replay_resident_bytes(workload) + _working_bytes(workload), jnp.float32)


def _apart(w: Workload, hardware: Rates) -> Value:
    """1 where the ring lies in the host's memory and all else in that of accelerators, else 0."""
    return w.replay_on_host * (1.0 - hardware.on_host)


def device_bytes(w: Workload, hardware: Rates) -> Value:
    """What a training holds on its devices, [...]: everything, but a ring that lies in the host's memory."""
    return (1.0 - _apart(w, hardware)) * replay_resident_bytes(w) + _working_bytes(w)


def host_bytes(w: Workload, hardware: Rates) -> Value:
    """What a training takes of the host's memory beside its process, [...]: the copy of its state that saving takes.

    And what it holds there: everything where the host is the device, else a ring that was put there.
    """
    held = hardware.on_host * resident_bytes(w) + _apart(w, hardware) * replay_resident_bytes(w)
    return saved_bytes(w) + held


def fits(w: Workload, hardware: Rates, process_bytes: Value, limit: Value, device_limit: Value = math.inf) -> Value:
    """Whether a training has the memory it needs once it is compiled, bool [...]: of the host, and of its devices.

    Args:
      process_bytes: of the process, beside what the training holds.
      limit: bytes of the host's memory that may be taken, if that is less than there is.
      device_limit: likewise, of each accelerator's.
    """
    each = jnp.minimum(hardware.device_memory_bytes, device_limit)
    room = jnp.where(jnp.asarray(hardware.on_host) > 0.0, jnp.inf, each * w.num_devices)
    host = process_bytes + host_bytes(w, hardware)
    return (host <= jnp.minimum(hardware.memory_bytes, limit)) & (device_bytes(w, hardware) <= room)
