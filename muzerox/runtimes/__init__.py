"""Runtimes: where environments, search and learner run. ``make_runtime`` finds the one that is configured."""

from types import ModuleType

from muzerox.config import Config
from muzerox.errors import ConfigError
from muzerox.runtimes import anakin, sebulba
from muzerox.runtimes.placement import offer_cpu_devices
from muzerox.types import Algorithm, Environment, HostEnvironment, Runtime

# Each with ``build(config, env, algorithm) -> Runtime`` and ``updates_at(config, env_steps) -> int``.
RUNTIMES: dict[str, ModuleType] = {"anakin": anakin, "sebulba": sebulba}


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
    runtime: Runtime = RUNTIMES[config.runtime.kind].build(config, env, algorithm)
    return runtime


def deepenings_by_updates(config: Config) -> tuple[tuple[int, int], ...]:
    """After how many updates searches make how many simulations; the first after none. ``runtime.kind`` is resolved."""
    at = RUNTIMES[config.runtime.kind].updates_at
    return tuple((at(config, env_steps) if env_steps else 0, count) for env_steps, count in config.deepenings)


__all__ = ["RUNTIMES", "deepenings_by_updates", "make_runtime", "offer_cpu_devices", "resolve_kind"]
