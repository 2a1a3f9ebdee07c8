"""The only file that imports muzerox: what a configuration may be here, and a training session that can be timed.

Everything the tuner knows of a configuration, an environment or a run, it asks here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

from muzerox import allocation as allocations
from muzerox import energy, live, usage
from muzerox.algorithms import make_algorithm
from muzerox.allocation import GIB, available_cores, available_memory
from muzerox.cli import add_config_arguments, add_output_arguments, make_config
from muzerox.commands import Command, Extension
from muzerox.compilation import cache_use, compiler_options, enable_cache, home
from muzerox.config import Config, NetworkConfig
from muzerox.config_io import dumps as toml
from muzerox.config_io import load as load_config
from muzerox.config_io import parse_assignment
from muzerox.drift import REFERENCE, measure_drift
from muzerox.envs import in_process, make_env
from muzerox.errors import ConfigError, RunFailed, UserError
from muzerox.networks import make_model
from muzerox.precision import POLICIES, default_level, resolve
from muzerox.report import print_table
from muzerox.run_dir import RunDir, write_atomically
from muzerox.runtimes import make_runtime, resolve_kind
from muzerox.runtimes.sebulba.pipeline import make_window
from muzerox.search import ENGINES, default_engine
from muzerox.training import RESUMABLE
from muzerox.types import Environment, HostEnvironment

__all__ = [
    "ENGINES",
    "GIB",
    "POLICIES",
    "REFERENCE",
    "RESUMABLE",
    "Command",
    "Config",
    "ConfigError",
    "Extension",
    "HostEnvironment",
    "NetworkConfig",
    "RunDir",
    "RunFailed",
    "Session",
    "UserError",
    "add_config_arguments",
    "add_output_arguments",
    "allocated",
    "allocation_checked",
    "ask_live",
    "available_cores",
    "available_memory",
    "bounded_num_envs",
    "bounded_staleness",
    "can_change_live",
    "compiler_options",
    "concrete",
    "device_facts",
    "enable_cache",
    "environment",
    "get",
    "home",
    "in_process",
    "load_config",
    "make_config",
    "make_model",
    "measure_drift",
    "no_energy",
    "parse_assignment",
    "print_table",
    "toml",
    "valid",
    "write_atomically",
]

# Collecting the first sequences may take this share of the training, at most: the agent acts at random until then, and what it
# plays reaches the learner as much later. tic_tac_toe learns the same with 0.013; not with 0.027 at O2 (docs/learning.md).
WARMUP_SHARE = 0.0125

ask_live, can_change_live = live.ask, live.can_change
environment: Callable[[str], Environment | HostEnvironment] = functools.lru_cache(8)(make_env)


def concrete(config: Config, platform: str) -> Config:
    """The configuration with ``auto`` and absent values that a knob needs replaced by what they mean on this machine.

    ``platform`` is the measured machine's: this process may well be kept off its accelerator.

    Raises:
      UserError: an environment that cannot be served, or not by the configured runtime.
    """
    config = resolve_kind(config, environment(config.env))
    level = config.precision.level if config.precision.level != "auto" else default_level(platform)
    precision = resolve(dataclasses.replace(config.precision, level=level))
    changes: dict[str, Any] = {f"precision.{k}": v for k, v in dataclasses.asdict(precision).items()}
    if config.search.engine == "auto":
        changes["search.engine"] = default_engine(platform)
    if config.allocation.cores is None:
        changes["allocation.cores"] = len(available_cores())
    return config.replace(changes)


def allocation_checked(config: Config) -> Config:
    """The configuration. Raises ConfigError when its allocation is more than this machine has."""
    allocations.check(config.allocation)
    return config


def allocated(config: Config) -> AbstractContextManager[None]:
    """Keeps this process to the configuration's allocation inside a block."""
    return allocations.applied(config.allocation)


