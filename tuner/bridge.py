"""The only file that imports muzerox: what a configuration may be here, what it may be changed to, and what a run is.

Everything the tuner knows of a configuration, an environment or a run, it asks here. Names whose modules import JAX are imported
when they are asked for: commands that only read their arguments need none of them, and answer in a fraction of the time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from muzerox import allocation as allocations
from muzerox import energy, live, usage
from muzerox.allocation import GIB, available_cores, available_memory
from muzerox.cli import add_config_arguments, add_output_arguments, make_config
from muzerox.commands import Command, Extension
from muzerox.config import RESUMABLE, Config, NetworkConfig
from muzerox.config_io import dumps as toml
from muzerox.config_io import load as load_config
from muzerox.config_io import parse_assignment
from muzerox.envs import make_env
from muzerox.errors import ConfigError, RunFailed, UserError
from muzerox.lazy import lazy_names
from muzerox.report import make_console, print_table
from muzerox.run_dir import RunDir, write_atomically
from muzerox.streams import answer, tell

if TYPE_CHECKING:
    from muzerox.algorithms import make_algorithm
    from muzerox.compilation import cache_use, compiler_options, enable_cache, home
    from muzerox.drift import REFERENCE, measure_drift
    from muzerox.envs import in_process
    from muzerox.networks import make_model
    from muzerox.parts import cached_rows
    from muzerox.precision import POLICIES, has_diverged, resolve
    from muzerox.runtimes import make_runtime, offer_cpu_devices, resolve_kind
    from muzerox.runtimes.sebulba.pipeline import make_window
    from muzerox.search import ENGINES
    from muzerox.timing import PipelineTotals, portion
    from muzerox.types import Environment, HostEnvironment, Skips

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
    "PipelineTotals",
    "RunDir",
    "RunFailed",
    "Skips",
    "UserError",
    "add_config_arguments",
    "add_output_arguments",
    "allocated",
    "allocation_checked",
    "answer",
    "ask_live",
    "available_cores",
    "available_memory",
    "bounded_num_envs",
    "bounded_staleness",
    "cache_use",
    "cached_rows",
    "can_change_live",
    "compiler_options",
    "concrete",
    "device_facts",
    "enable_cache",
    "energy",
    "environment",
    "get",
    "has_diverged",
    "home",
    "in_process",
    "lent_cores",
    "load_config",
    "make_algorithm",
    "make_config",
    "make_console",
    "make_env",
    "make_model",
    "make_runtime",
    "make_window",
    "measure_drift",
    "no_energy",
    "offer_cpu_devices",
    "parse_assignment",
    "portion",
    "print_table",
    "resolve",
    "resolve_kind",
    "source_of",
    "tell",
    "toml",
    "usage",
    "valid",
    "write_atomically",
]

# Collecting the first sequences may take this share of the training, at most: the agent acts at random until then, and what it
# plays reaches the learner as much later. tic_tac_toe learns the same with 0.013; not with 0.027 at O2 (docs/learning.md).
WARMUP_SHARE = 0.0125

_WITH_JAX = {
    "muzerox.algorithms": ["make_algorithm"],
    "muzerox.compilation": ["cache_use", "compiler_options", "enable_cache", "home"],
    "muzerox.drift": ["REFERENCE", "measure_drift"],
    "muzerox.envs": ["in_process"],
    "muzerox.networks": ["make_model"],
    "muzerox.parts": ["cached_rows"],
    "muzerox.precision": ["POLICIES", "has_diverged", "resolve"],
    "muzerox.runtimes": ["make_runtime", "offer_cpu_devices", "resolve_kind"],
    "muzerox.runtimes.sebulba.pipeline": ["make_window"],
    "muzerox.search": ["ENGINES"],
    "muzerox.timing": ["PipelineTotals", "portion"],
    "muzerox.types": ["HostEnvironment", "Skips"],
}
__getattr__ = lazy_names(__name__, {name: module for module, names in _WITH_JAX.items() for name in names})

ask_live, can_change_live = live.ask, live.can_change
lent_cores = allocations.lent


@functools.lru_cache(8)
def environment(name: str) -> Environment | HostEnvironment:
    """An environment by its name, made once."""
    return make_env(name)


def source_of(name: str) -> list[str]:
    """What an environment on the host that was made here comes from: suites by version, and the file of a module that it names.

    As far as it can be told; what is edited, or of another version, may take another time.
    """
    found = []
    for package in ("gymnasium", "ale-py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    module = sys.modules.get(name.partition("?")[0].partition(":")[2].rpartition(":")[0])
    if module is not None and module.__file__:
        with contextlib.suppress(OSError):
            file = os.stat(module.__file__)
            found.append(f"{module.__file__} {file.st_size} {file.st_mtime_ns}")
    return found


def concrete(config: Config, platform: str) -> Config:
    """The configuration with ``auto`` and absent values that a knob needs replaced by what they mean on this machine.

    ``platform`` is the measured machine's: this process may well be kept off its accelerator.

    Raises:
      UserError: an environment that cannot be served, or not by the configured runtime.
    """
    from muzerox.precision import default_level, resolve
    from muzerox.runtimes import resolve_kind
    from muzerox.search import default_engine

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
    from muzerox.runtimes.sebulba.pipeline import make_window

    return max(config.train.target_period, make_window(config))


# Freed before a knob is looked at by itself: the space rules on their combinations.
_SPLIT = {"search.split": 1, "runtime.num_envs": 1, "runtime.selfplay_workers": 1}
_TOGETHER: dict[str, dict[str, Any]] = {
    "runtime.num_envs": _SPLIT,
    "runtime.selfplay_workers": _SPLIT,
    "runtime.role_threads": {"allocation.cores": None},
    "allocation.cores": {"runtime.role_threads": 0},
}


def valid(config: Config, path: str, value: Any, platform: str) -> bool:
    """Whether the configuration may take ``value`` at ``path`` on a machine of ``platform``, other knobs aside."""
    if path == "replay.placement" and value == "host" and platform == "cpu":
        return False  # the device's memory is the host's
    if path == "runtime.role_threads" and value and (platform != "cpu" or value > len(available_cores())):
        return False  # only a CPU has threads to give
    try:
        changed = config.replace({**_TOGETHER.get(path, {}), path: value})
        allocations.check(changed.allocation)
    except ConfigError:
        return path == "search.split"
    return True


def no_energy(platform: str) -> str | None:
    """Why this machine's energy cannot be read; None where it can."""
    meter, says = energy.find_meter(platform)
    return None if meter else says


def device_facts() -> dict[str, Any]:
    """What JAX says of the default device."""
    import jax

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
