"""Fits what the analytic base misses: the graph network as a residual of log seconds, trusted as far as it has earned.

The base's coefficients are fitted first; the network is trained by mean squared error on the logarithm of measured over base
seconds, by full-batch AdamW in one compiled scan. With tens of noisy measurements a network can do harm, so its output is
multiplied by a shrinkage between 0 and 1, chosen on measurements that neither base nor network was fitted to. Measurements
are padded to powers of two: a fit with more of them rarely compiles again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from predictor import model
from predictor.analytic import Rates, Value, stack, stack_rates, stages
from predictor.coefficients import PRIOR, fit_coefficients
from predictor.graph import make_graph
from predictor.model import Network
from predictor.overlap import bound_weights, total
from predictor.schema import Measurement, Outcome, Workload

_FOLDS = 4
_FEWEST = 24  # measurements below which no network is trained: held-out gains of fewer cannot be told from luck
_STEPS = 150
_LEARNING_RATE = 1e-2
_WEIGHT_DECAY = 1e-2


@dataclasses.dataclass(frozen=True)
class FitReport:
    """How well measured seconds were predicted that were held out of the fit (cross-validation over workloads).

    Figures are NaN with too few measurements to hold any out. ``shrinkage`` was chosen on the same held-out errors that
    the figures of the residual are means of.
    """

    measurements: int
    shrinkage: float
    base_log_error: float  # mean absolute error of log seconds, analytic base alone
    residual_log_error: float  # base and shrunk residual
    base_mape: float  # mean absolute error over measured seconds
    residual_mape: float


class Fit(NamedTuple):
    """What is learnt from measurements."""

    coefficients: np.ndarray  # [S]
    network: Network
    shrinkage: Value  # []
    limit: Value  # [] largest correction of log seconds that was asked for; none larger is made
    report: FitReport


def usable(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those that tell seconds."""
    return [m for m in measurements if m.outcome is Outcome.OK and m.seconds_per_env_step]


def fit(key: jax.Array, measurements: Sequence[Measurement]) -> Fit:
    """Coefficients of the base, and the network of its residual, from the measurements that ended well."""
    measured = usable(measurements)
    count = len(measured)
    if count == 0:
        report = FitReport(0, 0.0, *(math.nan,) * 4)
        return Fit(PRIOR, model.blank(), np.float32(0.0), np.float32(0.0), report)

    workload, hardware, seconds = _table(measured)
    stage_matrix = np.asarray(_stages(workload, hardware))
    weights = np.asarray(_weights(workload, hardware))[:count]
    rows, log_seconds = stage_matrix[:count], np.log(seconds)
    coefficients = fit_coefficients(rows, seconds, weights)
    fold = _folds(measured)
    if count < _FEWEST or len(set(fold)) < _FOLDS:
        report = FitReport(count, 0.0, *(math.nan,) * 4)
        return Fit(coefficients, model.blank(), np.float32(0.0), np.float32(0.0), report)

    # One training a fold, and the last on everything; a fold's base knows as little of the held-out rows as its network.
    included = np.stack([fold != k for k in range(_FOLDS)] + [np.full(count, True)])
    fitted = [fit_coefficients(rows[keep], seconds[keep], weights[keep]) for keep in included]
    bases = np.stack([_total(stage_matrix * c, workload, hardware)[:count] for c in fitted])
    targets = log_seconds - np.log(bases)  # [folds + 1, M]
    padding = ((0, 0), (0, len(stage_matrix) - count))
    padded = np.pad(targets, padding).astype(np.float32), np.pad(included, padding).astype(np.float32)
    networks, outputs = _train(key, workload, hardware, stage_matrix, *padded)
    held_out = fold, np.arange(count)
    limit = np.float32(np.max(np.abs(targets[-1])))
    error, correction = targets[held_out], np.clip(np.asarray(outputs)[held_out], -limit, limit)
    shrinkage = choose_shrinkage(error, correction)
    report = _report(error, correction, shrinkage)
    network = jax.tree.map(lambda x: x[-1], networks)
    return Fit(fitted[-1], network, np.float32(shrinkage), limit, report)


def choose_shrinkage(error: np.ndarray, correction: np.ndarray) -> float:
    """The factor in [0, 1] of corrections [M] that lessens squared held-out errors [M] of log seconds most.

    0 unless what is gained exceeds twice its standard error: with few measurements luck looks like skill.
    """
    power = float(np.sum(correction**2))
    if power == 0.0:
        return 0.0
    factor = float(np.clip(np.sum(error * correction) / power, 0.0, 1.0))
    gain = error**2 - (error - factor * correction) ** 2
    return factor if np.mean(gain) > 2.0 * np.std(gain) / math.sqrt(len(gain)) else 0.0


