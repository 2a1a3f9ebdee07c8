"""The only file that imports muzerox: configurations to workloads, and a training session that can be timed.

Everything the tuner knows of a configuration, an environment or a run, it asks here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import platform as host
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from muzerox import allocation as allocations
from muzerox import usage
from muzerox.algorithms import make_algorithm
from muzerox.allocation import available_cores, available_memory
from muzerox.cli import add_config_arguments, add_output_arguments, make_config
from muzerox.commands import Command, Extension
from muzerox.compilation import cache_use, enable_cache, home
from muzerox.config import Config
from muzerox.config_io import dumps as toml
from muzerox.config_io import load as load_config
from muzerox.envs import in_process, make_env
from muzerox.errors import ConfigError, RunFailed, UserError
from muzerox.networks import make_model
from muzerox.precision import POLICIES, default_level, resolve
from muzerox.report import print_table
from muzerox.run_dir import RunDir, write_atomically
from muzerox.runtimes import make_runtime, resolve_kind
from muzerox.runtimes.sebulba.pipeline import make_window
from muzerox.search import ENGINES, default_engine
from muzerox.types import Environment, HostEnvironment
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
    "bounded_staleness",
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

_environment: Callable[[str], Environment | HostEnvironment] = functools.lru_cache(8)(make_env)


def concrete(config: Config, platform: str) -> Config:
    """The configuration with ``auto`` and absent values that a knob needs replaced by what they mean on this machine.

    ``platform`` is the measured machine's: this process may well be kept off its accelerator.

    Raises:
      UserError: an environment that cannot be served, or not by the configured runtime.
    """
    config = resolve_kind(config, _environment(config.env))
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


def describe(config: Config) -> Workload:
    """A concrete configuration in numbers. Its networks are only traced; its environment, where it runs on the host, is timed.

    Raises:
      UserError: an environment that cannot be served or does not fit the networks.
      RunFailed: an environment that fails when it is stepped.
    """
    spec = _environment(config.env).spec
    policy = POLICIES[config.precision.level]
    model = make_model(config.network, spec, policy)
    params = jax.eval_shape(model.init, jax.random.key(0))

    def observations(rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *spec.observation_shape), spec.observation_dtype)

    def costs_of(rows: int) -> dict[str, Cost]:
        action = jax.ShapeDtypeStruct((rows,), np.int32)
        hidden = jax.eval_shape(model.represent, params, observations(rows))
        return {
            "represent": count_cost(model.represent, params, observations(rows)),
            "dynamics": count_cost(model.dynamics, params, hidden, action),
            "predict": count_cost(model.predict, params, hidden),
        }

    costs, of_two = costs_of(1), costs_of(2)
    hidden = jax.eval_shape(model.represent, params, observations(1))
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
        # Of one row more: parameters are made narrower once, whatever the number of rows.
        **{f"{name}_elements": of_two[name].elements - cost.elements for name, cost in costs.items()},
        **{f"{name}_moved": of_two[name].moved - cost.moved for name, cost in costs.items()},
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
        memory_bytes=(config.allocation.memory_gib or 0.0) * allocations.GIB,
        **_describe_runtime(config),
    )


def _describe_runtime(config: Config) -> dict[str, float]:
    """The fields of a Workload that only one of the runtimes reads; of the other they are what they have no effect at."""
    runtime = config.runtime
    names = ("cpu_actors", "search_queue_size", "batch_queue_size", "acting_devices", "searching_devices", "learning_devices")
    sebulba = runtime.kind == "sebulba"
    return {
        "sebulba": float(sebulba),
        "selfplay_workers": float(config.selfplay_workers),
        **{name: float(getattr(runtime, name)) if sebulba else 0.0 for name in names},
        "role_threads": float(runtime.role_threads) if sebulba else 0.0,
        "step_in_process": float(sebulba and runtime.step_in == "process"),
        "host_step_seconds": host_step_seconds(config.env),
        "num_devices": 1.0 if sebulba else float(runtime.num_devices),
    }


_LEAST_STEP = 1e-7  # seconds; no environment in Python or C takes less


@functools.lru_cache(8)
def host_step_seconds(env_id: str) -> float:
    """Seconds of a step of one environment on the host, measured once a machine; 0 for one that is a program of the device.

    Raises:
      RunFailed: it fails when it is stepped.
    """
    if not isinstance(_environment(env_id), HostEnvironment):
        return 0.0
    machine = [env_id, host.node(), host.machine(), len(available_cores())]
    file = home() / "environments" / f"{hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:12]}.json"
    try:
        return float(json.loads(file.read_text("utf-8"))["step_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        file.unlink(missing_ok=True)  # not measured yet, or damaged
    seconds = _time_steps(env_id)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps({"env": env_id, "step_seconds": seconds}) + "\n")
    return seconds


def _time_steps(env_id: str, few: int = 2, many: int = 66, rows: int = 100) -> float:
    """By what a row takes longer with many environments than with few: what a row costs by itself is counted elsewhere.

    Rows of the two alternate, so that a machine that slows down meanwhile slows both. In processes of their own, so that an
    environment which crashes or hangs takes nothing with it.
    """
    actions = np.random.default_rng(0)
    passed: dict[int, list[float]] = {few: [], many: []}
    try:
        with contextlib.ExitStack() as stack:
            batches = {}
            for num_envs in passed:
                batches[num_envs] = in_process(env_id, num_envs, 0, 60.0)
                stack.callback(batches[num_envs].close)
            num_actions = {num_envs: batch.reset().legal.shape[1] for num_envs, batch in batches.items()}
            for _, (num_envs, batch) in itertools.product(range(rows), batches.items()):
                action = actions.integers(0, num_actions[num_envs], num_envs).astype(np.int32)
                start = time.perf_counter()
                batch.step(action)
                passed[num_envs].append(time.perf_counter() - start)
    except (RuntimeError, TimeoutError, OSError) as error:
        raise RunFailed(f"{env_id} fails when it is stepped: {' '.join(str(error).split())[:300]}") from None
    longer = statistics.median(b - a for a, b in zip(passed[few], passed[many], strict=True)) / (many - few)
    return float(f"{max(longer, _LEAST_STEP):.2g}")


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
        if self._threaded:  # near its end self-play would no longer run ahead
            config = config.replace("train.max_env_steps", 2_000_000_000)
        self.config = config
        self._runtime = make_runtime(config, env, make_algorithm(config, env.spec))
        # Playing the first rows can take minutes, and tells nothing of the pace that follows.
        self._state = self._runtime.prefill(self._runtime.init(jax.random.key(config.seed)))
        # Saving a checkpoint copies the state: a training needs that much more than the bursts that are timed here.
        self._saved_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        self._steps_an_update = float(config.train.batch_size / config.replay_ratio)
        # Rows are made every so many updates: a burst of whole cycles holds its share of both.
        self._cycle = max(1, math.ceil(config.runtime.num_envs * config.selfplay_workers / self._steps_an_update))
        self._lead = 0  # updates before a burst is timed
        if self._threaded:
            # Whole dispatches, and several: the first of a burst and its last overlap with nothing.
            loop_count = config.runtime.loop_count
            self._cycle = loop_count * max(_LEAST_DISPATCHES, math.ceil(self._cycle / loop_count))
            # While nobody learns, threads run ahead until queues are full. It takes as long until they are as in a training.
            self._lead = make_window(config)
        self._run(1, 2 if self._threaded else 1)  # the second batch under threads has to be played for
        self.compile_seconds = time.perf_counter() - start
        before = time.perf_counter()
        self._run(1, self._lead + self._cycle)  # once more, so that no first use of anything is timed
        self._seconds_an_update = (time.perf_counter() - before) / (self._lead + self._cycle)
        self.warmup_seconds = time.perf_counter() - before

    def close(self) -> None:
        """Ends threads and environments."""
        self._runtime.close()

    def _run(self, n: int, loop_count: int) -> None:
        self._state, self._report = self._runtime.run(self._state, n, loop_count)

    def burst(self, seconds: float, loop_count: int) -> dict[str, Any]:
        """Trains for about ``seconds`` in dispatches of ``loop_count`` updates, in whole cycles of acting and learning.

        The last dispatch makes what is left; where not even one fits, it is the only one: next to it, dispatching costs nothing.
        Under sebulba dispatches are of the configured size.
        """
        cycles = max(1, round(seconds / max(self._seconds_an_update, 1e-9) / self._cycle))
        updates = cycles * self._cycle
        if self._threaded:
            loop_count = updates  # asked for at once
            self._run(1, self._lead)
        whole, rest = divmod(updates, loop_count)
        cpu, wall = usage.cpu_seconds(), time.perf_counter()
        if whole:
            self._run(whole, loop_count)
        if rest:
            self._run(1, rest)
        wall, cpu = time.perf_counter() - wall, usage.cpu_seconds() - cpu
        self._seconds_an_update = wall / updates
        losses = self._report.metrics.get("loss", math.nan)
        if self._threaded:
            _come_to_rest()
        return {
            "seconds_per_env_step": wall / (updates * self._steps_an_update),
            "updates_per_second": updates / wall,
            "cpu_use": cpu / wall,
            "peak_bytes": usage.peak_bytes() + self._saved_bytes,
            "device_peak_bytes": _device_peak_bytes(),
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


def _come_to_rest(most: float = 10.0) -> None:
    """Returns when threads have filled their queues and wait: what they still do would disturb whoever is timed next."""
    end = time.monotonic() + most
    while time.monotonic() < end:
        before = usage.cpu_seconds()
        time.sleep(0.03)
        if usage.cpu_seconds() - before < 0.003:
            return


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
