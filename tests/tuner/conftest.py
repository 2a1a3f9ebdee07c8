"""What the tuner's tests share: a small workload, a machine, and a tiny configuration that compiles in seconds."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from trials import SMALL

import tuner
from predictor import Hardware, Workload
from tuner.bridge import Config

# Fields of a workload that are 0 where one program does everything.
RUNTIME = (
    "sebulba",
    "cpu_actors",
    "search_queue_size",
    "batch_queue_size",
    "acting_devices",
    "searching_devices",
    "learning_devices",
    "role_threads",
    "step_in_process",
    "host_step_seconds",
)
TINY = {
    "replay.min_size": 64,
    "replay.capacity": 4096,
    "runtime.num_envs": 8,
    "runtime.loop_count": 2,
    "train.batch_size": 16,
    "search.num_simulations": 2,
    "network.width": 8,
    "network.depth": 1,
    "train.unroll_steps": 1,
    "train.td_steps": 4,
}


@pytest.fixture(scope="session")
def load_benchmark() -> Callable[[str], ModuleType]:
    """``load_benchmark(name)``: a script of ``benchmarks/`` as a module, under another name, for one is ``predictor.py``."""
    folder = Path(__file__).parents[2] / "benchmarks"

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{name}_benchmark", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        before = list(sys.path)
        sys.path.append(str(folder))  # for what scripts share; behind the packages
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path[:] = before
        return module

    return load


@pytest.fixture
def tiny() -> Config:
    """A CartPole configuration that compiles in seconds."""
    return Config.preset("gymnax:CartPole-v1").replace(TINY)


@pytest.fixture
def tiny_threads() -> Config:
    """The same of gymnasium, whose environments step on the host."""
    return Config.preset("gymnasium:CartPole-v1").replace(TINY)


@pytest.fixture
def machine() -> Hardware:
    """Four cores, 8 GiB and no accelerator."""
    return Hardware(
        cpu="a processor",
        cores=4,
        memory_bytes=8 * 2**30,
        platform="cpu",
        device="cpu",
        devices=1,
        device_memory_bytes=8 * 2**30,
        float32_flops=2e11,
        bfloat16_flops=4e11,
        copy_bytes_per_second=2e10,
        dispatch_seconds=2e-5,
        operation_seconds=5e-7,
        one_core_flops=6e10,
    )


@pytest.fixture
def workload() -> Workload:
    """One like CartPole's."""
    ones = {field.name: 1.0 for field in dataclasses.fields(Workload)}
    return Workload(
        **ones
        | {
            "num_envs": 64.0,
            "num_simulations": 16.0,
            "capacity": 131072.0,
            "batch_size": 256.0,
            "unroll_steps": 3.0,
            "td_steps": 40.0,
            "replay_ratio": 4.0,
            "loop_count": 32.0,
            "compute_bits": 32.0,
            "embedding_bits": 32.0,
            "cores": 4.0,
            "reanalyze_fraction": 0.0,
            "replay_on_host": 0.0,
            "puct": 0.0,
            **dict.fromkeys(RUNTIME, 0.0),
        }
    )


@pytest.fixture
def threaded(workload: Workload) -> Workload:
    """One like CartPole's by threads that meet at queues."""
    ones = dict.fromkeys(RUNTIME, 1.0)
    return dataclasses.replace(workload, **{**ones, "num_envs": 32.0, "loop_count": 8.0, "selfplay_workers": 2.0})


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuner.TuneResult:
    """A whole tuning on a real environment, small; its folder is not to be changed: copy it."""
    out = tmp_path_factory.mktemp("tuning") / "t"
    return tuner.tune(SMALL, budget="10m", max_trials=2, out=out, burst=0.05, quiet=True)
