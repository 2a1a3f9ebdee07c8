"""The predictor: analytic base, learnt residual and calibration put together.

Everything that is fitted is in :class:`Params`, a pytree that compiled programs take as an argument, so that a refit
predictor does not compile an annealer again.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from predictor import artifact, calibrate, model, pretrain
from predictor.analytic import STAGES, Rates, Value, hardware_rates, stages
from predictor.calibrate import PRIOR_OFFSETS, Offsets
from predictor.compiler import NETWORK
from predictor.fit import Fit, FitReport, Spread, fit, linearise, machine_scale, untaught, usable
from predictor.graph import EDGE_TYPES, EDGE_WIDTH, NODE_TYPES, NODE_WIDTH, make_graph
from predictor.memory import device_bytes, host_bytes
from predictor.model import Network
from predictor.overlap import batch_staleness, staleness, total
from predictor.schema import SCHEMA, Hardware, Measurement, Outcome, Prediction, Workload

_COMPILING_BYTES = 3.5e7  # that the compiler holds at its peak, for each second it is expected to take
_CHUNK = 512  # candidates a network is applied to at once on a processor: their activations stay in its caches
_LARGE_CHUNK = 2**15  # on an accelerator: they fit its memory


class Params(NamedTuple):
    """Everything that is fitted."""

    coefficients: Value  # [S] of the stages
    network: Network  # empty: none
    shrinkage: Value  # [] in [0, 1], of the network's output
    limit: Value  # [] largest correction of log seconds
    spread: Spread
    offsets: Offsets

    def heard(self) -> Params:
        """The same without a network that has no say, which takes seconds to trace and compile. Not inside ``jax.jit``."""
        return self if float(self.shrinkage) > 0.0 else self._replace(network={})

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What ``jax.jit`` should tell XLA of a program that scores by these."""
        return NETWORK if self.network else {}


@functools.cache
def prior_params() -> Params:
    """Before anything was measured: coefficients are typical ones, and the network, which knows pipelines, has no say yet."""
    return Params(*untaught(pretrain.load())[:-1], PRIOR_OFFSETS)


def base_log_seconds(params: Params, workload: Workload, hardware: Rates) -> jax.Array:
    """Log of seconds an environment step by the analytic base alone; fields [] or [C] -> float32 [...]."""
    return _base(params, stages(workload, hardware), workload, hardware)


def log_seconds(params: Params, workload: Workload, hardware: Rates) -> jax.Array:
    """Log of seconds an environment step; fields [] or [C] -> float32 [...]. What an annealer minimises.

    A network that has not earned any trust is not evaluated, which makes this as fast as the base.
    """
    stage_seconds = stages(workload, hardware)
    shape = stage_seconds.shape[:-1]
    base = _base(params, stage_seconds, workload, hardware)
    if not params.network:
        return base

    def correction() -> jax.Array:
        raw = _residual(params.network, workload, hardware, stage_seconds)
        return (jnp.asarray(params.shrinkage) * jnp.clip(raw, -params.limit, params.limit)).reshape(shape)

    return base + jax.lax.cond(params.shrinkage > 0.0, correction, lambda: jnp.zeros(shape, jnp.float32))


def log_spread(params: Params, workload: Workload, hardware: Rates) -> jax.Array:
    """Standard deviation of what would be measured about :func:`log_seconds`; fields [] or [C] -> float32 [...]."""
    stage_seconds = stages(workload, hardware)
    shape = stage_seconds.shape[:-1]
    rows = stage_seconds.reshape(-1, len(STAGES))
    fields = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), rows.shape[:1]), (workload, hardware))
    _, elasticity = linearise(jnp.log(params.coefficients), rows, *fields)
    design = jnp.concatenate([jnp.ones((rows.shape[0], 1)), elasticity], axis=1)
    variance = jnp.sum(jnp.square(design @ params.spread.root), axis=1) + params.spread.noise**2
    return jnp.sqrt(variance).reshape(shape)


def stage_shares(params: Params, workload: Workload, hardware: Rates) -> jax.Array:
    """What each stage adds to the seconds, by the analytic base; fields [] -> float32 [S] that add up to 1.

    A norm of sums is homogeneous, so elasticities are shares (Euler).
    """
    seconds = stages(workload, hardware)[None]
    fields = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32)[None], (workload, hardware))
    return linearise(jnp.log(params.coefficients), seconds, *fields)[1][0]


