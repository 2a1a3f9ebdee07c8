"""Physics first: seconds of each stage of a training from its FLOPs, bytes, sequential operations and dispatches.

The training is one compiled loop on one device (search self-play, replay, learner), or threads of the host that ask for smaller
programs and meet at queues; :mod:`predictor.overlap` says how stages come together. Each stage's count over the measured rates
of the hardware is multiplied by a coefficient near 1 that measurements correct (:mod:`predictor.fit`), as Ernest does
(Venkataraman et al., NSDI 2016). All of it is elementwise over candidates: fields of a workload and rates are scalars or
float32 [C].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from predictor.schema import Hardware, Workload

Value: TypeAlias = jax.Array | np.ndarray | np.floating | float  # one number, or one a candidate

STAGES = (
    "acting_flops",  # networks evaluated by the searches of self-play
    "acting_bytes",  # their activations, softmax over bins included
    "acting_operations",  # the same as a sequence of small operations: what small networks are bound by
    "tree_operations",  # walking down and up the trees, one small operation after another
    "tree_bytes",  # statistics of the trees, read and written at every simulation
    "learner_flops",  # targets, loss and its gradient
    "learner_bytes",  # activations kept for the gradient, softmax over bins included
    "learner_operations",
    "optimizer_bytes",
    "replay_bytes",  # drawing and gathering sequences, writing rows
    "reanalysis_flops",  # searching stored states again
    "reanalysis_bytes",
    "reanalysis_operations",
    "reanalysis_tree_bytes",
    "environment",
    "dispatch",  # the host asking for the next loop
    # Of threads that meet at queues:
    "host_steps",  # environments in Python or C
    "host_rows",  # self-play asking for a search, reading its choice, writing a row
    "contexts",  # drawing starts of sequences
    "ready",  # asking for a batch to be gathered and its targets to be made
)

# Small operations of what runs beside the layers of networks.
_LAYER_OPERATIONS = 3.0  # product, normalisation, activation
# Of the learner, by 89 learners timed alone, as trainings run them: widths of 8 to 128, batches of 32 to 512.
_LEARNER_LAYER_OPERATIONS = 12.0  # gradients of what a layer does are small operations too
_LEARNER_OPERATIONS = 110.0  # sampling, targets, losses, optimizer
_ENVIRONMENT_OPERATIONS = 250.0
# What products add to a training on a processor, of their operations at the rate of large ones alone: trainings on two machines
# have it so. The passes over arrays are twice those of learners and searches alone, which find more in caches.
_PRODUCTS = 0.4
# How often a number is read or written, what is computed for it (an exponential, a random number) counted as more of that.
_ACTIVATION_PASSES = 4.0
_SOFTMAX_PASSES = 6.0
_MOVED_PASSES = 1.0  # of that, what is only moved
_LEARNER_MOVED_PASSES = 2.0  # and where it is moved back for its gradient
_NARROW_MOVED_PASSES = 1.2  # more, where a processor moves 16 bits
# Times an element of a network is narrowed to 16 bits, and all else that a processor lacks instructions for: by 18 trainings at
# O1 and O2 beside the same at O0 (benchmarks/levels.py), on one that has none to narrow with.
_NARROWED, _LEARNER_NARROWED = 2.0, 0.9
_OPTIMIZER_PASSES = 46.0  # joined and taken apart, normed, clipped, two moments, kept where it is not finite
_PRIORITY_PASSES = 12.0
# Calls and arrays of what threads do, in dispatches.
_ROW_DISPATCHES = 50.0
_SIMULATED_DISPATCHES = 30.0  # where environments are programs: one more to ask for, its answer to be read
_PROCESS_DISPATCHES = 10.0  # a message each way
_CONTEXT_DISPATCHES = 30.0
_READY_DISPATCHES = 180.0
_PUBLISHED_DISPATCHES = 200.0  # once a dispatch of the learner, who acts and searches takes its parameters array by array
_BATCH_DISPATCHES = 10.0  # arguments of the learner's program, a batch's worth
_PROGRAM_DISPATCHES = 80.0  # a training's state is hundreds of arrays; the dispatch that rates measure has one
HANDED = 0.3  # of small operations, what XLA takes on a processor to hand parts of them from one thread to another
_FUSED = 1.0  # our own search loop, as a Workload's search_engine


class _Tree(NamedTuple):
    """What a simulation costs beside the networks, in a tree of N simulations, d levels deep; fitted to searches timed alone."""

    operations: Value  # small ones: selection at the root, expansion
    level_operations: Value  # and for each of d levels
    passes: Value  # over an array [E, A], as wide as 16 more actions
    level_passes: Value  # of d
    node_passes: Value  # of N: mctx copies the tree


# Half-way, in logarithms, between searches whose networks answer at random, which make deep trees, and those whose networks have
# learnt nothing yet, which make shallow ones (139 searches timed alone in all); operations at 0.6 of that, and passes twice, as
# trainings on two machines have them.
_TREES = (
    _Tree(20.0, 5.2, 287.0, 3.2, 16.0),  # mctx, Gumbel
    _Tree(85.0, 6.4, 1034.0, 1.7, 25.0),  # mctx, PUCT: ties are broken at random at every level
    _Tree(23.0, 0.5, 152.0, 17.0, 0.0),  # our own, Gumbel
    _Tree(13.0, 2.3, 536.0, 1.3, 0.0),  # our own, PUCT
)
_MORE_ACTIONS = 16.0
_LARGE_BYTES = 2e6  # of the arrays a layer makes, from where on cores share the work on them
_LARGE_FLOPS = 1e7  # likewise, of a layer's product
_FAR_BYTES = 6e6  # of what a convolution moves a layer, from where on a learner's gradient finds little of it in caches
_FARTHER = 0.3  # more and less than half-way there
_AT_ONCE = 0.6  # of the networks' operations, where our own loop makes two simulations side by side
_MOST_CONSIDERED = 16.0  # actions at the root, by default


class Rates(NamedTuple):
    """The numbers of a :class:`Hardware`; each float32, [] or one a candidate."""

    cores: Value
    memory_bytes: Value
    device_memory_bytes: Value
    float32_flops: Value
    bfloat16_flops: Value
    one_core_flops: Value
    copy_bytes_per_second: Value
    dispatch_seconds: Value
    operation_seconds: Value
    narrowing_seconds: Value
    devices: Value
    on_host: Value  # 1 where the device is the host's processor, else 0


def hardware_rates(hardware: Hardware) -> Rates:
    """The rates of a machine as arrays [], so that another machine does not recompile."""
    return Rates(*(np.float32(getattr(hardware, name)) for name in Rates._fields))


def stack_rates(machines: Sequence[Hardware]) -> Rates:
    """Machines as rates with fields float32 [C]."""
    return Rates(*(np.asarray(column, np.float32) for column in zip(*map(hardware_rates, machines), strict=True)))


def stack(workloads: Sequence[Workload]) -> Workload:
    """Workloads of scalars as one with fields float32 [C]."""
    return jax.tree.map(lambda *fields: np.asarray(fields, np.float32), *workloads)


def row_bytes(w: Workload) -> Value:
    """A transition in the ring: its observations, policy target and scalars."""
    return w.observation_bytes * w.stored_observations + 4.0 * w.num_actions + 20.0


def sequence_bytes(w: Workload) -> Value:
    """What is read of a sequence that is learnt from: observations, policy targets, scalars."""
    positions = w.unroll_steps + 1.0
    return (positions + 1.0) * w.observation_bytes + (w.unroll_steps + w.td_steps) * 20.0 + positions * w.num_actions * 4.0


def reanalyzed_roots(w: Workload) -> Value:
    """Roots that are searched again, an update."""
    return w.reanalyze_fraction * w.batch_size * (w.unroll_steps + 1.0)


def parameter_count(w: Workload) -> Value:
    """Parameters of the three networks."""
    return w.represent_params + w.dynamics_params + w.predict_params


class _Passes(NamedTuple):
    """Elements that a row of each network goes through, those that are only moved counted as what they take."""

    represent: Value
    dynamics: Value
    predict: Value


def _is_widened(w: Workload, hardware: Rates) -> Value:
    """1 where a processor widens 16 bits to 32 before it does anything with them, and narrows what it did, else 0."""
    return hardware.on_host * jnp.where(jnp.asarray(w.compute_bits) <= 16.0, 1.0, 0.0)


def _passes(w: Workload, hardware: Rates, moved_passes: float) -> _Passes:
    """Moving, too, is done to what was widened."""
    moving = moved_passes + _NARROW_MOVED_PASSES * _is_widened(w, hardware)
    return _Passes(
        w.represent_elements + moving * w.represent_moved,
        w.dynamics_elements + moving * w.dynamics_moved,
        w.predict_elements + moving * w.predict_moved,
    )


class _Search(NamedTuple):
    """What a search costs."""

    flops: Value  # a root
    activation_bytes: Value  # a root
    statistic_bytes: Value  # a root
    elements: Value  # a root, that networks write
    network_operations: Value  # all roots of a batch together
    tree_operations: Value  # likewise


def _at_once(w: Workload, hardware: Rates) -> Value:
    """Times the simulations of our own Gumbel search, how many evaluations follow one another: what goes side by side is one.

    On processors no more than two do (``_AT_ONCE``); elsewhere all that can, but where actions are masked, as boards' are.
    """
    ours = (jnp.asarray(w.search_engine) == _FUSED) & (jnp.asarray(w.puct) <= 0.0)
    few = jnp.where(jnp.asarray(w.num_actions) <= 2.0, _AT_ONCE, 1.0)
    all_that_can = jnp.where(jnp.asarray(w.num_players) < 2.0, halving_rounds(w) / w.num_simulations, 1.0)
    return jnp.where(ours, jnp.where(hardware.on_host > 0.0, few, all_that_can), 1.0)


def halving_rounds(w: Workload) -> Value:
    """Rounds of simulations of sequential halving that go side by side, [...], as our own search makes them.

    Phases have as many simulations each, one a considered action at least, and half the actions of the phase before.
    A visit of all is one round; the first after a halving goes one by one, as what is left depends on what was found.
    """
    simulations = jnp.asarray(w.num_simulations)
    considered = jnp.clip(jnp.minimum(w.num_actions, _MOST_CONSIDERED), 2.0)
    phases = jnp.ceil(jnp.log2(considered))
    left, rounds, before = simulations, jnp.zeros_like(simulations), considered
    for _ in range(4):  # 16 actions, 8, 4, 2
        visits = jnp.maximum(1.0, jnp.floor(simulations / (phases * considered)))
        made = jnp.minimum(left, visits * considered)
        one_by_one = jnp.where(considered < before, jnp.minimum(considered, made), 0.0)
        rounds = rounds + one_by_one + jnp.ceil((made - one_by_one) / considered)
        left, before, considered = left - made, considered, jnp.maximum(2.0, jnp.floor(considered / 2.0))
    return rounds + left / 2.0


def _search_cost(w: Workload, passes: _Passes, roots: Value, hardware: Rates) -> _Search:
    """Root inference, then one simulation after another: descend, expand with one recurrent inference, back up.

    mctx keeps a tree in arrays [roots, N+1, A] that a simulation copies, so that bytes grow with N squared; our own loop
    only touches the nodes on the way, and of Gumbel's two actions it tries both at once.
    """
    simulations = w.num_simulations
    depth = jnp.sqrt(2.0 * (simulations + 1.0) / w.num_actions)  # fitted with the rest of _TREES: deeper, the fewer actions
    fused, puct = jnp.asarray(w.search_engine) == _FUSED, jnp.asarray(w.puct) > 0.0
    tree = _Tree(*(jnp.where(fused, jnp.where(puct, d, c), jnp.where(puct, b, a)) for a, b, c, d in zip(*_TREES, strict=True)))
    one_by_one = _at_once(w, hardware)
    walks = jnp.where(hardware.on_host > 0.0, 1.0, one_by_one)  # down the tree and up; on processors they are part of _TREES
    # Expected values of two distributions over bins, and the prior.
    answer = passes.predict + _SOFTMAX_PASSES * (w.num_bins + w.num_actions)
    recurrent = passes.dynamics + answer + _SOFTMAX_PASSES * w.num_bins
    weights = w.represent_params + w.predict_params + simulations * (w.dynamics_params + w.predict_params)
    statistics = tree.passes + tree.level_passes * depth + tree.node_passes * simulations
    return _Search(
        flops=w.represent_flops + w.predict_flops + simulations * (w.dynamics_flops + w.predict_flops),
        activation_bytes=4.0
        * (
            _ACTIVATION_PASSES * (passes.represent + answer + simulations * recurrent)
            + weights / jnp.maximum(roots, 1.0)  # read at every evaluation
        ),
        statistic_bytes=4.0 * simulations * (statistics * (w.num_actions + _MORE_ACTIONS) + w.hidden_size),
        elements=w.represent_elements + w.predict_elements + simulations * (w.dynamics_elements + w.predict_elements),
        network_operations=_LAYER_OPERATIONS
        * (w.represent_layers + w.predict_layers + one_by_one * simulations * (w.dynamics_layers + w.predict_layers)),
        tree_operations=walks * simulations * (tree.operations + tree.level_operations * depth),
    )


def _cores_of_a_device(w: Workload, hardware: Rates) -> Value:
    """Cores that a device has, [...]: on a CPU, those of the process are shared out among its devices."""
    cores = jnp.maximum(jnp.asarray(w.cores), 1.0)
    return jnp.where(hardware.on_host > 0.0, jnp.maximum(cores / w.num_devices, 1.0), cores)


def _faster_when_large(w: Workload, passes: _Passes, rows: Value, hardware: Rates) -> Value:
    """Times faster that cores go through arrays of so many rows together: small arrays are not worth sharing.

    The cores of threads that meet at queues are counted where these meet.
    """
    size = 4.0 * passes.dynamics / w.dynamics_layers * rows
    others = (1.0 - jnp.asarray(w.sebulba)) * (_cores_of_a_device(w, hardware) - 1.0)
    return 1.0 + hardware.on_host * others * size / (size + _LARGE_BYTES)


def learnt_at_once(w: Workload, hardware: Rates) -> Value:
    """Rows whose gradient is taken at once, [...]: as many as caches hold where a device has no more than a core, or all."""
    alone = (hardware.on_host > 0.0) & (jnp.asarray(w.cores) <= jnp.asarray(w.num_devices))
    return jnp.where(alone & (jnp.asarray(w.cached_rows) > 0.0), jnp.minimum(w.cached_rows, w.batch_size), w.batch_size)


def _out_of_cache(w: Workload, hardware: Rates) -> Value:
    """Times longer that a learner's arrays take where convolutions move much of them, relative to half-way out of the caches.

    On one core of a Xeon a row of connect_four's takes 0.53 ms of a gradient in batches of 16 to 64 and 1.0 ms in those of 256.
    """
    size = (4.0 * w.dynamics_moved / w.dynamics_layers * learnt_at_once(w, hardware) / _FAR_BYTES) ** 2
    convolutional = (hardware.on_host > 0.0) & (jnp.asarray(w.dynamics_moved) > w.dynamics_elements)
    return jnp.where(convolutional, 1.0 + _FARTHER * (size - 1.0) / (size + 1.0), 1.0)


def shared_products(w: Workload, rows: Value) -> Value:
    """How far cores share a layer's product of so many rows, 0 (one does it all) to 1, [...]: small ones are not worth it.

    Alone and in a loop, two cores make products of 3,072 rows of 128 by 128 no sooner than one does, and of 512 by 512 twice as
    fast.
    """
    size = w.dynamics_flops / w.dynamics_layers * rows
    return size / (size + _LARGE_FLOPS)


def matmul_rate(w: Workload, hardware: Rates, shared: Value = 1.0) -> Value:
    """Operations a second of matrix products in a workload's precision, on its devices and, as far as ``shared``, its cores."""
    own = _cores_of_a_device(w, hardware)
    share = shared * jnp.clip((own - 1.0) / jnp.maximum(hardware.cores - 1.0, 1.0), 0.0, 1.0)
    rate = hardware.one_core_flops + share * (hardware.float32_flops - hardware.one_core_flops)
    faster = jnp.where(jnp.asarray(w.compute_bits) <= 16.0, hardware.bfloat16_flops / hardware.float32_flops, 1.0)
    return rate * faster * w.num_devices


