"""What the annealer minimises: predicted seconds, and a small price on what the machine could be doing besides."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from predictor import Params, Rates, Workload, log_seconds, resident_bytes
from tuner.space import Tables, feasible, workloads

# Taking the whole machine is worth this share of time. Without a price, knobs that stop mattering for speed are noise: of two
# configurations of a speed, the one that leaves more cores and memory to others is the better one.
RESOURCE_PRICE = 0.01
ANY, NO_POINT = -1, -2  # entries of ``measured``: matches every choice, and none


def energy(
    points: jax.Array,
    params: Params,
    hardware: Rates,
    base: Workload,
    tables: Tables,
    max_num_envs: jax.Array,
    measured: jax.Array,
) -> jax.Array:
    """Log of the predicted seconds an environment step, plus the price; infinite where infeasible or measured already.

    Args:
      points: int32 [C, D].
      measured: int32 [M, D], points that are not to be proposed again; ``ANY`` stands for every choice of a knob.

    Returns:
      float32 [C].

    Everything but ``points`` is arrays, so that neither a better predictor nor another workload compiles again.
    """
    workload = workloads(base, tables, points)
    time = log_seconds(params, workload, hardware)
    memory = resident_bytes(workload) / hardware.memory_bytes
    price = RESOURCE_PRICE * 0.5 * (workload.cores / hardware.cores + memory)
    same = (points[:, None, :] == measured[None, :, :]) | (measured == ANY)[None, :, :]
    seen = jnp.any(jnp.all(same, axis=-1), axis=-1)
    allowed = feasible(workload, max_num_envs) & (memory < 1.0) & ~seen
    return jnp.where(allowed, time + price, jnp.inf)
