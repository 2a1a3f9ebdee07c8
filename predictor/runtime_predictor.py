"""The predictor: analytic base, learnt residual and calibration put together.

Everything that is fitted is in :class:`Params`, a pytree that compiled programs take as an argument, so that a refit
predictor does not compile an annealer again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from predictor import artifact, calibrate, model
from predictor.analytic import STAGES, Rates, Value, hardware_rates, stages
from predictor.calibrate import PRIOR_OFFSETS, Offsets
from predictor.coefficients import PRIOR
from predictor.fit import FitReport, fit
from predictor.graph import make_graph
from predictor.memory import resident_bytes, saved_bytes
from predictor.model import Network
from predictor.overlap import batch_staleness, staleness, total
from predictor.schema import Hardware, Measurement, Outcome, Prediction, Workload

_CHUNK = 64  # graphs a network is applied to at once: their activations stay in the caches


class Params(NamedTuple):
    """Everything that is fitted."""

    coefficients: Value  # [S] of the stages
    network: Network
    shrinkage: Value  # [] in [0, 1], of the network's output
    limit: Value  # [] largest correction of log seconds
    offsets: Offsets


@functools.cache
def prior_params() -> Params:
    """Before anything was measured."""
    return Params(PRIOR, model.blank(), np.float32(0.0), np.float32(0.0), PRIOR_OFFSETS)


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

    def correction() -> jax.Array:
        raw = _residual(params.network, workload, hardware, stage_seconds)
        return (jnp.asarray(params.shrinkage) * jnp.clip(raw, -params.limit, params.limit)).reshape(shape)

    return base + jax.lax.cond(params.shrinkage > 0.0, correction, lambda: jnp.zeros(shape, jnp.float32))


_log_seconds, _base_log_seconds = jax.jit(log_seconds), jax.jit(base_log_seconds)


def _base(params: Params, stage_seconds: jax.Array, workload: Workload, hardware: Rates) -> jax.Array:
    coefficients = jnp.asarray(params.coefficients).reshape((1,) * (stage_seconds.ndim - 1) + (-1,))
    seconds: jax.Array = total(coefficients * stage_seconds, workload, hardware)
    return jnp.log(jnp.maximum(seconds, 1e-12)) + jnp.asarray(params.offsets.log_seconds)


def _residual(network: Network, workload: Workload, hardware: Rates, stage_seconds: jax.Array) -> jax.Array:
    """Output of the network for C candidates, [C], ``_CHUNK`` of them at a time."""
    rows = stage_seconds.reshape(-1, len(STAGES))
    count = rows.shape[0]
    size = min(count, _CHUNK)
    chunks = -(-count // size)

    def chunked(x: jax.Array, *rest: int) -> jax.Array:
        """[C, ...] as [chunks, size, ...], the last candidate repeated at the end."""
        flat = jnp.broadcast_to(jnp.asarray(x, jnp.float32), (count, *rest))
        return jnp.pad(flat, ((0, chunks * size - count), *((0, 0) for _ in rest)), mode="edge").reshape(chunks, size, *rest)

    def score(chunk: tuple[Workload, Rates, jax.Array]) -> jax.Array:
        return model.apply(network, make_graph(*chunk))

    inputs = (jax.tree.map(chunked, workload), jax.tree.map(chunked, hardware), chunked(rows, len(STAGES)))
    return jax.lax.map(score, inputs).reshape(-1)[:count]


@jax.jit
def _estimates(params: Params, workload: Workload, hardware: Rates) -> dict[str, jax.Array]:
    """Everything that is predicted, before offsets; fields [] or [C]."""
    seconds = log_seconds(params, workload, hardware) - params.offsets.log_seconds
    w = workload
    layers = w.represent_layers + w.dynamics_layers + w.predict_layers
    reanalyzed = jnp.minimum(w.reanalyze_fraction * w.batch_size, 1.0)
    # Search and gradient are compiled once each, reanalysis is another search.
    compile_seconds = 3.0 + 0.2 * layers + (1.0 + reanalyzed) * (1.5 + 1.5 * w.puct + 0.1 * layers)
    warm_updates = jnp.where(jnp.asarray(w.sebulba) > 0.0, staleness(w), w.loop_count)  # the first dispatch, or full queues
    cores = jnp.minimum(w.cores, hardware.cores)
    values = {
        "log_seconds": seconds,
        "log_compile": jnp.log(compile_seconds),
        "log_warmup": seconds + jnp.log(warm_updates * w.batch_size / w.replay_ratio),
        "log_cpu": (0.5 + 0.4 * jnp.asarray(w.sebulba)) * jnp.log(cores),  # threads find more to do at once
        "resident_bytes": resident_bytes(w),
        "saved_bytes": saved_bytes(w),
        "batch_staleness": batch_staleness(w),
    }
    return {name: jnp.broadcast_to(jnp.asarray(value, jnp.float32), seconds.shape) for name, value in values.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class RuntimePredictor:
    """Predicts what a workload costs on given hardware. ``RuntimePredictor()`` knows physics and typical coefficients only.

    A predictor never changes: fitting and calibrating return another.
    """

    params: Params = dataclasses.field(default_factory=prior_params)
    report: FitReport | None = None  # of the last fit

    def fit(self, measurements: Sequence[Measurement], key: jax.Array | None = None) -> RuntimePredictor:
        """Base, residual and calibration from measurements, oldest first; the last one's machine is calibrated for.

        Those that ended well teach seconds, those that ran out of memory what does not fit. Others teach nothing.
        """
        fitted = fit(jax.random.key(0) if key is None else key, measurements)
        network = jax.tree.map(np.asarray, fitted.network)
        params = Params(fitted.coefficients, network, fitted.shrinkage, fitted.limit, PRIOR_OFFSETS)
        return RuntimePredictor(params, fitted.report).calibrate(measurements)

    def calibrate(self, measurements: Sequence[Measurement]) -> RuntimePredictor:
        """Offsets alone, which a single baseline run determines; measurements oldest first."""
        if not measurements:
            return self
        rows = [_estimates(self.params, m.workload, hardware_rates(m.hardware)) for m in measurements]
        estimates = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
        on_host = np.array([m.hardware.platform == "cpu" for m in measurements])
        estimates["host_bytes"] = estimates["saved_bytes"] + np.where(on_host, estimates["resident_bytes"], 0.0)
        offsets = calibrate.fit_offsets(measurements, estimates, self.params.offsets)
        return dataclasses.replace(self, params=self.params._replace(offsets=offsets))

    def predict(self, workload: Workload, hardware: Hardware) -> Prediction:
        """What one workload, fields numbers, is expected to cost."""
        estimates = {k: float(v) for k, v in _estimates(self.params, workload, hardware_rates(hardware)).items()}
        seconds, compiling, warming, cpu = (
            math.exp(estimates[name] + float(getattr(self.params.offsets, name)))
            for name in ("log_seconds", "log_compile", "log_warmup", "log_cpu")
        )
        on_host = hardware.platform == "cpu"
        held = estimates["resident_bytes"]
        peak = float(self.params.offsets.process_bytes) + estimates["saved_bytes"] + (held if on_host else 0.0)
        limits = [float(hardware.memory_bytes), float(self.params.offsets.feasible_bytes)]
        needs = [(peak, limit) for limit in (*limits, workload.memory_bytes or math.inf)]
        needs += [] if on_host else [(held, float(hardware.device_memory_bytes * workload.num_devices))]
        short = next((pair for pair in needs if pair[0] > pair[1]), None)
        return Prediction(
            outcome=Outcome.OK if short is None else Outcome.OUT_OF_MEMORY,
            error=None if short is None else f"needs {short[0] / 2**30:.1f} GiB of {short[1] / 2**30:.1f}",
            device_peak_bytes=None if on_host else held,
            seconds_per_env_step=seconds,
            env_steps_per_second=1.0 / seconds,
            updates_per_second=float(workload.replay_ratio / workload.batch_size) / seconds,
            compile_seconds=compiling,
            warmup_seconds=warming,
            peak_bytes=peak,
            cpu_use=min(cpu, float(hardware.cores)),
            batch_staleness=estimates["batch_staleness"] if workload.sebulba else None,
        )

    def log_seconds(self, workload: Workload, hardware: Hardware) -> jax.Array:
        """Log of seconds an environment step, fields [] or [C]; traceable. See :func:`log_seconds` for use in an annealer."""
        return _log_seconds(self.params, workload, hardware_rates(hardware))

    def base_log_seconds(self, workload: Workload, hardware: Hardware) -> jax.Array:
        """The same by the analytic base alone, to compare with."""
        return _base_log_seconds(self.params, workload, hardware_rates(hardware))

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the predictor into a directory. Raises ArtifactError."""
        report = None if self.report is None else dataclasses.asdict(self.report)
        artifact.save(directory, self.params, {"stages": list(STAGES), "report": report})

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> RuntimePredictor:
        """The predictor that was saved, bit for bit. Raises ArtifactError."""
        params, meta = artifact.load(directory, prior_params())
        if meta.get("stages") != list(STAGES):
            raise artifact.ArtifactError(f"{directory}: saved with other stages, by another version")
        report = meta.get("report")
        return cls(params, None if report is None else FitReport(**report))
