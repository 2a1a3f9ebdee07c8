"""From ``suite:name?option=value`` to an environment."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from muzerox.envs.simulators import Option, parse_options
from muzerox.errors import EnvironmentUnavailable, nearest_name

if TYPE_CHECKING:  # the processes of simulators come here too, and do without JAX
    from muzerox.types import Environment, HostEnvironment


@dataclasses.dataclass(frozen=True)
class Suite:
    """Where a suite's adapter lives, and which extra brings the package it adapts."""

    module: str
    extra: str | None = None  # the extra that installs it; None: always installed


SUITES = {
    "gymnax": Suite("muzerox.envs.gymnax"),
    "pgx": Suite("muzerox.envs.pgx"),
    "gymnasium": Suite("muzerox.envs.gymnasium", "gymnasium"),
    "ale": Suite("muzerox.envs.ale", "ale"),
}


class _Parsed(NamedTuple):
    adapter: ModuleType
    name: str
    options: dict[str, Any]


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


def not_installed() -> dict[str, str]:
    """Suites whose packages are missing, with what installs them."""
    missing = {}
    for suite in SUITES:
        try:
            _adapter(suite, suite)
        except EnvironmentUnavailable as error:
            missing[suite] = error.rule
    return missing


def suite_options() -> dict[str, dict[str, Option]]:
    """Options that ids may set (``suite:name?option=value``), by suite and name."""
    return {suite: table for suite, adapter in _adapters().items() if (table := getattr(adapter, "OPTIONS", {}))}


def _adapters() -> dict[str, ModuleType]:
    """The suites whose packages are installed."""
    found = {}
    for suite in SUITES:
        with contextlib.suppress(EnvironmentUnavailable):
            found[suite] = _adapter(suite, suite)
    return found


def _parse(env_id: str) -> _Parsed:
    address, question, options = env_id.partition("?")
    suite, colon, name = address.partition(":")
    if not colon:
        known = env_ids()
        guess = next((full for full in known if full.partition(":")[2].lower() == address.lower()), nearest_name(address, known))
        raise EnvironmentUnavailable("env", env_id, "must be suite:name", guess)
    if suite not in SUITES:
        raise EnvironmentUnavailable(
            "env", env_id, f"unknown suite; suites are {', '.join(SUITES)}", nearest_name(address, env_ids())
        )
    adapter = _adapter(env_id, suite)
    if name in adapter.UNAVAILABLE:
        why = f"cannot be served: {adapter.UNAVAILABLE[name]}"
        raise EnvironmentUnavailable("env", env_id, why, f"{suite}:{nearest_name(name, adapter.names())}")
    serves = getattr(adapter, "serves", adapter.names().__contains__)
    if not serves(name):
        raise EnvironmentUnavailable(
            "env", env_id, f"{suite} has no such environment", f"{suite}:{nearest_name(name, adapter.names())}"
        )
    return _Parsed(adapter, name, parse_options(env_id, options, getattr(adapter, "OPTIONS", {})) if question else {})


@contextlib.contextmanager
def _full_id(env_id: str) -> Any:
    """Errors of an adapter, which knows the name alone, show the whole id."""
    try:
        yield
    except EnvironmentUnavailable as error:
        raise EnvironmentUnavailable("env", env_id, error.rule, error.nearest) from error.__cause__


def make_env(env_id: str) -> Environment | HostEnvironment:
    """The environment ``suite:name`` or ``suite:name?option=value&option=value``.

    A JAX suite gives an ``Environment``, one instance without automatic reset; a suite of the host a ``HostEnvironment``.

    Raises:
      EnvironmentUnavailable: unknown suite, name or option, a missing package, or an environment that cannot be served.
    """
    adapter, name, options = _parse(env_id)
    with _full_id(env_id):
        env = adapter.make(name, **options)
        if changed := getattr(adapter, "EVALUATION", {}):
            from muzerox.envs.host import host_environment

            simulators = functools.partial(adapter.simulators, name, **{**options, **changed})
            env = env._replace(make_evaluation=host_environment(env.spec, simulators).make)
    return env._replace(spec=dataclasses.replace(env.spec, id=env_id))


def make_simulators(env_id: str, num_envs: int, seed: int, *, evaluation: bool = False) -> Any:
    """E running simulators of ``env_id`` in this process: ``Simulators``, or the ``HostBatch`` of a JAX environment.

    The first takes no import of JAX, the second does.

    Raises:
      EnvironmentUnavailable: as :func:`make_env`.
    """
    adapter, name, options = _parse(env_id)
    if not hasattr(adapter, "simulators"):
        from muzerox.envs.host import on_host

        return on_host(adapter.make(name, **options)).make(num_envs, seed)
    if evaluation:
        options = {**options, **getattr(adapter, "EVALUATION", {})}
    with _full_id(env_id):
        return adapter.simulators(name, num_envs, seed, **options)


def is_host(env_id: str) -> bool:
    """Whether :func:`make_env` gives a ``HostEnvironment`` for ``env_id``; makes nothing.

    Raises:
      EnvironmentUnavailable: as :func:`make_env`, for what is wrong with the id itself.
    """
    return hasattr(_parse(env_id).adapter, "simulators")


def env_ids() -> list[str]:
    """Every id that :func:`make_env` serves, without options."""
    return [f"{suite}:{name}" for suite, adapter in _adapters().items() for name in adapter.names()]


def unavailable() -> dict[str, str]:
    """Ids that exist in a suite but cannot be served, with the reason."""
    return {f"{suite}:{name}": why for suite, adapter in _adapters().items() for name, why in adapter.UNAVAILABLE.items()}
