"""What the annealer minimises: predicted seconds, and small prices on what else a configuration takes.

Without them knobs that stop mattering for speed are noise: of two configurations of a speed, the better one leaves more cores
and memory to others, and learns from what is less old.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from predictor import Hardware, Measurement, Params, Rates, Workload, hardware_rates, log_seconds, resident_bytes, staleness
from predictor.analytic import Value
from tuner.space import Space, Tables, feasible, workloads

RESOURCE_PRICE = 0.01  # taking all cores and all memory of the machine costs this share of time
STALENESS_PRICE = 0.02  # so does learning from what is a period of the target network old
ANY, NO_POINT = -1, -2  # entries of ``measured``: matches every choice, and none


class Limits(NamedTuple):
    """What a candidate may not exceed, and what it pays for coming near; float32 [] each."""

    max_num_envs: Value
    max_staleness: Value  # updates
    staleness_price: Value  # of an update


def price(workload: Workload, hardware: Rates, staleness_price: Value) -> Value:
    """The prices of candidates, as shares of their time: of cores, of memory, of updates of staleness. Fields [] or [C]."""
    memory = resident_bytes(workload) / hardware.memory_bytes
    taken = RESOURCE_PRICE * 0.5 * (workload.cores / hardware.cores + memory)
    return taken + staleness_price * staleness(workload)


def cost(measurement: Measurement, hardware: Hardware, staleness_price: float) -> float:
    """What is minimised, of a measured configuration: log of its seconds plus the prices; infinite where it failed."""
    seconds = measurement.seconds_per_env_step
    if not seconds:
        return math.inf
    return math.log(seconds) + float(price(measurement.workload, hardware_rates(hardware), staleness_price))


def energy(
    points: jax.Array,
    params: Params,
    hardware: Rates,
    base: Workload,
    tables: Tables,
    limits: Limits,
    measured: jax.Array,
) -> jax.Array:
    """Log of the predicted seconds an environment step, plus the prices; infinite where infeasible or measured already.

    Args:
      points: int32 [C, D].
      measured: int32 [M, D], points that are not to be proposed again; ``ANY`` stands for every choice of a knob.

    Returns:
      float32 [C].

    Everything but ``points`` is arrays, so that neither a better predictor nor another workload compiles again.
    """
    workload = workloads(base, tables, points)
    time = log_seconds(params, workload, hardware)
    same = (points[:, None, :] == measured[None, :, :]) | (measured == ANY)[None, :, :]
    seen = jnp.any(jnp.all(same, axis=-1), axis=-1)
    allowed = feasible(workload, limits.max_num_envs, limits.max_staleness)
    allowed &= (resident_bytes(workload) < hardware.memory_bytes) & ~seen
    return jnp.where(allowed, time + price(workload, hardware, limits.staleness_price), jnp.inf)


def excluded(space: Space, known: Sequence[Sequence[int]]) -> jax.Array:
    """What is not to be proposed after the points ``known``: int32 [M, D], ``ANY`` for what a trial has covered.

    A process has timed the best of the knobs that share its compiled program. Fine knobs are covered once points that differ in
    nothing else were measured twice. M is a power of two, so that few programs are compiled; filled up with what is no point.
    """
    count = len(known)
    points = np.full((2 ** math.ceil(math.log2(max(count, 16))), len(space.knobs)), NO_POINT, np.int32)
    points[:count] = np.asarray(known, np.int32).reshape(count, len(space.knobs))
    points[:count, [knob.cost == "live" for knob in space.knobs]] = ANY
    coarse = np.where([knob.fine for knob in space.knobs], ANY, points[:count])
    _, group, times = np.unique(coarse, axis=0, return_inverse=True, return_counts=True)
    often = times[group.reshape(-1)] > 1
    points[:count][often] = coarse[often]
    return jnp.asarray(points)