def _report(error: np.ndarray, correction: np.ndarray, shrinkage: float) -> FitReport:
    left = error - shrinkage * correction
    log_errors = [float(np.mean(np.abs(e))) for e in (error, left)]
    # Predicted over measured is exp(-error).
    mapes = [float(np.mean(np.abs(np.expm1(-e)))) for e in (error, left)]
    return FitReport(len(error), shrinkage, *log_errors, *mapes)


def _folds(measurements: Sequence[Measurement]) -> np.ndarray:
    """int [M]: which fold holds each measurement out. Repeats of one workload on one machine stay together."""
    seen: dict[tuple[str, Workload], int] = {}
    groups = [seen.setdefault((m.hardware.id, m.workload), len(seen)) for m in measurements]
    return np.array(groups) % _FOLDS


def _table(measurements: Sequence[Measurement]) -> tuple[Workload, Rates, np.ndarray]:
    """Workloads and rates with fields [P], P a power of two of at least 64, padded with the first; seconds [M]."""
    size = max(64, 1 << (len(measurements) - 1).bit_length())
    rows = [*measurements, *[measurements[0]] * (size - len(measurements))]
    seconds = np.array([m.seconds_per_env_step for m in measurements], np.float64)
    return stack([m.workload for m in rows]), stack_rates([m.hardware for m in rows]), seconds


_stages, _weights, _total = jax.jit(stages), jax.jit(bound_weights), jax.jit(total)


@jax.jit
def _train(
    key: jax.Array, workload: Workload, hardware: Rates, stage_matrix: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[Network, jax.Array]:
    """Trains, always from the same initial network, once a row of ``targets`` and ``weights`` [F, P].

    Returns networks with leaves [F, ...] and their outputs [F, P].
    """
    network = model.init(key)
    graph = make_graph(workload, hardware, stage_matrix)
    optimizer = optax.adamw(optax.cosine_decay_schedule(_LEARNING_RATE, _STEPS), weight_decay=_WEIGHT_DECAY)

    def train(target: jax.Array, weight: jax.Array) -> tuple[Network, jax.Array]:
        nodes = _statistics(graph.nodes, jnp.repeat(weight, graph.nodes.shape[0] // len(weight)), model.NODE_WIDTH)
        edges = _statistics(graph.edges, jnp.repeat(weight, graph.edges.shape[0] // len(weight)), model.EDGE_WIDTH)

        def standardised(network: Network) -> Network:
            return {
                **network,
                "node_in": _absorb(network["node_in"], *nodes),
                "edge_in": _absorb(network["edge_in"], *edges),
            }

        def loss(network: Network) -> jax.Array:
            error = model.apply(standardised(network), graph) - target
            return jnp.sum(weight * jnp.square(error)) / jnp.sum(weight)

        def step(carry: tuple[Network, optax.OptState], _: None) -> tuple[tuple[Network, optax.OptState], None]:
            network, state = carry
            updates, state = optimizer.update(jax.grad(loss)(network), state, network)
            return (optax.apply_updates(network, updates), state), None

        (trained, _), _ = jax.lax.scan(step, (network, optimizer.init(network)), None, length=_STEPS)
        trained = standardised(trained)
        return trained, model.apply(trained, graph)

    # One after the other: side by side, their activations would not fit the caches.
    return jax.lax.map(lambda row: train(*row), (targets, weights))


def _statistics(features: jax.Array, weight: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Mean and inverse standard deviation [types, width] of features [N, types (width + 1)], rows weighted by ``weight``.

    Over the rows of a type only, which have a 1 in its last column. A feature that never varied is given an inverse of 0:
    nothing was learnt about it, so the network must not see it vary later.
    """
    x = features.reshape(features.shape[0], -1, width + 1)
    present = x[..., -1] * weight[:, None]  # [N, types]
    total = jnp.maximum(jnp.sum(present, axis=0), 1e-9)[:, None]
    mean = jnp.einsum("nt,ntf->tf", present, x[..., :-1]) / total
    variance = jnp.einsum("nt,ntf->tf", present, jnp.square(x[..., :-1] - mean[None])) / total
    return mean, jnp.where(variance > 1e-6, jax.lax.rsqrt(variance + 1e-12), 0.0)


def _absorb(matrix: jax.Array, mean: jax.Array, inverse: jax.Array) -> jax.Array:
    """A projection [types (width + 1), D] of standardised features as one of raw features: scoring pays nothing for it."""
    types, width = mean.shape
    own = matrix.reshape(types, width + 1, -1)
    scaled = own[:, :-1] * inverse[:, :, None]
    bias = own[:, -1] - jnp.einsum("tf,tfd->td", mean, scaled)
    return jnp.concatenate([scaled, bias[:, None]], axis=1).reshape(matrix.shape)
