"""The training program as a typed graph: components are nodes, what passes between them is edges.

Every candidate has the same topology, whatever its runtime: where one program does everything nothing passes over the queues
between threads, and where threads do nothing is sampled past them. So thousands of candidates are one graph, of which every
feature has a value for each of them, built by arithmetic on arrays inside ``jax.jit``. Candidates come last in memory: all that a
network does to a feature is done to them side by side. Graphs are jraph's (Godwin et al., github.com/google-deepmind/jraph).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from predictor import analytic, memory, overlap
from predictor.analytic import STAGES, Rates, Value
from predictor.schema import Workload

NODE_TYPES = (
    "environment",
    "selfplay_worker",
    "network",
    "replay_buffer",
    "training_loop",
    "context_worker",
    "reanalyze_worker",
    "hardware",
)
# Name and type of each node.
NODES = (
    ("environment", "environment"),
    ("selfplay_worker", "selfplay_worker"),
    ("representation", "network"),
    ("dynamics", "network"),
    ("prediction", "network"),
    ("replay_buffer", "replay_buffer"),
    ("training_loop", "training_loop"),
    ("context_worker", "context_worker"),  # cpu actors
    ("reanalyze_worker", "reanalyze_worker"),  # search workers, which make targets, too
    ("hardware", "hardware"),
)
# Type of interaction, and whether the sender waits until the receiver is done.
EDGE_TYPES = {
    "observe": True,
    "act": True,
    "store": False,
    "search": True,
    "answer": True,
    "sample": True,
    "prioritize": False,
    "learn": True,
    "differentiate": True,
    "reread": True,
    "draw": True,
    "context_queue": True,
    "batch_queue": True,
    "publish": False,
    "host": False,
}
_NETWORKS = ("representation", "dynamics", "prediction")
# (sender, receiver, type), in the order of the features that _edge_quantities makes.
EDGES = (
    ("environment", "selfplay_worker", "observe"),
    ("selfplay_worker", "environment", "act"),
    ("selfplay_worker", "replay_buffer", "store"),
    *(("selfplay_worker", network, "search") for network in _NETWORKS),
    *((network, "selfplay_worker", "answer") for network in _NETWORKS),
    ("replay_buffer", "training_loop", "sample"),
    ("training_loop", "replay_buffer", "prioritize"),
    *(("training_loop", network, "learn") for network in _NETWORKS),
    *((network, "training_loop", "differentiate") for network in _NETWORKS),
    ("replay_buffer", "reanalyze_worker", "reread"),
    ("replay_buffer", "context_worker", "draw"),
    ("context_worker", "reanalyze_worker", "context_queue"),
    ("reanalyze_worker", "training_loop", "batch_queue"),
    ("training_loop", "selfplay_worker", "publish"),
    ("training_loop", "reanalyze_worker", "publish"),
    *(("reanalyze_worker", network, "search") for network in _NETWORKS),
    *((network, "reanalyze_worker", "answer") for network in _NETWORKS),
    *(("hardware", name, "host") for name, _ in NODES[:-1]),
)
NODE_WIDTH, EDGE_WIDTH = 12, 5  # features of a type, padded with zeros

_NAMES = [name for name, _ in NODES]
_SENDERS = np.array([_NAMES.index(sender) for sender, _, _ in EDGES], np.int32)
_RECEIVERS = np.array([_NAMES.index(receiver) for _, receiver, _ in EDGES], np.int32)
_NODE_TYPE = np.array([NODE_TYPES.index(kind) for _, kind in NODES], np.int32)
_EDGE_TYPE = np.array([list(EDGE_TYPES).index(kind) for _, _, kind in EDGES], np.int32)


class Rows(NamedTuple):
    """Nodes, or edges, of a graph; n of them, with C values a feature."""

    features: jax.Array  # float32 [n, F, C]; what each of F is depends on the type
    kind: jax.Array | np.ndarray  # int32 [n], number of the type


def make_graph(workload: Workload, hardware: Rates, stage_seconds: jax.Array) -> jraph.GraphsTuple:
    """The graph of C candidates.

    Args:
      workload: fields [] (C is 1) or [C].
      hardware: fields [] or [C].
      stage_seconds: [..., S] of :func:`predictor.analytic.stages`.

    Returns:
      One graph, its nodes :class:`Rows` of float32 [10, NODE_WIDTH, C] and its edges of [38, EDGE_WIDTH, C], both raw:
      logarithms of quantities, not standardised. No globals.
    """
    shape = stage_seconds.shape[:-1]
    return jraph.GraphsTuple(
        nodes=Rows(_features(_node_quantities(workload, hardware, stage_seconds), NODE_WIDTH, shape), _NODE_TYPE),
        edges=Rows(_features(_edge_quantities(workload), EDGE_WIDTH, shape), _EDGE_TYPE),
        senders=_SENDERS,
        receivers=_RECEIVERS,
        n_node=np.full(1, len(NODES), np.int32),
        n_edge=np.full(1, len(EDGES), np.int32),
        globals=None,
    )


def _features(quantities: list[list[Value]], width: int, shape: tuple[int, ...]) -> jax.Array:
    """[n, width, C] float32: logarithms of a list of quantities a row, none negative; rows are padded with zeros.

    Less than 1e-6 is taken for that: quantities can be 0. A flag, once standardised, is a flag on any scale.
    """
    padded = [row + [1.0] * (width - len(row)) for row in quantities]
    flat = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape).reshape(-1) for row in padded for x in row]
    # One logarithm of everything: a hundred small ones take seconds to compile.
    return jnp.log(jnp.maximum(jnp.stack(flat), 1e-6)).reshape(len(quantities), width, -1)


def _node_quantities(w: Workload, hardware: Rates, stage_seconds: jax.Array) -> list[list[Value]]:
    """Quantities of the rows of ``NODES``: sizes, flags, and the share each of its stages has of the whole."""
    total = jnp.sum(stage_seconds, axis=-1)

    def share(stage: str) -> jax.Array:
        return stage_seconds[..., STAGES.index(stage)] / total + 1e-4  # less than that is nothing

    def network(flops: Value, params: Value, layers: Value, elements: Value, outputs: Value) -> list[Value]:
        return [flops, params, layers, elements, w.hidden_size, outputs, w.compute_bits / 16.0]

    refreshed = analytic.reanalyzed_roots(w)
    acting = [share(name) for name in STAGES if name.startswith(("acting", "tree"))]
    learning = [share(name) for name in overlap.ROLES["learner"]]
    searching = [share(name) for name in STAGES if name.startswith("reanalysis")]
    return [
        [
            *(w.observation_bytes, w.num_actions, w.num_players, w.host_step_seconds * 1e6, w.step_in_process),
            share("environment"),
            share("host_steps"),
        ],
        [
            *(w.num_envs / w.search_split, w.num_simulations, w.puct, w.search_split, w.search_engine + 1.0, w.selfplay_workers),
            *acting,
        ],
        network(w.represent_flops, w.represent_params, w.represent_layers, w.represent_elements, w.hidden_size),
        network(w.dynamics_flops, w.dynamics_params, w.dynamics_layers, w.dynamics_elements, w.hidden_size + w.num_bins),
        network(w.predict_flops, w.predict_params, w.predict_layers, w.predict_elements, w.num_actions + w.num_bins),
        [w.capacity, w.capacity / w.num_envs, w.prioritized, w.replay_on_host, share("replay_bytes"), share("host_rows")],
        [w.batch_size, w.unroll_steps, w.td_steps, w.replay_ratio, w.loop_count, w.learning_devices, *learning],
        [w.cpu_actors, share("contexts")],
        [refreshed, w.reanalyze_fraction, w.searching_devices, *searching, share("ready")],
        [
            w.cores,
            w.num_devices,
            w.sebulba,
            w.acting_devices,
            w.role_threads,
            hardware.on_host + 1.0,
            hardware.devices,
            analytic.matmul_rate(w, hardware) * hardware.operation_seconds,  # work that one small operation is worth
            hardware.copy_bytes_per_second * hardware.operation_seconds,
            hardware.dispatch_seconds / hardware.operation_seconds,
            total * 1e6,  # microseconds
        ],
    ]


def _edge_quantities(w: Workload) -> list[list[Value]]:
    """Quantities of the rows of ``EDGES``: bytes a step, rows a call, calls a step, room (queues), whether the sender waits."""
    positions = w.unroll_steps + 1.0
    updates = w.replay_ratio / w.batch_size
    threaded, serial = w.sebulba, 1.0 - w.sebulba
    hidden, outputs = w.hidden_size * w.embedding_bits / 8.0, 4.0 * (w.num_actions + 1.0)
    sequence = analytic.sequence_bytes(w)
    root_calls = w.search_split / w.num_envs
    root_rows = w.num_envs / w.search_split
    refreshed = analytic.reanalyzed_roots(w)
    refreshing = updates * jnp.minimum(refreshed, 1.0)
    threaded_updates = threaded * updates

    def search(rows: Value, calls: Value) -> tuple[list[list[Value]], list[list[Value]]]:
        """Requests to representation, dynamics and prediction, and their answers."""
        times = (1.0, w.num_simulations, w.num_simulations + 1.0)
        sent, back = (w.observation_bytes, hidden, hidden), (hidden, hidden + 4.0, outputs)
        roots = rows * calls  # a step
        return (
            [[roots * n * size, rows, calls * n] for n, size in zip(times, sent, strict=True)],
            [[roots * n * size, rows, calls * n] for n, size in zip(times, back, strict=True)],
        )

    def learn(sizes: tuple[Value, Value, Value]) -> list[list[Value]]:
        times, rows = (1.0, w.unroll_steps, 1.0), (w.batch_size, w.batch_size, w.batch_size * positions)
        return [[updates * n * r * size, r, updates * n] for n, r, size in zip(times, rows, sizes, strict=True)]

    selfplay_sent, selfplay_back = search(root_rows, root_calls)
    refresh_sent, refresh_back = search(refreshed, refreshing)
    networks = (w.represent_params, w.dynamics_params, w.predict_params)
    published = threaded_updates / w.loop_count
    resident = (
        w.num_envs * w.observation_bytes,
        memory.tree_resident_bytes(w),
        *(4.0 * params for params in networks),
        memory.replay_resident_bytes(w),
        memory.learner_resident_bytes(w),
        4.0 * threaded * w.capacity,  # priorities
        refreshed * hidden + memory.queue_resident_bytes(w),
    )
    rows: list[list[Value]] = [
        [w.observation_bytes, w.num_envs, 1.0 / w.num_envs],
        [4.0, w.num_envs, 1.0 / w.num_envs],
        [analytic.row_bytes(w), w.num_envs, 1.0 / w.num_envs],
        *selfplay_sent,
        *selfplay_back,
        [serial * w.replay_ratio * sequence, serial * w.batch_size, serial * updates],
        [w.replay_ratio * 4.0, w.batch_size, updates],
        *learn((w.observation_bytes, 4.0 * w.hidden_size, 4.0 * w.hidden_size)),
        *learn((4.0 * w.hidden_size, 4.0 * (w.hidden_size + w.num_bins), 4.0 * (w.num_bins + w.num_actions))),
        [
            refreshing * refreshed * w.observation_bytes + threaded * w.replay_ratio * sequence,
            refreshed + threaded * w.batch_size,
            jnp.maximum(refreshing, threaded_updates),
        ],
        [threaded * w.replay_ratio * 16.0, threaded * w.batch_size, threaded_updates],
        [threaded * w.replay_ratio * 16.0, threaded * w.batch_size, threaded_updates, w.search_queue_size],
        [
            serial * refreshing * refreshed * 4.0 * w.num_actions + threaded_updates * memory.batch_bytes(w),
            serial * refreshed + threaded * w.batch_size,
            jnp.maximum(refreshing, threaded_updates),
            w.batch_queue_size,
        ],
        *([published * 4.0 * analytic.parameter_count(w), threaded * count, published] for count in _readers(w)),
        *refresh_sent,
        *refresh_back,
        *([held, w.num_devices, updates / w.loop_count] for held in resident),
    ]
    # Which edges block is the same everywhere. Only queues have room: what is not one is full at once.
    blocking = [float(EDGE_TYPES[kind]) for _, _, kind in EDGES]
    return [[*row, *([0.0] * (4 - len(row))), flag] for row, flag in zip(rows, blocking, strict=True)]


def _readers(w: Workload) -> tuple[Value, Value]:
    """Devices that take published parameters: of self-play, and of search workers."""
    return w.acting_devices, w.searching_devices
