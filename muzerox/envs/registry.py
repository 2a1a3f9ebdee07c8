"""From ``suite:name`` to an Environment."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from types import ModuleType

from muzerox.errors import EnvironmentUnavailable, nearest_name
from muzerox.types import Environment


@dataclasses.dataclass(frozen=True)
class Suite:
    """Where a suite's adapter lives, and which extra brings the package it adapts."""

    module: str
    extra: str | None = None  # the extra that installs it; None: always installed


SUITES = {
    "gymnax": Suite("muzerox.envs.gymnax"),
    "pgx": Suite("muzerox.envs.pgx"),
}


def _adapter(env_id: str, suite: str) -> ModuleType:
    row = SUITES[suite]
    try:
        return importlib.import_module(row.module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("muzerox"):
            raise  # a defect of ours
        install = f'pip install "muzerox[{row.extra}]"' if row.extra else f"pip install {error.name}"
        raise EnvironmentUnavailable(
            "env", env_id, f"needs the package {error.name}, which is not installed: {install}"
        ) from None


def _adapters() -> dict[str, ModuleType]:
    """The suites whose packages are installed."""
    found = {}
    for suite in SUITES:
        with contextlib.suppress(EnvironmentUnavailable):
            found[suite] = _adapter(suite, suite)
    return found


def make_env(env_id: str) -> Environment:
    """The environment ``suite:name``, one instance, without automatic reset.

    Raises:
      EnvironmentUnavailable: unknown suite or name, a missing package, or an environment that cannot be served.
    """
    suite, colon, name = env_id.partition(":")
    if not colon:
        known = env_ids()
        guess = next((full for full in known if full.partition(":")[2].lower() == env_id.lower()), nearest_name(env_id, known))
        raise EnvironmentUnavailable("env", env_id, "must be suite:name", guess)
    if suite not in SUITES:
        raise EnvironmentUnavailable(
            "env", env_id, f"unknown suite; suites are {', '.join(SUITES)}", nearest_name(env_id, env_ids())
        )
    adapter = _adapter(env_id, suite)
    if name in adapter.UNAVAILABLE:
        why = f"cannot be served: {adapter.UNAVAILABLE[name]}"
        raise EnvironmentUnavailable("env", env_id, why, f"{suite}:{nearest_name(name, adapter.names())}")
    if name not in adapter.names():
        raise EnvironmentUnavailable(
            "env", env_id, f"{suite} has no such environment", f"{suite}:{nearest_name(name, adapter.names())}"
        )
    return adapter.make(name)


def env_ids() -> list[str]:
    """Every id that :func:`make_env` serves."""
    return [f"{suite}:{name}" for suite, adapter in _adapters().items() for name in adapter.names()]


def unavailable() -> dict[str, str]:
    """Ids that exist in a suite but cannot be served, with the reason."""
    return {f"{suite}:{name}": why for suite, adapter in _adapters().items() for name, why in adapter.UNAVAILABLE.items()}
