"""Between configurations, measurements and the vectors [R] of ``allocate`` and ``balance``: cores, memory, device memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from predictor import Hardware, Measurement, Outcome, Prediction
from tuner import allocate, balance
from tuner.bridge import Config

_GIB = 2**30
_MEMORY = np.array([name == "memory_bytes" for name in allocate.RESOURCES])
_MEMORY_GRAIN = 4  # allocations of memory are whole quarters of a GiB
BUSY = 0.9  # of the cores a run was given: above, cores are what its threads wait for
_LEAST_LEARNING = 0.25  # share of a learner's time: where it waits longer still, it is not known how much faster it could be
_DEVICE_MINIMUM = 1.2  # over the predicted peak: below, fragmentation ends a run


def _vector(cores: float | None, memory: float | None, device: float | None) -> np.ndarray:
    """[R] float32; what is unknown is NaN, but no device memory is none."""
    return np.array([math.nan if x is None else x for x in (cores, memory, device or 0.0)], np.float32)


def use_of(figures: Measurement | Prediction) -> np.ndarray:
    """Measured or predicted use [R]."""
    return _vector(figures.cpu_use, figures.peak_bytes, figures.device_peak_bytes)


def need_of(config: Config, measured: Measurement, hardware: Hardware) -> np.ndarray:
    """What a measured run [R] would have used had nothing been short.

    Its use; under sebulba, where the learner waited for batches while all cores were busy, the cores that would have fed it.
    """
    need = use_of(measured)
    if need[0] >= BUSY * allocation_of(config, hardware)[0]:
        need[0] /= max(1.0 - measured.waits.get("batch_get", 0.0), _LEAST_LEARNING)
    return need


def allocation_of(config: Config, hardware: Hardware) -> np.ndarray:
    """What a configuration is given [R]; all there is where it says nothing."""
    given, most = config.allocation, np.asarray(limits(hardware).maximum)
    device = None if given.device_memory is None else given.device_memory * hardware.device_memory_bytes
    memory = None if given.memory_gib is None else given.memory_gib * _GIB
    return np.array([m if x is None else x for x, m in zip((given.cores, memory, device), most, strict=True)], np.float32)


def limits(hardware: Hardware, use: np.ndarray | None = None, most: np.ndarray | None = None) -> allocate.Limits:
    """What keeps a run of predicted ``use`` [R] alive, and what the machine has, or ``most`` [R] of it that was asked for."""
    device = hardware.device_memory_bytes if hardware.platform != "cpu" else 0.0
    maximum = np.array([hardware.cores, hardware.memory_bytes, device], np.float32)
    if most is not None:
        maximum = np.minimum(maximum, most)
    if use is None:
        return allocate.Limits(np.zeros_like(maximum), maximum)
    on_host, on_device = allocate.SAFETY_BYTES[hardware.platform], allocate.DEVICE_SAFETY_BYTES[hardware.platform]
    return allocate.Limits(np.array([1.0, use[1] + on_host, use[2] * _DEVICE_MINIMUM + on_device], np.float32), maximum)


def correction(runs: Iterable[tuple[Measurement, Sequence[float] | np.ndarray]]) -> np.ndarray:
    """Measured over predicted use [R], from measurements and the use that was predicted of each."""
    pairs = [(_seen(measured), predicted) for measured, predicted in runs if measured.outcome == Outcome.OK]
    if not pairs:
        return np.ones(len(allocate.RESOURCES), np.float32)
    measured, predicted = (np.array(x, np.float32) for x in zip(*pairs, strict=True))
    return allocate.correction(measured, np.where(predicted > 0, predicted, np.nan))


def _seen(measured: Measurement) -> np.ndarray:
    """Measured use [R]; of a run that found its programs compiled, not the memory: the next may have to compile."""
    used = use_of(measured)
    return np.where(_MEMORY & measured.from_cache, np.float32(np.nan), used)


def next_allocation(
    state: balance.State,
    use: np.ndarray,
    temperature: float,
    hardware: Hardware,
    most: np.ndarray | None = None,
    worth: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[balance.State, np.ndarray]:
    """The allocation [R] of a run that is predicted to use ``use`` [R], and the state it comes from.

    The state's, which one more correction brings nearer to this run's demand, kept between the limits of this run. Of another
    configuration than the last one, so that its time says nothing of the last move. ``worth``: what the predictor expects of more
    and of less, [R] each, which decides ties.
    """
    wanted = np.asarray(allocate.demand(use, np.ones_like(use), temperature))
    gain, loss = worth or (np.zeros_like(wanted), np.zeros_like(wanted))
    seen = balance.Seen(math.nan, wanted, limits(hardware, use, most), gain, loss)
    state = balance.correct(state, seen)
    return state, np.array(allocate.allocate(state.allocated, seen.limits))


def for_training(use: np.ndarray, hardware: Hardware, most: np.ndarray) -> np.ndarray:
    """What a configuration that used ``use`` [R] is given to train with: its demand, between the limits."""
    wanted = allocate.demand(use, np.ones_like(use), 0.0)
    return np.array(allocate.allocate(wanted, limits(hardware, use, most)))


def least_cores(config: Config) -> int:
    """Cores below which a configuration is refused: a role's threads, where it has such."""
    return max(1, config.runtime.role_threads) if config.runtime.kind == "sebulba" else 1


