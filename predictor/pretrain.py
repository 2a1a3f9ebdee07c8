"""Trains the graph network on simulated pipelines, and loads the one that ships.

It learns what the simulator says of a pipeline beyond the analytic base: log of simulated over base seconds, cores busy, the
share of time each kind of thread works, how full queues are. No measurement is involved: those train it further
(:mod:`predictor.fit`). A third of the pipelines are one program instead of threads, of which there is nothing to simulate: the
network still has to tell how their stages share the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from predictor import artifact, model
from predictor.analytic import Rates, stages
from predictor.compiler import OPTIMIZED
from predictor.graph import Rows, make_graph
from predictor.model import Network
from predictor.overlap import bounds, total
from predictor.schema import Workload
from predictor.simulator import simulate
from predictor.synthetic import Synthetic, draw_pipelines

SHIPPED = Path(__file__).with_name("pretrained")
WIDTH, LAYERS = 16, 2  # narrow: thousands of candidates are scored at once
_BATCH = 128
_LEARNING_RATE = 3e-3
_WEIGHT_DECAY = 1e-3
_CLIP = 1.5  # of the residual: beyond, the base was of another regime


class Task(NamedTuple):
    """Pipelines, and what the network has to say of them."""

    workload: Workload  # fields [n]
    hardware: Rates  # fields [n]
    stage_seconds: np.ndarray  # [n, S]
    targets: np.ndarray  # [n, T]


def make_task(seed: int, count: int) -> Task:
    """``count`` random pipelines and what the simulator, or arithmetic, says of them."""
    drawn = draw_pipelines(seed, count)
    seconds = np.asarray(jax.jit(stages)(drawn.workload, drawn.hardware)) * drawn.coefficients
    base = np.asarray(jax.jit(total)(seconds, drawn.workload, drawn.hardware))
    shares = np.asarray(jax.jit(bounds)(seconds, drawn.workload, drawn.hardware)) / base[:, None]
    targets = np.concatenate([_simulated(drawn, seconds, base), shares, seconds / seconds.sum(1, keepdims=True)], axis=1)
    return Task(drawn.workload, drawn.hardware, seconds, targets.astype(np.float32))


def _simulated(drawn: Synthetic, seconds: np.ndarray, base: np.ndarray) -> np.ndarray:
    """What the simulator says of the pipelines of threads, [n, T]; zeros for one program, of which it has nothing to say."""
    rows = np.flatnonzero(drawn.workload.sebulba > 0.0)
    workload, hardware = jax.tree.map(lambda x: x[rows], (drawn.workload, drawn.hardware))
    found = jax.tree.map(np.asarray, simulate(jnp.asarray(seconds[rows]), workload, hardware))
    said = np.concatenate(
        [
            np.clip(np.log(found.seconds_per_env_step / base[rows]), -_CLIP, _CLIP)[:, None],
            (found.cpu_use / workload.cores)[:, None],
            found.busy,
            np.log1p(found.queue_depth),
        ],
        axis=1,
    )
    every = np.zeros((len(base), said.shape[1]))
    every[rows] = said
    return every


def pretrain(key: jax.Array, task: Task, *, steps: int, width: int = WIDTH, layers: int = LAYERS) -> Network:
    """The network after ``steps`` of AdamW on standardised targets; its last linear function is zeros."""
    import optax  # only here: predicting does without

    network = model.init(key, width=width, num_layers=layers)
    nodes, edges = population(task)
    network = {**network, "node_in": _absorb(network["node_in"], *nodes), "edge_in": _absorb(network["edge_in"], *edges)}
    spread = np.maximum(task.targets.std(0), 1e-3)
    targets = jnp.asarray((task.targets - task.targets.mean(0)) / spread)
    head = {"weights": jnp.zeros((2 * width, targets.shape[1])), "bias": jnp.zeros(targets.shape[1])}
    optimizer = optax.adamw(optax.cosine_decay_schedule(_LEARNING_RATE, max(steps, 1)), weight_decay=_WEIGHT_DECAY)
    inputs = jax.tree.map(jnp.asarray, (task.workload, task.hardware, task.stage_seconds))

    def loss(params: tuple[Network, Any], rows: jax.Array) -> jax.Array:
        network, head = params
        pooled = model.pool(network, make_graph(*jax.tree.map(lambda x: x[rows], inputs)))
        error = pooled.T @ head["weights"] + head["bias"][None] - targets[rows]
        return jnp.mean(jnp.square(error))

    @functools.partial(jax.jit, compiler_options=OPTIMIZED)
    def train(params: tuple[Network, Any]) -> tuple[Network, Any]:
        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            params, state = carry
            rows = jax.random.randint(jax.random.fold_in(key, number), (_BATCH,), 0, targets.shape[0])
            (updates, of_head), state = optimizer.update(jax.grad(loss)(params, rows), state, params)
            return (optax.apply_updates(params, (model.of_what_is_read(updates, params[0]), of_head)), state), None

        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(steps))
        return params

    network, _ = train((network, head)) if steps else (network, head)
    return jax.tree.map(np.asarray, network)


def features(network: Network, task: Task) -> np.ndarray:
    """Global features [n, 2 D] of the task's pipelines."""
    parts = [np.asarray(_pool(network, *part)).T for part in _parts(task)]
    return np.concatenate(parts)[: len(task.targets)]


