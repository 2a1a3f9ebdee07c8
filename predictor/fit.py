"""What measurements teach: how far counts of stages are off, and what the base misses by the graph.

The base is a linear model of log seconds with Gaussian coefficients: how fast the machine is as a whole, the logarithm of each
stage's coefficient (its elasticity, the share of the whole it has, is the feature), and what is missed of each program, however
often it is measured. How far they may stray is chosen by the evidence. The network, which :mod:`predictor.pretrain` taught what
pipelines are like, is then trained by mean squared error on what the base misses of measurements that were left out, by
full-batch AdamW in one compiled scan. With tens of noisy measurements it can do harm, so its output is multiplied by a shrinkage
between 0 and 1, chosen on measurements that it was not trained on; 0 unless they are predicted better, beyond luck.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

from predictor import model
from predictor.analytic import STAGES, Rates, Value, stack, stack_rates, stages
from predictor.compiler import OPTIMIZED
from predictor.graph import make_graph
from predictor.model import Network
from predictor.overlap import total
from predictor.posterior import Block, choose_scales, condition, conformal_factor, leave_out, number
from predictor.schema import Hardware, Measurement, Outcome, Workload

# Scale of how much faster or slower a machine is as a whole than is expected by its rates, in logarithms:
_ANY_MACHINE = 1.0  # where nothing was ever measured
_NEW_MACHINE = 0.25  # where others were; chosen with the first two machines in view (docs/prediction.md)
_KNOWN_MACHINE = 0.11  # where that was learnt before: 0.065 from hour to hour, 0.09 on another day (benchmarks/data/collected)
_STAGE = 0.35  # scale of the logarithm of a coefficient, before anything is measured
_STAGE_SCALES, _LIKELY_STAGE = (0.05, 0.1, 0.2, 0.4), 0.05  # of what it is on this machine, beside that
_PROGRAMS, _LIKELY_PROGRAM = (0.06, 0.12, 0.16, 0.24, 0.34), 0.16  # of what is missed of a program, whenever it is measured
_NOISES, _LIKELY_NOISE = (0.03, 0.06, 0.12), 0.06  # of one measurement of it
_FEWEST = 8  # programs below which scales are those expected
_FEWEST_TO_TRAIN = 24  # below which no network is: held-out gains of fewer cannot be told from luck
_FOLDS = 4
_STEPS = 150
_LEARNING_RATE = 1e-2
_WEIGHT_DECAY = 1e-2
_ITERATIONS = 5  # of Gauss and Newton: elasticities depend on coefficients
_LONGEST = 0.7  # step of a coefficient's logarithm


@dataclasses.dataclass(frozen=True)
class FitReport:
    """How well measured seconds were predicted that were left out, with those of the same program; NaN of fewer than two."""

    measurements: int
    shrinkage: float  # of the network's output; 0: it is not heard
    noise: float  # of a measurement of another program, standard deviation of log seconds
    base_log_error: float  # mean absolute error of log seconds without the network
    residual_log_error: float  # with it, as far as it is heard
    base_mape: float  # mean absolute error over measured seconds
    residual_mape: float


class Spread(NamedTuple):
    """How sure predictions are: a Gaussian over machine and stages, and what was seen of its honesty."""

    root: Value  # [1 + S, 1 + S]; the covariance of the coefficients is root @ root.T
    noise: Value  # [] of a measurement, what is missed of its program included
    factor: Value  # [] standard deviations that 90% intervals reach to each side


class Fit(NamedTuple):
    """What is learnt from measurements."""

    coefficients: np.ndarray  # [S]
    network: Network
    shrinkage: Value  # [] in [0, 1], of the network's output
    limit: Value  # [] largest correction of log seconds that was asked for; none larger is made
    spread: Spread
    report: FitReport | None  # of the last fit


def machine_scale(machines: Collection[Hardware], meant: str | None, taught: bool) -> float:
    """How far machines may be as a whole from what is expected of them: a scale, in logarithms.

    ``meant`` is the id of the one that who expects has in mind, if any; ``taught`` whether any was measured before.
    """
    if {machine.id for machine in machines} == {meant}:
        return _KNOWN_MACHINE
    # Nobody has told yet what accelerators are like.
    return _NEW_MACHINE if taught and all(machine.platform == "cpu" for machine in machines) else _ANY_MACHINE


def usable(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those that tell seconds."""
    return [m for m in measurements if m.outcome is Outcome.OK and m.seconds_per_env_step]