def with_allocation(
    config: Config, allocated: np.ndarray, hardware: Hardware, cores: Sequence[int], most: np.ndarray | None = None
) -> Config:
    """The configuration under an allocation [R]: at most the cores it asked for, at least a role's threads.

    Args:
      cores: numbers to choose among; any where there are none.
      most: [R] that was asked for, which memory is not rounded up beyond.
    """
    bound = np.asarray(limits(hardware).maximum if most is None else most, np.float64)
    wanted = min(config.allocation.cores or hardware.cores, max(least_cores(config), math.ceil(allocated[0])))
    memory = min(math.ceil(allocated[1] / _GIB * _MEMORY_GRAIN) / _MEMORY_GRAIN, hardware.memory_bytes / _GIB)
    changes: dict[str, Any] = {"allocation.memory_gib": min(memory, _short(bound[1] / _GIB))}
    changes["allocation.cores"] = min((n for n in cores if n >= wanted), default=wanted)
    if hardware.platform != "cpu":
        thousandths = math.ceil(1e3 * float(allocated[2]) / hardware.device_memory_bytes)
        share = min(max(thousandths, 1), 1000) / 1e3
        changes["allocation.device_memory"] = min(share, _short(bound[2] / hardware.device_memory_bytes))
    if hardware.platform == "gpu":
        changes["allocation.devices"] = devices_of(config, hardware)
    return config.replace(changes)


def _short(number: float) -> float:
    """As somebody wrote it, of what was a float32 since."""
    return float(round(number, 6))


def devices_of(config: Config, hardware: Hardware) -> int:
    """Accelerators that a configuration has work for; seeing no others, its roles are on the same ones.

    The rule by which roles share devices where there are too few for each is the runtime's.
    """
    runtime = config.runtime
    if runtime.kind != "sebulba":
        return runtime.num_devices
    acting, searching, learning = runtime.acting_devices, runtime.searching_devices, runtime.learning_devices
    for needed in (acting + searching + learning, max(acting, searching) + learning):
        if needed <= hardware.devices:
            return needed
    return max(acting, searching, learning)


def balance_of(config: Config, use: np.ndarray, hardware: Hardware) -> float:
    """B of one run: its allocation over its demand by measured use [R]."""
    wanted = allocate.demand(use, np.ones(len(allocate.RESOURCES), np.float32), 0.0)
    return float(balance.balance_factor(allocation_of(config, hardware), wanted))


def balance_of_run(config: Config, measured: Measurement, hardware: Hardware) -> float | None:
    """B of one run by what it needed; None where it failed."""
    return balance_of(config, need_of(config, measured, hardware), hardware) if measured.outcome == Outcome.OK else None
