"""Runtimes: where environments, search and learner run. ``make_runtime`` finds the one that is configured."""

from muzerox.config import Config
from muzerox.runtimes import anakin
from muzerox.types import Algorithm, Environment, Runtime

RUNTIMES = {"anakin": anakin.build}


def make_runtime(config: Config, env: Environment, algorithm: Algorithm) -> Runtime:
    """The runtime that ``runtime.kind`` names. Raises ConfigError when the machine lacks its devices."""
    return RUNTIMES[config.runtime.kind](config, env, algorithm)


__all__ = ["RUNTIMES", "make_runtime"]