def untaught(network: Network) -> Fit:
    """Before anything was measured: typical coefficients, and a network that has no say yet."""
    scales = [_ANY_MACHINE, *[_STAGE] * len(STAGES)]
    noise = math.hypot(_LIKELY_PROGRAM, _LIKELY_NOISE)
    spread = Spread(np.diag(np.array(scales, np.float32)), np.float32(noise), np.float32(1.645))
    return Fit(np.ones(len(STAGES), np.float32), network, np.float32(0.0), np.float32(0.0), spread, None)


@jax.jit
def linearise(
    log_coefficients: jax.Array, stage_seconds: jax.Array, workload: Workload, hardware: Rates
) -> tuple[jax.Array, jax.Array]:
    """Log seconds by the base [C], and the elasticity of each stage [C, S]."""

    def one(logs: jax.Array, row: jax.Array, w: Workload, h: Rates) -> jax.Array:
        return jnp.log(total(jnp.exp(logs) * row, w, h))

    return jax.vmap(jax.value_and_grad(one), in_axes=(None, 0, 0, 0))(log_coefficients, stage_seconds, workload, hardware)


def fit(
    key: jax.Array,
    measurements: Sequence[Measurement],
    before: Fit,
    *,
    meant: str | None = None,
    taught: bool = False,
    train: bool = True,
) -> Fit:
    """Base and network from the measurements that ended well: of one machine for that one, of several for any other.

    Args:
      before: what was known before, of other machines or of none; :func:`untaught` makes the least.
      meant, taught: the machine that ``before`` is about, if any, and whether it was taught on any.
      train: False leaves the network as it was.
    """
    measured = usable(measurements)
    if not measured:
        return before

    count = len(measured)
    workload, hardware = _table(measured)
    raw = np.asarray(_stages(workload, hardware))
    heard = float(before.shrinkage)
    graph = build_graph(workload, hardware, raw) if train or heard else None
    said = np.zeros(count) if graph is None else np.asarray(apply_network(before.network, graph))[:count]
    corrected = heard * np.clip(said, -before.limit, before.limit)
    target = np.log([m.seconds_per_env_step or math.nan for m in measured]) - corrected
    groups = [program(m.workload) for m in measured]
    scale = machine_scale([m.hardware for m in measured], meant, taught)
    coefficients, spread, errors, deviations = _fit_base(target, measured, raw, (workload, hardware), before, scale, groups)

    network, shrinkage, limit = before.network, before.shrinkage, before.limit
    left = errors
    if train and graph is not None and len(set(groups)) >= _FEWEST_TO_TRAIN:
        # What the network should say in all; what it is trained on was not known to the base either.
        wanted = errors + corrected
        trained, said = _train_in_folds(key, before.network, graph, wanted, groups)
        most = np.float32(np.max(np.abs(wanted)))
        factor = choose_shrinkage(wanted, np.clip(said, -most, most), errors, groups)
        if factor > 0.0:
            network, shrinkage, limit = trained, np.float32(factor), most
            left = wanted - factor * np.clip(said, -most, most)
    expected = float(before.spread.factor)
    reach = conformal_factor(left, deviations, groups, fallback=expected)
    if len({m.hardware.id for m in measured}) > 1:  # what was left out was of machines that are known, and another is meant
        reach = max(reach, expected)
    several = len(set(groups)) > 1
    kinds = (errors, left) if several else (np.full(1, math.nan),) * 2
    report = FitReport(
        count,
        float(shrinkage),
        float(spread.noise),
        *(float(np.mean(np.abs(e))) for e in kinds),
        # Predicted over measured is exp(-error).
        *(float(np.mean(np.abs(np.expm1(-e)))) for e in kinds),
    )
    return Fit(coefficients, network, shrinkage, limit, spread._replace(factor=np.float32(reach)), report)


