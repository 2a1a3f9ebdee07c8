"""The only file that imports muzerox: configurations to workloads, and a training session that can be timed.

Everything the tuner knows of a configuration, an environment or a run, it asks here.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import time
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from muzerox import allocation as allocations
from muzerox.algorithms import make_algorithm
from muzerox.allocation import available_cores, available_memory
from muzerox.cli import add_config_arguments, add_output_arguments, make_config
from muzerox.commands import Command, Extension
from muzerox.compilation import enable_cache, home
from muzerox.config import Config
from muzerox.config_io import dumps as toml
from muzerox.config_io import load as load_config
from muzerox.envs import make_env
from muzerox.errors import ConfigError, RunFailed, UserError
from muzerox.networks import make_model
from muzerox.precision import POLICIES, default_level, resolve
from muzerox.report import print_table
from muzerox.run_dir import RunDir, write_atomically
from muzerox.runtimes import make_runtime
from muzerox.search import ENGINES, default_engine
from predictor import Workload
from tuner.flops import Cost, count_cost

__all__ = [
    "Command",
    "Config",
    "ConfigError",
    "Extension",
    "RunDir",
    "RunFailed",
    "Session",
    "UserError",
    "add_config_arguments",
    "add_output_arguments",
    "allocated",
    "allocation_checked",
    "available_cores",
    "available_memory",
    "bounded_num_envs",
    "concrete",
    "describe",
    "device_facts",
    "enable_cache",
    "get",
    "home",
    "load_config",
    "make_config",
    "print_table",
    "toml",
    "valid",
    "write_atomically",
]

# Collecting the first sequences may take this share of the training, at most: the agent acts at random until then.
WARMUP_SHARE = 0.02


def concrete(config: Config, platform: str) -> Config:
    """The configuration with ``auto`` and absent values that a knob needs replaced by what they mean on this machine.

    ``platform`` is the measured machine's: this process may well be kept off its accelerator.
    """
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
    """Environments beyond which collecting the first sequences takes too long; at least those configured."""
    rows = max(config.sequence_length, 1)
    return max(config.runtime.num_envs, int(WARMUP_SHARE * config.train.max_env_steps) // rows)


def valid(config: Config, path: str, value: Any, platform: str) -> bool:
    """Whether the configuration may take ``value`` at ``path`` on a machine of ``platform``, other knobs aside."""
    if path == "replay.placement" and value == "host" and platform == "cpu":
        return False  # the device's memory is the host's
    try:
        # Knobs that depend on one another are freed first: the space rules on their combinations.
        changed = config.replace({"search.split": 1, path: value} if path == "runtime.num_envs" else {path: value})
        allocations.check(changed.allocation)
    except ConfigError:
        return path == "search.split"
    return True


def describe(config: Config) -> Workload:
    """A concrete configuration in numbers; nothing of it is run, its networks are only traced.

    Raises:
      UserError: an environment that cannot be served or does not fit the networks.
    """
    spec = make_env(config.env).spec
    policy = POLICIES[config.precision.level]
    model = make_model(config.network, spec, policy)
    params = jax.eval_shape(model.init, jax.random.key(0))
    observation = jax.ShapeDtypeStruct((1, *spec.observation_shape), spec.observation_dtype)
    action = jax.ShapeDtypeStruct((1,), np.int32)
    hidden = jax.eval_shape(model.represent, params, observation)
    costs: dict[str, Cost] = {
        "represent": count_cost(model.represent, params, observation),
        "dynamics": count_cost(model.dynamics, params, hidden, action),
        "predict": count_cost(model.predict, params, hidden),
    }
    search, train = config.search, config.train
    bits = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
    return Workload(
        observation_bytes=float(math.prod(spec.observation_shape) * np.dtype(spec.observation_dtype).itemsize),
        num_actions=float(spec.num_actions),
        num_players=float(spec.num_players),
        num_envs=float(config.runtime.num_envs),
        **{f"{name}_flops": cost.flops for name, cost in costs.items()},
        **{f"{name}_params": cost.params for name, cost in costs.items()},
        **{f"{name}_layers": cost.layers for name, cost in costs.items()},
        hidden_size=float(math.prod(hidden.shape)),
        num_bins=float(config.network.num_bins),
        num_simulations=float(search.num_simulations),
        puct=float(search.algorithm == "muzero"),
        search_split=float(search.split),
        search_engine=float(list(ENGINES).index(search.engine)),
        capacity=float(config.replay.capacity),
        replay_ratio=float(config.replay_ratio),
        prioritized=float(config.replay.kind == "prioritized"),
        replay_on_host=float(config.replay.placement == "host"),
        batch_size=float(train.batch_size),
        unroll_steps=float(train.unroll_steps),
        td_steps=float(train.td_steps),
        reanalyze_fraction=config.reanalyzed / train.batch_size,
        loop_count=float(config.runtime.loop_count),
        compute_bits=bits[policy.compute],
        embedding_bits=bits[policy.embedding],
        cores=float(config.allocation.cores or 1),
        num_devices=float(config.runtime.num_devices),
    )


class Session:
    """A training in progress that is timed in bursts. It writes nothing but the compilation cache."""

    def __init__(self, config: Config):
        enable_cache()
        start = time.perf_counter()
        self.config = config = config.replace({f"precision.{k}": v for k, v in vars(resolve(config.precision)).items()})
        env = make_env(config.env)
        self._runtime = make_runtime(config, env, make_algorithm(config, env.spec))
        # Playing the first rows can take minutes, and tells nothing of the pace that follows.
        self._state = self._runtime.prefill(self._runtime.init(jax.random.key(config.seed)))
        self._state, self._report = self._runtime.run(self._state, 1, 1)
        self.compile_seconds = time.perf_counter() - start
        # Saving a checkpoint copies the state: a training needs that much more than the bursts that are timed here.
        self._saved_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        self._steps_an_update = float(config.train.batch_size / config.replay_ratio)
        # Rows are made every so many updates: a burst of whole cycles holds its share of both.
        self._cycle = max(1, math.ceil(config.runtime.num_envs / self._steps_an_update))
        before = time.perf_counter()
        self._run(1, self._cycle)  # once more, so that no first use of anything is timed
        self._seconds_an_update = (time.perf_counter() - before) / self._cycle
        self.warmup_seconds = time.perf_counter() - before

    def _run(self, n: int, loop_count: int) -> None:
        self._state, self._report = self._runtime.run(self._state, n, loop_count)

    def burst(self, seconds: float, loop_count: int) -> dict[str, Any]:
        """Trains for about ``seconds`` in dispatches of ``loop_count`` updates, in whole cycles of acting and learning.

        The last dispatch makes what is left; where not even one fits, it is the only one: next to it, dispatching costs nothing.
        """
        cycles = max(1, round(seconds / max(self._seconds_an_update, 1e-9) / self._cycle))
        updates = cycles * self._cycle
        whole, rest = divmod(updates, loop_count)
        cpu, wall = time.process_time(), time.perf_counter()
        if whole:
            self._run(whole, loop_count)
        if rest:
            self._run(1, rest)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self._seconds_an_update = wall / updates
        losses = self._report.metrics.get("loss", math.nan)
        return {
            "seconds_per_env_step": wall / (updates * self._steps_an_update),
            "updates_per_second": updates / wall,
            "cpu_use": cpu / wall,
            "peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + self._saved_bytes),
            "device_peak_bytes": _device_peak_bytes(),
            "finite": bool(math.isfinite(losses)),
        }


def _device_peak_bytes() -> float | None:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats["peak_bytes_in_use"]) if "peak_bytes_in_use" in stats else None


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
