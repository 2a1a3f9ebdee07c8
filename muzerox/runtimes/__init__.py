"""Runtimes: where environments, search and learner run. ``make_runtime`` finds the one that is configured."""

from collections.abc import Callable
from typing import Any

from muzerox.config import Config
from muzerox.errors import ConfigError
from muzerox.runtimes import anakin, sebulba
from muzerox.types import Algorithm, Environment, HostEnvironment, Runtime

RUNTIMES: dict[str, Callable[[Config, Any, Algorithm], Runtime]] = {"anakin": anakin.build, "sebulba": sebulba.build}


def resolve_kind(config: Config, env: Environment | HostEnvironment) -> Config:
    """The configuration with ``runtime.kind`` decided. Raises ConfigError where the environment does not allow it."""
    kind = config.runtime.kind
    on_host = isinstance(env, HostEnvironment)
    if kind == "anakin" and on_host:
        raise ConfigError("runtime.kind", kind, f"{env.spec.id} runs on the host, not in a program on the device", "sebulba")
    return config.replace("runtime.kind", "sebulba" if on_host else "anakin") if kind == "auto" else config


def make_runtime(config: Config, env: Environment | HostEnvironment, algorithm: Algorithm) -> Runtime:
    """The runtime that ``runtime.kind`` names. Raises ConfigError when the machine lacks its devices."""
    config = resolve_kind(config, env)
    return RUNTIMES[config.runtime.kind](config, env, algorithm)


__all__ = ["RUNTIMES", "make_runtime", "resolve_kind"]