def _fit_base(
    target: np.ndarray,
    measured: Sequence[Measurement],
    raw: np.ndarray,
    about: tuple[Workload, Rates],
    before: Fit,
    machine: float,
    groups: Sequence[Hashable],
) -> tuple[np.ndarray, Spread, np.ndarray, np.ndarray]:
    """Coefficients [S] and how sure they are; errors [n] of what was left out, and the deviations [n] expected of those.

    ``machine`` is the scale of what machines are as a whole.
    """
    count, programs = len(measured), np.eye(len(set(groups)))[number(groups)]
    enough = programs.shape[1] >= _FEWEST
    machines = _machines(measured)
    learnt = np.asarray(before.spread.root, np.float64)[1:]
    missed = math.sqrt(max(float(before.spread.noise) ** 2 - _LIKELY_NOISE**2, 0.0))  # of a program
    # This machine as a whole, and each stage: what was learnt before and how it differs here. Of several none is meant: another
    # is as far from what they have in common as each of them.
    others = np.concatenate([learnt, np.eye(len(STAGES))], axis=1)
    several = machines.shape[1] > 1
    ours = np.zeros((1, machines.shape[1])) if several else machines[-1:]
    now = np.block([[ours, np.zeros((1, others.shape[1]))], [np.zeros((len(STAGES), ours.shape[1])), others]])
    now = np.pad(now, ((0, 0), (0, programs.shape[1])))  # what is missed of these programs says nothing of others

    logs, scales = np.zeros(len(STAGES)), None
    for _ in range(_ITERATIONS):
        found, slopes = linearise(logs.astype(np.float32), raw * before.coefficients, *about)
        elasticity = np.asarray(slopes, np.float64)[:count]
        left = target - np.asarray(found, np.float64)[:count] + elasticity @ logs
        blocks = (
            Block(machines, (machine,), machine),
            Block(elasticity @ learnt, (1.0,), 1.0),  # as sure as it was
            Block(elasticity, _STAGE_SCALES if enough else (_LIKELY_STAGE,), _LIKELY_STAGE),
            Block(programs, _PROGRAMS if enough else (missed,), _LIKELY_PROGRAM),
        )
        scales = scales or choose_scales(blocks, _NOISES if enough else (_LIKELY_NOISE,), _LIKELY_NOISE, left)[1]
        posterior = condition(blocks, left, scales)
        mean, root = now @ posterior.mean, now @ posterior.root
        logs = logs + np.clip(mean[1:] - logs, -_LONGEST, _LONGEST)
    assert scales is not None
    covariance = root @ root.T + 1e-12 * np.eye(len(root))
    if several:
        covariance[0, 0] += machine_scale([m.hardware for m in measured], None, taught=True) ** 2
    noise = math.hypot(scales.blocks[-1], scales.noise)
    spread = Spread(np.linalg.cholesky(covariance).astype(np.float32), np.float32(noise), before.spread.factor)
    coefficients = (before.coefficients * np.exp(logs + mean[0])).astype(np.float32)
    return coefficients, spread, *leave_out(blocks, left, scales, groups)


def _train_in_folds(
    key: jax.Array, network: Network, graph: jraph.GraphsTuple, wanted: np.ndarray, groups: Sequence[Hashable]
) -> tuple[Network, np.ndarray]:
    """The network trained on everything, and what networks said that were not trained on a measurement, [n]."""
    numbers = number(groups)
    fold = np.asarray(jax.random.permutation(key, max(numbers) + 1))[numbers] % _FOLDS
    included = np.stack([*(fold != k for k in range(_FOLDS)), np.full(len(wanted), True)])
    padding = graph.nodes.features.shape[-1] - len(wanted)
    targets, weights = np.pad(wanted, (0, padding)), np.pad(included, ((0, 0), (0, padding)))
    networks, outputs = train_network(network, graph, targets.astype(np.float32), weights.astype(np.float32))
    return jax.tree.map(lambda x: np.asarray(x)[-1], networks), np.asarray(outputs, np.float64)[fold, np.arange(len(wanted))]


