"""Workloads made by hand, and a machine that no machine is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from predictor import Hardware, Measurement, Outcome, Workload

TYPICAL = {
    "observation_bytes": 16.0,
    "num_actions": 2.0,
    "num_players": 1.0,
    "num_envs": 64.0,
    "represent_flops": 17_000.0,
    "dynamics_flops": 27_000.0,
    "predict_flops": 19_000.0,
    "represent_params": 9_000.0,
    "dynamics_params": 14_000.0,
    "predict_params": 10_000.0,
    "represent_layers": 3.0,
    "dynamics_layers": 4.0,
    "predict_layers": 4.0,
    "represent_elements": 1_700.0,
    "dynamics_elements": 2_300.0,
    "predict_elements": 2_200.0,
    "represent_moved": 0.0,
    "dynamics_moved": 64.0,
    "predict_moved": 0.0,
    "hidden_size": 64.0,
    "num_bins": 21.0,
    "num_simulations": 16.0,
    "puct": 0.0,
    "search_split": 1.0,
    "search_engine": 0.0,
    "capacity": 131_072.0,
    "stored_observations": 1.0,
    "replay_ratio": 4.0,
    "prioritized": 1.0,
    "replay_on_host": 0.0,
    "batch_size": 256.0,
    "unroll_steps": 3.0,
    "td_steps": 40.0,
    "reanalyze_fraction": 0.0,
    "loop_count": 32.0,
    "sebulba": 0.0,
    "selfplay_workers": 1.0,
    "cpu_actors": 0.0,
    "search_queue_size": 0.0,
    "batch_queue_size": 0.0,
    "acting_devices": 0.0,
    "searching_devices": 0.0,
    "learning_devices": 0.0,
    "role_threads": 0.0,
    "step_in_process": 0.0,
    "host_step_seconds": 0.0,
    "compute_bits": 32.0,
    "embedding_bits": 32.0,
    "cores": 2.0,
    "num_devices": 1.0,
    "memory_bytes": 0.0,
    "device_share": 1.0,
}


THREADED = {
    "num_envs": 32.0,
    "stored_observations": 2.0,
    "loop_count": 8.0,
    "sebulba": 1.0,
    "selfplay_workers": 2.0,
    "cpu_actors": 1.0,
    "search_queue_size": 2.0,
    "batch_queue_size": 2.0,
    "acting_devices": 1.0,
    "searching_devices": 1.0,
    "learning_devices": 1.0,
    "host_step_seconds": 7e-6,
}


@pytest.fixture(scope="session")
def make_threaded() -> Callable[..., Workload]:
    """A typical workload of threads that meet at queues, with some fields changed."""
    return lambda **changes: Workload(**{**TYPICAL, **THREADED, **changes})


@pytest.fixture(scope="session")
def make_workload() -> Callable[..., Workload]:
    """A typical workload with some fields changed."""
    return lambda **changes: Workload(**{**TYPICAL, **changes})


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    return Hardware(
        cpu="Example 2000",
        cores=4,
        memory_bytes=16 * 2**30,
        platform="cpu",
        device="cpu",
        devices=1,
        device_memory_bytes=16 * 2**30,
        float32_flops=4e11,
        bfloat16_flops=3e11,
        copy_bytes_per_second=5e10,
        dispatch_seconds=1e-5,
        operation_seconds=3e-7,
        one_core_flops=1e11,
    )


@pytest.fixture(scope="session")
def family(make_workload: Callable[..., Workload]) -> Callable[[int, int], list[Workload]]:
    """``family(seed, count)``: random workloads over the knobs that matter."""

    def draw(seed: int, count: int) -> list[Workload]:
        rng = np.random.default_rng(seed)

        def one() -> Workload:
            width = float(rng.choice([16, 64, 256]))
            return make_workload(
                num_envs=float(rng.choice([8, 32, 128, 256])),
                num_simulations=float(rng.choice([4, 16, 50])),
                puct=float(rng.integers(2)),
                search_engine=float(rng.integers(2)),
                hidden_size=width,
                represent_flops=4.0 * width**2,
                dynamics_flops=6.0 * width**2,
                predict_flops=4.0 * width**2,
                represent_elements=27.0 * width,
                dynamics_elements=36.0 * width,
                predict_elements=34.0 * width,
                represent_params=2.0 * width**2,
                dynamics_params=3.0 * width**2,
                predict_params=2.0 * width**2,
                batch_size=float(rng.choice([32, 128, 512])),
                replay_ratio=float(rng.choice([0.5, 2.0, 8.0])),
                reanalyze_fraction=float(rng.choice([0.0, 0.0, 0.5])),
                loop_count=float(rng.choice([1, 8, 64])),
            )

        return [one() for _ in range(count)]

    return draw


@pytest.fixture(scope="session")
def measure(hardware: Hardware) -> Callable[..., Measurement]:
    """A measurement of a workload on the example machine that ended well unless told otherwise."""

    def make(workload: Workload, seconds: float | None, **fields: object) -> Measurement:
        given = {"outcome": Outcome.OK, "hardware": hardware, **fields}
        return Measurement(workload=workload, seconds_per_env_step=seconds, **given)

    return make
