"""What the annealer minimises: predicted seconds, what they cost or the energy they take, and small prices on what else is taken.

Without them knobs that stop mattering for speed are noise: of two configurations of a speed, the better one leaves more cores
and memory to others, and learns from what is less old.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from predictor import Hardware, Measurement, Params, Rates, Workload, hardware_rates, log_seconds, resident_bytes, staleness
from predictor.analytic import Value
from predictor.memory import fits
from predictor.overlap import shared_devices
from tuner.goal import Goal
from tuner.residual import Residual, capacity, evaluate
from tuner.space import Space, Tables, feasible, select, workloads

RESOURCE_PRICE = 0.01  # taking all cores and all memory of the machine costs this share of time
STALENESS_PRICE = 0.02  # so does learning from what is a period of the target network old
# Watts, about: what a machine takes that idles, a core, a GiB, a device more. Measured energy corrects what they say.
_IDLE_WATTS, _CORE_WATTS, _GIB_WATTS, _DEVICE_WATTS = 20.0, 8.0, 0.4, 300.0
ANY, NO_POINT = -1, -2  # entries of ``measured``: matches every choice, and none


class Limits(NamedTuple):
    """What a candidate may not exceed, and what it pays; float32 [] each."""

    max_num_envs: Value
    max_staleness: Value  # updates
    staleness_price: Value  # of an update
    curiosity: Value = 0.0  # log seconds that a standard deviation of what is not known is worth; negative shuns risks
    max_bytes: Value = np.inf  # of the host's memory
    money: Value = 0.0  # weight of what an environment step costs, from 0 to 1
    energy: Value = 0.0  # of the joules it takes; the rest is that of its seconds
    core_price: Value = 0.0  # of an hour
    gib_price: Value = 0.0
    device_price: Value = 0.0
    device_watts: Value = 0.0


def limits_of(goal: Goal, hardware: Hardware, space: Space, staleness_price: float, curiosity: float = 0.0) -> Limits:
    """What a goal means on a machine, for the points of a grid."""
    price, watts = (goal.device, _DEVICE_WATTS) if hardware.platform != "cpu" else (0.0, 0.0)
    bounds = space.max_num_envs, space.max_staleness, staleness_price, curiosity, goal.within(hardware).memory_bytes
    return Limits(*map(jnp.float32, (*bounds, goal.money, goal.energy, goal.core, goal.gib, price, watts)))


def price(workload: Workload, hardware: Rates, staleness_price: Value) -> Value:
    """The prices of candidates, as shares of their time: of cores, of memory, of updates of staleness. Fields [] or [C]."""
    memory = resident_bytes(workload) / hardware.memory_bytes
    taken = RESOURCE_PRICE * 0.5 * (workload.cores / hardware.cores + memory)
    return taken + staleness_price * staleness(workload)


def log_rent(workload: Workload, hardware: Rates, limits: Limits) -> Value:
    """What turns log seconds into the log of what is minimised: the weighted logs of an hour's price and of power, both expected.

    0 where only time counts.
    """
    held, devices = resident_bytes(workload) / 2**30, _devices(workload, hardware)
    hour = limits.core_price * workload.cores + limits.gib_price * held + limits.device_price * devices
    watts = _IDLE_WATTS + _CORE_WATTS * workload.cores + _GIB_WATTS * held + limits.device_watts * devices
    return limits.money * jnp.log(jnp.maximum(hour, 1e-9)) + limits.energy * jnp.log(watts)


def _devices(w: Workload, hardware: Rates) -> Value:
    """Accelerators that are held: as :func:`tuner.resources.devices_of` tells of a configuration."""
    acting, searching, learning = w.acting_devices, w.searching_devices, w.learning_devices
    with_search, with_learning = shared_devices(w, hardware)
    first = jnp.where(with_search, jnp.maximum(acting, searching), acting + searching)
    roles = jnp.where(with_learning, jnp.maximum(first, learning), first + learning)
    return jnp.where(jnp.asarray(w.sebulba) > 0.0, roles, w.num_devices)


def missed_power(measurement: Measurement, limits: Limits) -> float:
    """The weighted log of measured over expected power; 0 where energy does not count, infinite where it was not measured."""
    if not float(limits.energy):
        return 0.0
    joules, seconds = measurement.joules_per_env_step, measurement.seconds_per_env_step
    if not joules or not seconds:
        return math.inf
    rates = hardware_rates(measurement.hardware)
    expected = float(log_rent(measurement.workload, rates, limits._replace(money=0.0, energy=1.0)))
    return float(limits.energy) * (math.log(joules / seconds) - expected)


def cost(measurement: Measurement, hardware: Hardware, limits: Limits) -> float:
    """What is minimised, of a measured configuration: log of its seconds, rent and prices; infinite where it failed."""
    seconds = measurement.seconds_per_env_step
    if not seconds:
        return math.inf
    paid = float(_paid(measurement.workload, hardware_rates(hardware), limits))
    return math.log(seconds) + paid + missed_power(measurement, limits)


@jax.jit
def _paid(workload: Workload, hardware: Rates, limits: Limits) -> Value:
    """Prices and log of the rent of candidates, fields [] or [C]."""
    return log_rent(workload, hardware, limits) + price(workload, hardware, limits.staleness_price)


def energy(
    points: jax.Array,
    params: Params,
    hardware: Rates,
    base: Workload,
    tables: Tables,
    limits: Limits,
    measured: jax.Array,
    residual: Residual,
) -> jax.Array:
    """Log of the predicted seconds an environment step, plus the prices; infinite where infeasible or measured already.

    Less what curiosity is worth: of two that are expected to be as fast, the one that less is known of may be much faster
    (the lower confidence bound of Cox and John, 1992).

    Args:
      points: int32 [C, D].
      measured: int32 [M, D], points that are not to be proposed again; ``ANY`` stands for every choice of a knob.

    Returns:
      float32 [C].

    Everything but ``points`` is arrays, so that neither a better predictor nor another workload compiles again.
    """
    workload = workloads(base, tables, points)
    missed, deviation = evaluate(residual, points)
    time = log_seconds(params, workload, hardware) + missed - limits.curiosity * deviation
    sizes = [place.shape[0] for place in residual.places]
    same = [
        (jnp.arange(size, dtype=jnp.int32)[None, :] == measured[:, knob][:, None]) | (measured[:, knob][:, None] == ANY)
        for knob, size in enumerate(sizes)
    ]
    matches = select(jnp.concatenate(same, axis=1).astype(jnp.float32), points, sizes)  # [M, C], knobs that are the same
    seen = jnp.any(matches > len(sizes) - 0.5, axis=0)
    allowed = feasible(workload, limits.max_num_envs, limits.max_staleness)
    offsets = params.offsets
    most = jnp.minimum(offsets.feasible_bytes, limits.max_bytes)
    allowed &= fits(workload, hardware, offsets.process_bytes, most, offsets.feasible_device_bytes) & ~seen
    return jnp.where(allowed, time + _paid(workload, hardware, limits), jnp.inf)


def excluded(space: Space, known: Sequence[Sequence[int]]) -> jax.Array:
    """What is not to be proposed after the points ``known``: int32 [M, D], ``ANY`` for what a trial has covered.

    A process has timed the best of the knobs that share its compiled program. Fine knobs are covered once points that differ in
    nothing else were measured twice. M is a power of two, so that few programs are compiled; filled up with what is no point.
    """
    count = len(known)
    points = np.full((capacity(count), len(space.knobs)), NO_POINT, np.int32)
    points[:count] = np.asarray(known, np.int32).reshape(count, len(space.knobs))
    points[:count, [knob.cost == "live" for knob in space.knobs]] = ANY
    coarse = np.where([knob.fine for knob in space.knobs], ANY, points[:count])
    _, group, times = np.unique(coarse, axis=0, return_inverse=True, return_counts=True)
    often = times[group.reshape(-1)] > 1
    points[:count][often] = coarse[often]
    return jnp.asarray(points)


def every_point_with(space: Space, path: str, value: Any) -> tuple[int, ...]:
    """What :func:`excluded` takes for every point [D] with ``value`` at ``path``, a dimension of the grid."""
    return tuple(
        options.index(value) if knob.path == path else ANY for knob, options in zip(space.knobs, space.choices, strict=True)
    )