@functools.partial(jax.jit, compiler_options=OPTIMIZED)
def train_network(network: Network, graph: jraph.GraphsTuple, target: jax.Array, weights: jax.Array) -> tuple[Network, jax.Array]:
    """Trains the same network on ``target`` [P] by full-batch AdamW, once a row of ``weights`` [F, P].

    Returns networks with leaves [F, ...] and their outputs [F, P].
    """
    optimizer = optax.adamw(optax.cosine_decay_schedule(_LEARNING_RATE, _STEPS), weight_decay=_WEIGHT_DECAY)

    def train(weight: jax.Array) -> tuple[Network, jax.Array]:
        def loss(network: Network) -> jax.Array:
            return jnp.sum(weight * jnp.square(model.apply(network, graph) - target)) / jnp.sum(weight)

        def step(carry: tuple[Network, optax.OptState], _: None) -> tuple[tuple[Network, optax.OptState], None]:
            network, state = carry
            updates, state = optimizer.update(jax.grad(loss)(network), state, network)
            return (optax.apply_updates(network, model.of_what_is_read(updates, network)), state), None

        (trained, _), _ = jax.lax.scan(step, (network, optimizer.init(network)), None, length=_STEPS)
        return trained, model.apply(trained, graph)

    # One after the other: side by side, their activations would not fit the caches.
    return jax.lax.map(train, weights)


def choose_shrinkage(wanted: np.ndarray, said: np.ndarray, errors: np.ndarray, groups: Sequence[Hashable]) -> float:
    """The factor in [0, 1] of what a network said [n] that comes nearest to what is wanted of it [n], in mean square.

    0 unless what that gains over ``errors`` [n] exceeds twice its standard error: with few measurements luck looks like skill.
    Those of a group are right or wrong together, and so count as one.
    """
    power = float(np.sum(said**2))
    if power == 0.0:
        return 0.0
    factor = float(np.clip(np.sum(wanted * said) / power, 0.0, 1.0))
    gain = errors**2 - (wanted - factor * said) ** 2
    numbers = number(groups)
    gains = np.bincount(numbers, gain) / np.bincount(numbers)
    return factor if np.mean(gains) > 2.0 * np.std(gains) / math.sqrt(len(gains)) else 0.0


def _machines(measurements: Sequence[Measurement]) -> np.ndarray:
    """[n, M] which machine each was measured on, that of the newest last."""
    kinds = list(dict.fromkeys(m.hardware.id for m in reversed(measurements)))[::-1]
    return np.array([[float(m.hardware.id == kind) for kind in kinds] for m in measurements])


_COUNTED = {f"{part}_{what}": 0.0 for part in ("represent", "dynamics", "predict") for what in ("elements", "moved")}
_ALIKE = _COUNTED | {"loop_count": 1.0, "host_step_seconds": 0.0, "memory_bytes": 0.0, "device_share": 1.0, "cached_rows": 0.0}


def program(workload: Workload) -> Workload:
    """What workloads of one compiled program share, on whatever machine: fusing more updates compiles nothing.

    What the base gets wrong of a program on one machine it gets wrong on another, and the seconds of a host's step are measured.
    How much memory it may take is nothing that anybody predicts seconds by.
    Elements between layers may be counted otherwise by another version, or have become a few fewer; products tell networks apart.
    """
    return dataclasses.replace(workload, **_ALIKE)


def padded(count: int) -> int:
    """A power of two of at least 64 and of at least ``count``: arrays of few sizes, so that refits rarely compile."""
    return max(64, 1 << (count - 1).bit_length())


def _table(measurements: Sequence[Measurement]) -> tuple[Workload, Rates]:
    """Workloads and rates with fields [P], P as :func:`padded` has it, filled up with the first."""
    size = padded(len(measurements))
    rows = [*measurements, *[measurements[0]] * (size - len(measurements))]
    return stack([m.workload for m in rows]), stack_rates([m.hardware for m in rows])


_stages, build_graph, apply_network = jax.jit(stages), jax.jit(make_graph), jax.jit(model.apply)
