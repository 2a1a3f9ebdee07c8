"""Corrects predictions by what was measured on this machine: the newest baseline counts most.

Machines drift: neighbours come and go, clocks change. Everything here is an offset found from differences between
measured and predicted; nothing is trained. Seconds follow a random walk that is seen through what single predictions are off
by (:func:`predictor.posterior.local_level`), so that one measurement says much of a machine nobody fitted to, and little of
one that was; other figures take a recent median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from predictor.analytic import Value
from predictor.posterior import local_level
from predictor.schema import Measurement, Outcome

_HALF_LIFE = 4.0  # measurements after which an older one counts half
# Of logarithms of seconds, standard deviations:
_MISFIT = 0.2  # of a prediction, the offset apart
_DRIFT = 0.03  # of the offset from one measurement to the next


class Offsets(NamedTuple):
    """What is added to estimates; float32 [] each."""

    log_seconds: Value
    log_compile: Value
    log_warmup: Value
    log_cpu: Value
    process_bytes: Value  # of the process itself, beside what the workload holds
    feasible_bytes: Value  # a larger peak has run out of the host's memory before
    feasible_device_bytes: Value  # one that held more of an accelerator has run out of that's


PRIOR_OFFSETS = Offsets(
    log_seconds=np.float32(0.0),
    log_compile=np.float32(0.0),
    log_warmup=np.float32(0.0),
    log_cpu=np.float32(0.0),
    process_bytes=np.float32(0.75e9),
    feasible_bytes=np.float32(np.inf),
    feasible_device_bytes=np.float32(np.inf),
)

# In the error of a run that ended for want of an accelerator's memory. The host's ends it by a signal, or in Python's words.
_ON_DEVICE = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")

# The figure of a measurement that each offset corrects the logarithm of; estimates are keyed by the offset.
_FIGURES = {
    "log_compile": "compile_seconds",
    "log_warmup": "warmup_seconds",
    "log_cpu": "cpu_use",
}


def weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """The value at which half of the weight is reached, in between where it is reached exactly; [n] each, n at least 1."""
    order = np.argsort(values, kind="stable")
    ordered, reached = np.asarray(values)[order], np.cumsum(np.asarray(weights)[order])
    half = reached[-1] / 2.0
    low = int(np.searchsorted(reached, half * (1.0 - 1e-9)))
    high = min(int(np.searchsorted(reached, half * (1.0 + 1e-9), side="right")), len(ordered) - 1)
    return float((ordered[low] + ordered[high]) / 2.0)


def recent_median(values: Sequence[float], fallback: float) -> float:
    """The median of values from oldest to newest, each counting less the older it is; ``fallback`` where there are none."""
    if not values:
        return fallback
    age = np.arange(len(values))[::-1]
    return weighted_median(np.array(values), 0.5 ** (age / _HALF_LIFE))


def ran_out_of_device_memory(measurement: Measurement) -> bool:
    """Whether what ran out was the memory of an accelerator, and not the host's."""
    named = any(sign in (measurement.error or "") for sign in _ON_DEVICE)
    return measurement.outcome is Outcome.OUT_OF_MEMORY and not measurement.hardware.on_host and named


def feasible(failed: Sequence[float], fine: Sequence[float], before: float) -> np.float32:
    """The most that is known to be enough memory, of sizes that failed and others that did not; inf where nothing ever failed.

    A hair below the smallest that failed, or what was known ``before``, unless a larger one did not: then memory was short for
    another reason. Rounded up: what was enough once is enough for the same again.
    """
    most = max([min([before, *(size * (1.0 - 1e-5) for size in failed)]), *fine])
    rounded = np.float32(most)
    return rounded if rounded >= most else np.nextafter(rounded, np.float32(np.inf))


def middle(found: Sequence[Offsets]) -> Offsets:
    """The median of what several machines have told, which is what is expected of another."""
    return Offsets(*(np.float32(np.median(values)) for values in zip(*found, strict=True)))


def fit_offsets(
    measurements: Sequence[Measurement], estimates: Mapping[str, np.ndarray], before: Offsets, *, scale: float
) -> Offsets:
    """Offsets for the machine of the newest measurement.

    Args:
      measurements: [M], oldest first; those of other kinds of machine are left out.
      estimates: without offsets, [M] each: ``log_seconds``, ``log_compile``, ``log_warmup``, ``log_cpu``; ``host_bytes``,
        what the workload, and compiling it, hold in the memory of the host; ``device_bytes``, what its devices hold together.
      before: kept where nothing was measured.
      scale: how far that machine may be as a whole from what was expected, by :func:`predictor.fit.machine_scale`.
    """
    here = [i for i, m in enumerate(measurements) if m.hardware.id == measurements[-1].hardware.id]
    # What compiling costs, in seconds and in memory, is told by those that compiled.
    compiled = [i for i in here if not measurements[i].from_cache]
    # Seconds, by those that had no more cores for it than they have.
    alone = [i for i in compiled if measurements[i].compile_cores is None]

    def log_offset(name: str) -> np.float32:
        rows = alone if name == "log_compile" else here
        figures = [(getattr(measurements[i], _FIGURES[name]), estimates[name][i]) for i in rows]
        differences = [float(np.log(figure) - estimate) for figure, estimate in figures if figure]
        return np.float32(recent_median(differences, float(getattr(before, name))))

    held = estimates["host_bytes"]
    beside = [measurements[i].peak_bytes - float(held[i]) for i in compiled if measurements[i].peak_bytes]  # type: ignore[operator]
    process_bytes = float(np.float32(max(recent_median(beside, float(before.process_bytes)), 0.0)))  # as it will be added

    # Of those that could have had all the memory there is, what they took of the host's and of each device's.
    fine = [i for i in here if measurements[i].outcome is Outcome.OK]
    failed = [i for i in here if measurements[i].outcome is Outcome.OUT_OF_MEMORY]
    on_device = [i for i in failed if ran_out_of_device_memory(measurements[i])]

    def peaks(rows: Sequence[int]) -> list[float]:
        return [process_bytes + float(held[i]) for i in rows if not measurements[i].workload.memory_bytes]

    def device_peaks(rows: Sequence[int]) -> list[float]:
        workloads = [(i, measurements[i].workload) for i in rows]
        return [float(estimates["device_bytes"][i]) / w.num_devices for i, w in workloads if w.device_share == 1.0]

    most = feasible(peaks([i for i in failed if i not in on_device]), peaks(fine), float(before.feasible_bytes))
    most_device = feasible(device_peaks(on_device), device_peaks(fine), float(before.feasible_device_bytes))
    told = [(seconds, i) for i in here if (seconds := measurements[i].seconds_per_env_step)]
    differences = np.array([np.log(seconds) - estimates["log_seconds"][i] for seconds, i in told])
    level = local_level(
        differences,
        np.full(len(told), _MISFIT),
        start=float(before.log_seconds),
        prior=scale,
        drift=_DRIFT,
    )
    logs = {name: log_offset(name) for name in _FIGURES} | {"log_seconds": np.float32(level)}
    return Offsets(**logs, process_bytes=np.float32(process_bytes), feasible_bytes=most, feasible_device_bytes=most_device)