_log_seconds, _base_log_seconds, _log_spread = jax.jit(log_seconds), jax.jit(base_log_seconds), jax.jit(log_spread)
_heard_log_seconds, _stage_shares = jax.jit(log_seconds, compiler_options=NETWORK), jax.jit(stage_shares)


def _base(params: Params, stage_seconds: jax.Array, workload: Workload, hardware: Rates) -> jax.Array:
    coefficients = jnp.asarray(params.coefficients).reshape((1,) * (stage_seconds.ndim - 1) + (-1,))
    seconds: jax.Array = total(coefficients * stage_seconds, workload, hardware)
    return jnp.log(jnp.maximum(seconds, 1e-12)) + jnp.asarray(params.offsets.log_seconds)


def _residual(network: Network, workload: Workload, hardware: Rates, stage_seconds: jax.Array) -> jax.Array:
    """Output of the network for C candidates, [C], some of them at a time."""
    rows = stage_seconds.reshape(-1, len(STAGES))
    count = rows.shape[0]

    def score(chunk: tuple[Workload, Rates, jax.Array]) -> jax.Array:
        return model.apply(network, make_graph(*chunk))

    def in_chunks(most: int, workload: Workload, hardware: Rates, rows: jax.Array) -> jax.Array:
        size = min(count, most)
        chunks = -(-count // size)

        def chunked(x: jax.Array, *rest: int) -> jax.Array:
            """[C, ...] as [chunks, size, ...], the last candidate repeated at the end."""
            flat = jnp.broadcast_to(jnp.asarray(x, jnp.float32), (count, *rest))
            padding = ((0, chunks * size - count), *((0, 0) for _ in rest))
            return jnp.pad(flat, padding, mode="edge").reshape(chunks, size, *rest)

        inputs = (jax.tree.map(chunked, workload), jax.tree.map(chunked, hardware), chunked(rows, len(STAGES)))
        return jax.lax.map(score, inputs).reshape(-1)[:count]

    few, many = functools.partial(in_chunks, _CHUNK), functools.partial(in_chunks, _LARGE_CHUNK)
    found: jax.Array = jax.lax.platform_dependent(workload, hardware, rows, cpu=few, default=many)
    return found


def _compile_seconds(w: Workload) -> Value:
    """By what there is to compile: search and gradient once each, reanalysis another search, convolutions as products."""
    layers = w.represent_layers + w.dynamics_layers + w.predict_layers
    reanalyzed = jnp.minimum(w.reanalyze_fraction * w.batch_size, 1.0)
    narrow = jnp.where(jnp.asarray(w.compute_bits) <= 16.0, 1.0, 0.0)
    grid = jnp.where(jnp.asarray(w.dynamics_moved) > 8.0 * w.hidden_size, 1.0, 0.0)  # each cell's neighbours are gathered
    whole = 6.0 + 0.25 * layers + 2.5 * reanalyzed + 6.0 * w.puct + 2.0 * narrow + 10.0 * grid
    return whole / jnp.maximum(w.cores, 1.0) ** 0.7


@jax.jit
def _estimates(params: Params, workload: Workload, hardware: Rates) -> dict[str, jax.Array]:
    """Everything that is predicted, before offsets; fields [] or [C]."""
    seconds = log_seconds(params, workload, hardware) - params.offsets.log_seconds
    w = workload
    compile_seconds = _compile_seconds(w)
    warm_updates = jnp.where(jnp.asarray(w.sebulba) > 0.0, staleness(w), w.loop_count)  # the first dispatch, or full queues
    cores = jnp.minimum(w.cores, hardware.cores)
    values = {
        "log_seconds": seconds,
        "log_compile": jnp.log(compile_seconds),
        "log_warmup": seconds + jnp.log(warm_updates * w.batch_size / w.replay_ratio),
        "log_cpu": (0.5 + 0.4 * jnp.asarray(w.sebulba)) * jnp.log(cores),  # threads find more to do at once
        "device_bytes": device_bytes(w, hardware),
        "host_bytes": host_bytes(w, hardware) + _COMPILING_BYTES * compile_seconds,
        "batch_staleness": batch_staleness(w, hardware),
    }
    return {name: jnp.broadcast_to(jnp.asarray(value, jnp.float32), seconds.shape) for name, value in values.items()}


def schema_hash() -> str:
    """Twelve hexadecimal digits for what fitted arrays are about: fields of records, stages, features of the graph."""
    fields = [[f.name for f in dataclasses.fields(kind)] for kind in (Workload, Hardware)]
    about = [SCHEMA, fields, STAGES, NODE_TYPES, list(EDGE_TYPES), NODE_WIDTH, EDGE_WIDTH]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True, eq=False)
