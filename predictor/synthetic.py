"""Pipelines nobody has measured: random configurations on random machines, for the simulator to run and the network to learn.

Ranges reach far beyond the machines at hand: up to 128 cores and 64 devices, rates over three orders of magnitude.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from predictor.analytic import STAGES, Rates
from predictor.schema import Workload

_SERIAL = 1.0 / 3.0  # share of one program
_SPREAD = 0.5  # of the logarithm of what a stage really takes, over what is counted


class Synthetic(NamedTuple):
    """Random pipelines."""

    workload: Workload  # fields float32 [n]
    hardware: Rates  # fields float32 [n]
    coefficients: np.ndarray  # float32 [n, S]


def draw_pipelines(seed: int, count: int) -> Synthetic:
    """``count`` pipelines, of threads or of one program; the same ones for the same seed."""
    rng = np.random.default_rng(seed)

    def powers(low: float, high: float) -> np.ndarray:
        """Whole powers of two."""
        return 2.0 ** rng.integers(int(low), int(high) + 1, count)

    def wide(low: float, high: float) -> np.ndarray:
        """Between powers of ten, evenly in the logarithm."""
        return 10.0 ** rng.uniform(low, high, count)

    def flag(share: float) -> np.ndarray:
        return (rng.random(count) < share).astype(np.float64)

    # The machine: its processor is the device, or there are accelerators beside it.
    on_host = flag(0.5)
    cores = powers(0, 7)
    devices = np.where(on_host > 0, 1.0, powers(0, 6))
    one_core = wide(10.0, 11.3)
    processor = one_core * cores ** rng.uniform(0.6, 1.0, count)
    float32 = np.where(on_host > 0, processor, wide(12.0, 14.3))
    memory = wide(9.8, 12.0)
    hardware = {
        "cores": cores,
        "memory_bytes": memory,
        "device_memory_bytes": memory,
        "float32_flops": float32,
        "bfloat16_flops": float32 * np.where(on_host > 0, 1.0, powers(0, 3)),
        "one_core_flops": np.where(on_host > 0, one_core, float32),
        "copy_bytes_per_second": np.where(on_host > 0, wide(9.7, 11.3), wide(11.3, 12.6)),
        "dispatch_seconds": wide(-5.3, -4.0),
        "operation_seconds": wide(-6.8, -5.3),
        "narrowing_seconds": np.zeros(count),  # part of stages, of which the simulator takes any
        "devices": devices,
        "on_host": on_host,
    }
    # Devices of their own for each role, or one that all take turns on.
    apart = (devices >= 4) & (rng.random(count) < 0.8)
    acting = np.where(apart, np.maximum(1.0, np.floor(devices * rng.uniform(0.1, 0.5, count))), 1.0)
    searching = np.where(apart, np.maximum(1.0, np.floor((devices - acting) * rng.uniform(0.1, 0.6, count))), 1.0)
    learning = np.where(apart, np.maximum(1.0, devices - acting - searching), 1.0)

    # Networks: dense, or convolutions that use a parameter once a cell.
    cells = np.where(rng.random(count) < 0.5, 1.0, powers(4, 7))
    width, depth = powers(3, 9), rng.integers(1, 5, count).astype(float)
    hidden, inputs = width * cells, powers(2, 12)
    bins, actions, simulations = rng.choice([2.0, 21.0, 101.0], count), powers(1, 7), powers(1, 6)
    params = {
        "represent": inputs * width + depth * width**2,
        "dynamics": (depth + 1.0) * width**2 + width * bins,
        "predict": depth * width**2 + width * (bins + actions),
    }
    threads = np.where(rng.random(count) < _SERIAL, 0.0, 1.0)  # 0: one program does everything
    ratio, batch = powers(-1, 3), powers(5, 10)
    reanalyzed = np.where(rng.random(count) < 0.5, 0.0, rng.choice([0.25, 0.5, 1.0], count))
    players = 1.0 + flag(0.3)
    fields = {
        "observation_bytes": inputs * 4.0,
        "num_actions": actions,
        "num_players": players,
        "num_envs": powers(2, 8),
        **{f"{name}_params": value for name, value in params.items()},
        **{f"{name}_flops": 2.0 * value * cells for name, value in params.items()},
        **{f"{name}_layers": depth + extra for name, extra in (("represent", 1.0), ("dynamics", 2.0), ("predict", 2.0))},
        # Normalising and rectifying, and where a convolution is, the neighbours of each cell.
        **{
            f"{name}_{what}": (depth + extra) * hidden * each
            for name, extra in (("represent", 1.0), ("dynamics", 2.0), ("predict", 2.0))
            for what, each in (("elements", 9.0), ("moved", np.where(cells > 1.0, 9.0, 0.0)))
        },
        "hidden_size": hidden,
        "num_bins": bins,
        "num_simulations": simulations,
        "puct": flag(0.3),
        "search_split": np.where(threads > 0, 1.0, np.minimum(powers(0, 2), 4.0)),
        "search_engine": flag(0.7),
        "capacity": powers(14, 20),
        "stored_observations": np.where((threads > 0) | (players < 2.0), 2.0, 1.0),  # games on boards end by their own rules
        "replay_ratio": ratio,
        "prioritized": flag(0.7),
        "replay_on_host": np.where(on_host > 0, 0.0, flag(0.5)),
        "batch_size": batch,
        "unroll_steps": rng.choice([1.0, 3.0, 5.0], count),
        "td_steps": rng.choice([1.0, 5.0, 10.0, 40.0], count),
        "reanalyze_fraction": reanalyzed,
        "loop_count": powers(0, 5),
        "sebulba": threads,
        "selfplay_workers": np.where(threads > 0, powers(0, 5), 1.0),
        "cpu_actors": threads * powers(0, 3),
        "search_queue_size": threads * powers(0, 5),
        "batch_queue_size": threads * powers(0, 5),
        "acting_devices": threads * acting,
        "searching_devices": threads * np.minimum(searching, 16.0),
        "learning_devices": threads * learning,
        "role_threads": threads * on_host * np.where(rng.random(count) < 0.5, 0.0, np.minimum(powers(0, 3), cores)),
        "step_in_process": threads * flag(0.3),
        "host_step_seconds": threads * np.where(rng.random(count) < 0.4, 0.0, wide(-5.5, -3.5)),
        "compute_bits": np.where(flag(0.5) > 0, 16.0, 32.0),
        "embedding_bits": np.where(flag(0.3) > 0, 16.0, 32.0),
        "cores": cores,
        "num_devices": np.where((threads > 0) | (on_host > 0), 1.0, devices),
        "memory_bytes": np.zeros(count),
        "device_share": np.ones(count),
        "cached_rows": np.zeros(count),
    }
    return Synthetic(
        Workload(**{name: value.astype(np.float32) for name, value in fields.items()}),
        Rates(**{name: value.astype(np.float32) for name, value in hardware.items()}),
        np.exp(_SPREAD * rng.standard_normal((count, len(STAGES)))).astype(np.float32),
    )
