"""From ``suite:name`` to an Environment."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType

from muzerox.errors import EnvironmentUnavailable, nearest_name
from muzerox.types import Environment


@dataclasses.dataclass(frozen=True)
class Suite:
    """Where a suite's adapter lives and which distribution it needs."""

    module: str
    requires: str
    extra: str | None = None  # the extra that installs it; None: always installed


SUITES = {
    "gymnax": Suite("muzerox.envs.gymnax", "gymnax"),
    "pgx": Suite("muzerox.envs.pgx", "pgx"),
}


def _adapter(env_id: str, suite: str) -> ModuleType:
    row = SUITES[suite]
    try:
        importlib.import_module(row.requires)
    except ModuleNotFoundError as error:
        install = f'pip install "muzerox[{row.extra}]"' if row.extra else f"pip install {error.name}"
        raise EnvironmentUnavailable(
            "env", env_id, f"needs the package {error.name}, which is not installed: {install}"
        ) from None
    return importlib.import_module(row.module)


def make_env(env_id: str) -> Environment:
    """The environment ``suite:name``, one instance, without automatic reset.

    Raises:
      EnvironmentUnavailable: unknown suite or name, a missing package, or an environment that cannot be served.
    """
    suite, colon, name = env_id.partition(":")
    if not colon:
        known = [full for key in SUITES for full in (f"{key}:{n}" for n in _adapter(env_id, key).names())]
        guess = next((full for full in known if full.partition(":")[2].lower() == env_id.lower()), nearest_name(env_id, known))
        raise EnvironmentUnavailable("env", env_id, "must be suite:name", guess)
    if suite not in SUITES:
        raise EnvironmentUnavailable(
            "env", env_id, f"unknown suite; suites are {', '.join(SUITES)}", f"{nearest_name(suite, SUITES)}:{name}"
        )
    adapter = _adapter(env_id, suite)
    if name in adapter.UNAVAILABLE:
        raise EnvironmentUnavailable("env", env_id, f"cannot be served: {adapter.UNAVAILABLE[name]}")
    if name not in adapter.names():
        raise EnvironmentUnavailable(
            "env", env_id, f"{suite} has no such environment", f"{suite}:{nearest_name(name, adapter.names())}"
        )
    return adapter.make(name)


def env_ids() -> list[str]:
    """Every id that :func:`make_env` serves."""
    return [f"{suite}:{name}" for suite in SUITES for name in _adapter(suite, suite).names()]


def unavailable() -> dict[str, str]:
    """Ids that exist in a suite but cannot be served, with the reason."""
    return {f"{suite}:{name}": why for suite in SUITES for name, why in _adapter(suite, suite).UNAVAILABLE.items()}