class RuntimePredictor:
    """Predicts what a workload costs on given hardware. ``RuntimePredictor()`` knows physics and typical coefficients only.

    A predictor never changes: fitting and calibrating return another.
    """

    params: Params = dataclasses.field(default_factory=prior_params)
    report: FitReport | None = None  # of the last fit
    machines: tuple[str, ...] = ()  # that it was fitted to
    about: str | None = None  # the machine of the last fit; what was fitted to several together is about none of them

    def fit(self, measurements: Sequence[Measurement], key: jax.Array | None = None, *, train: bool = True) -> RuntimePredictor:
        """Base, residual and calibration from measurements, oldest first: of one machine for that one, of several for any other.

        What this predictor knows already is kept as far as they do not say otherwise, so that they should be new to it: other
        machines first, then this one, then the work at hand. Those that ended well teach seconds, those that ran out of memory
        what does not fit, and any how long it took to compile and warm up. ``train``: the graph network, too, which takes most of
        the time; otherwise it stays as it is.
        """
        if not measurements:
            return self
        offset = float(self.params.offsets.log_seconds)
        p = self.params
        coefficients = np.asarray(p.coefficients * np.exp(np.float32(offset)))
        before = Fit(coefficients, p.network, p.shrinkage, p.limit, p.spread, self.report)
        key = jax.random.key(0) if key is None else key
        fitted = fit(key, measurements, before, meant=self.about, taught=bool(self.machines), train=train)
        params = Params(*fitted[:-1], self.params.offsets)
        # Only of those that told seconds is it known how fast they are.
        measured = tuple(dict.fromkeys(m.hardware.id for m in usable(measurements)))
        about = (measured[0] if len(measured) == 1 else None) if measured else self.about
        model = RuntimePredictor(params, fitted.report, tuple(dict.fromkeys([*self.machines, *measured])), about)
        ids = dict.fromkeys(m.hardware.id for m in measurements)
        calibrated = [model.calibrate([m for m in measurements if m.hardware.id == one]).params.offsets for one in ids]
        # The fit has told already how fast machines are.
        return model._with_offsets(**calibrate.middle(calibrated)._replace(log_seconds=np.float32(0.0))._asdict())

    def _with_offsets(self, **values: Value) -> RuntimePredictor:
        offsets = self.params.offsets._replace(**{name: np.float32(value) for name, value in values.items()})
        return dataclasses.replace(self, params=self.params._replace(offsets=offsets))

    def elsewhere(self) -> RuntimePredictor:
        """The predictor for machines it was not fitted to: that memory ran out on one says nothing of another."""
        return self._with_offsets(feasible_bytes=np.inf, feasible_device_bytes=np.inf)

    def calibrate(self, measurements: Sequence[Measurement]) -> RuntimePredictor:
        """Offsets alone, which a single baseline run determines; measurements oldest first."""
        if not measurements:
            return self
        rows = [_estimates(self.params.heard(), m.workload, hardware_rates(m.hardware)) for m in measurements]
        estimates = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
        scale = machine_scale([measurements[-1].hardware], self.about, bool(self.machines))
        offsets = calibrate.fit_offsets(measurements, estimates, self.params.offsets, scale=scale)
        return dataclasses.replace(self, params=self.params._replace(offsets=offsets))

    def predict(self, workload: Workload, hardware: Hardware) -> Prediction:
        """What one workload, fields numbers, is expected to cost."""
        estimates = {k: float(v) for k, v in _estimates(self.params.heard(), workload, hardware_rates(hardware)).items()}
        seconds, compiling, warming, cpu = (
            math.exp(estimates[name] + float(getattr(self.params.offsets, name)))
            for name in ("log_seconds", "log_compile", "log_warmup", "log_cpu")
        )
        held = estimates["device_bytes"]
        peak = float(self.params.offsets.process_bytes) + estimates["host_bytes"]
        limits = [float(hardware.memory_bytes), float(self.params.offsets.feasible_bytes)]
        needs = [(peak, limit) for limit in (*limits, workload.memory_bytes or math.inf)]
        each = min(float(self.params.offsets.feasible_device_bytes), hardware.device_memory_bytes * workload.device_share)
        needs += [] if hardware.on_host else [(held, each * workload.num_devices)]
        short = next((pair for pair in needs if pair[0] > pair[1]), None)
        low, high = (math.exp(float(x)) for x in self.log_interval(workload, hardware))
        return Prediction(
            interval=(low, high),
            shares=dict(zip(STAGES, map(float, _stage_shares(self.params, workload, hardware_rates(hardware))), strict=True)),
            outcome=Outcome.OK if short is None else Outcome.OUT_OF_MEMORY,
            error=None if short is None else f"needs {short[0] / 2**30:.1f} GiB of {short[1] / 2**30:.1f}",
            device_peak_bytes=None if hardware.on_host else held,
            seconds_per_env_step=seconds,
            env_steps_per_second=1.0 / seconds,
            updates_per_second=float(workload.replay_ratio / workload.batch_size) / seconds,
            compile_seconds=compiling,
            warmup_seconds=warming,
            peak_bytes=peak,
            cpu_use=min(cpu, float(workload.cores), float(hardware.cores)),
            batch_staleness=estimates["batch_staleness"] if workload.sebulba else None,
        )

    def log_seconds(self, workload: Workload, hardware: Hardware) -> jax.Array:
        """Log of seconds an environment step, fields [] or [C]; traceable. See :func:`log_seconds` for use in an annealer."""
        params = self.params.heard()
        traced = any(isinstance(x, jax.core.Tracer) for x in vars(workload).values())  # within another program
        score = _heard_log_seconds if params.network and not traced else _log_seconds
        return score(params, workload, hardware_rates(hardware))

    def base_log_seconds(self, workload: Workload, hardware: Hardware) -> jax.Array:
        """The same by the analytic base alone, to compare with."""
        return _base_log_seconds(self.params, workload, hardware_rates(hardware))

    def log_interval(self, workload: Workload, hardware: Hardware) -> tuple[jax.Array, jax.Array]:
        """Logs of seconds between which nine of ten measurements are expected; fields [] or [C] -> two of float32 [...]."""
        expected = self.log_seconds(workload, hardware)
        reach = self.params.spread.factor * _log_spread(self.params, workload, hardware_rates(hardware))
        return expected - reach, expected + reach

    def save(self, directory: str | os.PathLike[str], card: Mapping[str, Any] | None = None) -> None:
        """Writes the predictor into a directory; ``card`` says for people where it is from. Raises ArtifactError."""
        report = None if self.report is None else dataclasses.asdict(self.report)
        meta = {
            "schema": schema_hash(),
            "report": report,
            "machines": list(self.machines),
            "about": self.about,
            "card": dict(card or {}),
        }
        artifact.save(directory, self.params, meta)

    @classmethod
    def pretrained(cls) -> RuntimePredictor:
        """The one that ships: fitted to what ``benchmarks/collect.py`` measured, on machines that its card names.

        Of another machine it knows how stages compare, and not yet how fast they are as a whole.
        """
        return _pretrained()

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> RuntimePredictor:
        """The predictor that was saved, bit for bit. Raises ArtifactError."""
        params, meta = artifact.load(directory, prior_params())
        if meta.get("schema") != schema_hash():
            raise artifact.ArtifactError(f"{directory}: saved with other stages or quantities, by another version")
        report = meta.get("report")
        try:
            fitted = None if report is None else FitReport(**report)
            return cls(params, fitted, tuple(meta.get("machines", ())), meta.get("about"))
        except TypeError as error:
            raise artifact.ArtifactError(f"{directory}: not a saved predictor: {error}") from error


@functools.cache
def _pretrained() -> RuntimePredictor:
    return RuntimePredictor.load(pretrain.SHIPPED / "predictor")