def get(config: Config, path: str) -> Any:
    """The value at a dotted path."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def bounded_num_envs(config: Config) -> int:
    """Environments, of all workers, beyond which collecting the first sequences takes too long; at least those configured."""
    rows = max(config.sequence_length, 1)
    configured = config.runtime.num_envs * config.selfplay_workers
    return max(configured, int(WARMUP_SHARE * config.train.max_env_steps) // rows)


def bounded_staleness(config: Config) -> int:
    """Updates that self-play may be ahead of the learner: a period of the target network, or what is configured."""
    return max(config.train.target_period, make_window(config))


# Freed before a knob is looked at by itself: the space rules on their combinations.
_TOGETHER = {"search.split": 1, "runtime.num_envs": 1, "runtime.selfplay_workers": 1}


def valid(config: Config, path: str, value: Any, platform: str) -> bool:
    """Whether the configuration may take ``value`` at ``path`` on a machine of ``platform``, other knobs aside."""
    if path == "replay.placement" and value == "host" and platform == "cpu":
        return False  # the device's memory is the host's
    if path == "runtime.role_threads" and value and platform != "cpu":
        return False  # only a CPU has threads to give
    try:
        free = _TOGETHER if path in ("runtime.num_envs", "runtime.selfplay_workers") else {}
        changed = config.replace({**free, path: value})
        allocations.check(changed.allocation)
    except ConfigError:
        return path == "search.split"
    return True


def cycle_of(config: Config) -> int:
    """Updates of the shortest burst. Rows are made every so many updates: a burst of whole cycles holds its share of both."""
    rows = config.runtime.num_envs * config.selfplay_workers
    cycle = max(1, math.ceil(rows / float(config.train.batch_size / config.replay_ratio)))
    if config.runtime.kind != "sebulba":
        return cycle
    # Whole dispatches, and several: the first of a burst and its last overlap with nothing.
    loop_count = config.runtime.loop_count
    return loop_count * max(_LEAST_DISPATCHES, math.ceil(cycle / loop_count))


class Session:
    """A training in progress that is timed in bursts. It writes nothing but the compilation cache. Close it."""

    def __init__(self, config: Config):
        enable_cache()
        with cache_use() as from_cache:
            self._start(config)
            self.from_cache = from_cache()

    def _start(self, config: Config) -> None:
        start = time.perf_counter()
        config = config.replace({f"precision.{k}": v for k, v in vars(resolve(config.precision)).items()})
        env = make_env(config.env)
        config = resolve_kind(config, env)
        self._threaded = config.runtime.kind == "sebulba"
        if self._threaded:
            # Near its end self-play would no longer run ahead; and who measures may stop this process within a step.
            config = config.replace({"train.max_env_steps": 2_000_000_000, "runtime.step_timeout": 1e6})
        self.config = config
        self._runtime = make_runtime(config, env, make_algorithm(config, env.spec))
        # Playing the first rows can take minutes, and tells nothing of the pace that follows.
        self._state = self._runtime.prefill(self._runtime.init(jax.random.key(config.seed)))
        # Saving a checkpoint copies the state: a training needs that much more than the bursts that are timed here.
        self._saved_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        self._steps_an_update = float(config.train.batch_size / config.replay_ratio)
        self._cycle = cycle_of(config)
        self._run(1, 2 if self._threaded else 1)  # the second batch under threads has to be played for
        self.compile_seconds = time.perf_counter() - start
        self._meter, _ = energy.find_meter(jax.default_backend())
        before = time.perf_counter()
        # Once more, so that no first use of anything is timed. Threads ran ahead while nobody learnt, until queues were full: it
        # takes as long until they are as in a training.
        updates = self._cycle + (make_window(config) if self._threaded else 0)
        self._run(1, updates)
        self.warmup_seconds = time.perf_counter() - before
        self._seconds_an_update = self.warmup_seconds / updates

    def close(self) -> None:
        """Ends threads and environments."""
        self._runtime.close()

    def _run(self, n: int, loop_count: int) -> None:
        self._state, self._report = self._runtime.run(self._state, n, loop_count)

    def _joules(self) -> float | None:
        """Since the last look; None where nobody tells, and once a counter is gone: seconds are measured all the same."""
        try:
            return self._meter.joules() if self._meter else None
        except OSError:
            self._meter = None
            return None

    def burst(self, seconds: float, loop_count: int) -> dict[str, Any]:
        """Trains for about ``seconds`` in dispatches of ``loop_count`` updates, in whole cycles of acting and learning.

        The last dispatch makes what is left; where not even one fits, it is the only one: next to it, dispatching costs nothing.
        Under sebulba dispatches are of the configured size, and threads stay at work after a burst: the next goes on from where
        this one ended, if it follows at once or the process is stopped in between.
        """
        cycles = max(1, round(seconds / max(self._seconds_an_update, 1e-9) / self._cycle))
        updates = cycles * self._cycle
        if self._threaded:
            self._run(1, self.config.runtime.loop_count)  # who waited while nobody learnt has stopped
            loop_count = updates  # asked for at once
        whole, remainder = divmod(updates, loop_count)
        self._joules()
        machine, cpu, wall = usage.machine_cpu_seconds(), usage.cpu_seconds(), time.perf_counter()
        if whole:
            self._run(whole, loop_count)
        if remainder:
            self._run(1, remainder)
        wall, cpu, machine_after = time.perf_counter() - wall, usage.cpu_seconds() - cpu, usage.machine_cpu_seconds()
        joules = self._joules()
        self._seconds_an_update = wall / updates
        losses = self._report.metrics.get("loss", math.nan)
        return {
            "wall_seconds": wall,
            "seconds_per_env_step": wall / (updates * self._steps_an_update),
            "updates_per_second": updates / wall,
            "cpu_use": cpu / wall,
            "others_seconds": 0.0 if machine is None or machine_after is None else max(0.0, machine_after - machine - cpu),
            "peak_bytes": usage.peak_bytes() + self._saved_bytes,
            "device_peak_bytes": _device_peak_bytes(),
            "joules_per_env_step": joules / (updates * self._steps_an_update) if joules is not None else None,
            "finite": bool(math.isfinite(losses)),
            **_pipeline_figures(self._report.pipeline, wall),
        }


_LEAST_DISPATCHES = 4


def _pipeline_figures(pipeline: dict[str, float], wall: float) -> dict[str, Any]:
    """How old what was used was, and threads waiting by what they waited for; nothing of a runtime without threads."""
    ages = {name: pipeline[f"{name}_mean"] for name in ("batch_staleness", "acting_staleness") if f"{name}_mean" in pipeline}
    waits = {
        name.removeprefix("wait_").removesuffix("_seconds"): round(value / wall, 4)
        for name, value in pipeline.items()
        if name.startswith("wait_") and name.endswith("_seconds")
    }
    return {**ages, "waits": waits}


def _device_peak_bytes() -> float | None:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats["peak_bytes_in_use"]) if "peak_bytes_in_use" in stats else None


def no_energy(platform: str) -> str | None:
    """Why this machine's energy cannot be read; None where it can."""
    meter, says = energy.find_meter(platform)
    return None if meter else says


def device_facts() -> dict[str, Any]:
    """What JAX says of the default device."""
    device = jax.devices()[0]
    memory = available_memory()
    limit = (device.memory_stats() or {}).get("bytes_limit", memory)
    return {
        "platform": jax.default_backend(),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "device_memory_bytes": int(limit),
        "memory_bytes": memory,
        "cores": len(available_cores()),
    }