def stages(workload: Workload, hardware: Rates) -> jax.Array:
    """Seconds of each stage per environment step (a transition; environments side by side count each).

    Args:
      workload: fields [] or [C].
      hardware: fields [] or [C].

    Returns:
      float32 [..., S] in the order of ``STAGES``, before coefficients.
    """
    w = workload
    copy = hardware.copy_bytes_per_second * jnp.asarray(w.num_devices)
    # Of threads, those that act and search take a device each, which is a matter of overlap; an update's batch is split.
    threaded, serial = jnp.asarray(w.sebulba), 1.0 - jnp.asarray(w.sebulba)
    learning = jnp.where(threaded > 0.0, w.learning_devices, 1.0)
    # One core has no other to hand parts of small operations to, which costs more than it gains.
    alone = hardware.on_host * jnp.where(jnp.asarray(w.cores) <= 1.0, 1.0, 0.0)
    small = 1.0 - HANDED * alone
    operation, dispatch = hardware.operation_seconds * small, hardware.dispatch_seconds * small
    roots = w.num_envs / w.search_split  # of a batch that is searched at once
    passes, learnt = _passes(w, hardware, _MOVED_PASSES), _passes(w, hardware, _LEARNER_MOVED_PASSES)
    search, searches = _search_cost(w, passes, roots, hardware), 1.0 / roots  # batches searched one after the other, a step
    updates = w.replay_ratio / w.batch_size  # a step
    positions = w.unroll_steps + 1.0
    again_roots = reanalyzed_roots(w)

    def moving(count: Value, rows: Value) -> Value:
        return count / copy / _faster_when_large(w, passes, rows, hardware)

    def narrowing(elements: Value, rows: Value) -> Value:
        each = _is_widened(w, hardware) * hardware.narrowing_seconds
        return each * elements / _faster_when_large(w, passes, rows, hardware)

    def multiplying(count: Value, rows: Value) -> Value:
        added = 1.0 - hardware.on_host * (1.0 - _PRODUCTS)
        return added * count / matmul_rate(w, hardware, shared_products(w, rows))

    unrolled = w.represent_flops + w.unroll_steps * w.dynamics_flops + positions * w.predict_flops
    target_flops = positions * (w.represent_flops + w.predict_flops)
    # The loss takes the softmax of every distribution over bins, and makes the target's. Forward and twice as much backward;
    # targets only forward.
    answers = learnt.predict + 2.0 * _SOFTMAX_PASSES * (w.num_bins + w.num_actions)
    activations = 3.0 * (
        learnt.represent + w.unroll_steps * (learnt.dynamics + 2.0 * _SOFTMAX_PASSES * w.num_bins) + positions * answers
    ) + positions * (learnt.represent + learnt.predict + _SOFTMAX_PASSES * w.num_bins)
    written = 3.0 * (w.represent_elements + w.unroll_steps * w.dynamics_elements + positions * w.predict_elements)
    written = written + positions * (w.represent_elements + w.predict_elements)
    learner_layers = (
        3.0 * (w.represent_layers + w.unroll_steps * w.dynamics_layers + w.predict_layers) + w.represent_layers + w.predict_layers
    )
    priority_bytes = 4.0 * _PRIORITY_PASSES * w.prioritized * (w.capacity / w.num_envs + w.batch_size * w.num_envs)

    again_a_step = w.reanalyze_fraction * w.replay_ratio * positions
    again_searches = jnp.where(jnp.asarray(w.reanalyze_fraction) > 0.0, updates, 0.0)  # a step
    again = _search_cost(w, passes, again_roots, hardware)
    simulated = jnp.where(jnp.asarray(w.host_step_seconds) > 0.0, 0.0, 1.0)  # by a program
    learner_moved = moving(4.0 * _ACTIVATION_PASSES * activations, w.batch_size) * _out_of_cache(w, hardware)
    sequences = w.replay_ratio * sequence_bytes(w) * (1.0 + w.replay_on_host)
    asked = (_PROGRAM_DISPATCHES + threaded * _PUBLISHED_DISPATCHES) / w.loop_count + threaded * _BATCH_DISPATCHES
    rows_asked = _ROW_DISPATCHES + _SIMULATED_DISPATCHES * simulated + _PROCESS_DISPATCHES * w.step_in_process
    seconds = {
        "acting_flops": multiplying(search.flops, roots),
        "acting_bytes": moving(search.activation_bytes, roots) + narrowing(_NARROWED * search.elements, roots),
        "acting_operations": searches * search.network_operations * operation,
        "tree_operations": searches * search.tree_operations * operation,
        "tree_bytes": search.statistic_bytes / copy,
        "learner_flops": w.replay_ratio * multiplying(3.0 * unrolled + target_flops, w.batch_size) / learning,
        "learner_bytes": w.replay_ratio / learning * (learner_moved + narrowing(_LEARNER_NARROWED * written, w.batch_size)),
        "learner_operations": updates * (_LEARNER_LAYER_OPERATIONS * learner_layers + _LEARNER_OPERATIONS) * operation,
        "optimizer_bytes": updates * 4.0 * _OPTIMIZER_PASSES * parameter_count(w) / hardware.copy_bytes_per_second,
        "replay_bytes": (row_bytes(w) + sequences + serial * updates * priority_bytes) / copy,
        "reanalysis_flops": again_a_step * multiplying(again.flops, again_roots),
        "reanalysis_bytes": again_a_step
        * (moving(again.activation_bytes, again_roots) + narrowing(_NARROWED * again.elements, again_roots)),
        "reanalysis_operations": again_searches * (again.network_operations + again.tree_operations) * operation,
        "reanalysis_tree_bytes": again_a_step * again.statistic_bytes / copy,
        "environment": simulated * (_ENVIRONMENT_OPERATIONS * operation / w.num_envs + 4.0 * w.observation_bytes / copy),
        "dispatch": updates * asked * hardware.dispatch_seconds,  # as long on one core: programs with two loop counts tell
        "host_steps": threaded * w.host_step_seconds,
        "host_rows": threaded * rows_asked * dispatch / w.num_envs,
        "contexts": threaded * updates * (_CONTEXT_DISPATCHES * dispatch + priority_bytes / copy),
        "ready": threaded * updates * _READY_DISPATCHES * dispatch,
    }
    return jnp.stack(jnp.broadcast_arrays(*(jnp.asarray(seconds[name], jnp.float32) for name in STAGES)), axis=-1)