_pool = jax.jit(lambda network, *row: model.pool(network, make_graph(*row)))


def _parts(task: Task, size: int = 512) -> list[tuple[Workload, Rates, np.ndarray]]:
    """The task's pipelines, some at a time; the last part begins again at the first pipeline."""
    count = len(task.targets)
    rows = [np.arange(first, first + size) % count for first in range(0, count, size)]
    return [jax.tree.map(lambda x: np.asarray(x)[r], tuple(task[:3])) for r in rows]  # noqa: B023


def population(task: Task) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Mean and inverse standard deviation of the raw features of nodes and of edges, by type."""
    graph = jax.jit(make_graph)(*_parts(task, 2048)[0])
    return _statistics(graph.nodes), _statistics(graph.edges)


def _statistics(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Mean and inverse standard deviation [types, F] of features.

    A feature that never varied is given an inverse of 0, so that its weights are 0 and stay so (:func:`model.of_what_is_read`):
    nothing can be learnt about it, so the network must not see it vary later.
    """
    kinds, features = np.asarray(rows.kind), np.asarray(rows.features)
    by_type = [features[kinds == kind].swapaxes(0, 1).reshape(features.shape[1], -1) for kind in range(kinds.max() + 1)]
    mean, deviation = (np.stack([statistic(x, axis=1) for x in by_type]) for statistic in (np.mean, np.std))
    return mean, np.where(deviation > 1e-3, 1.0 / np.maximum(deviation, 1e-3), 0.0)


def _absorb(matrices: jax.Array, mean: np.ndarray, inverse: np.ndarray) -> jax.Array:
    """Projections [types, F + 1, D] of standardised features as such of raw features: scoring pays nothing for it."""
    scaled = matrices[:, :-1] * inverse[:, :, None]
    bias = matrices[:, -1] - jnp.einsum("tf,tfd->td", mean, scaled)
    return jnp.concatenate([scaled, bias[:, None]], axis=1)


def blank(width: int = WIDTH, layers: int = LAYERS) -> Network:
    """Zeros of the shapes of a network that ships: what to load into."""
    make: Callable[[jax.Array], Network] = functools.partial(model.init, width=width, num_layers=layers)
    return jax.tree.map(lambda x: np.zeros(x.shape, np.float32), jax.eval_shape(make, jax.random.key(0)))


@functools.cache
def load() -> Network:
    """The network that ships with the package. Raises ArtifactError."""
    network, _ = artifact.load(SHIPPED / "network", blank())
    return network
