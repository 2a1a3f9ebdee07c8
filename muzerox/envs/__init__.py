"""Environments: one adapter a file, found by suite.

To add a suite, write ``envs/<suite>.py`` and add a row to ``SUITES``; the contract tests walk the table. The file has

- ``names() -> list[str]``, what it serves, and ``UNAVAILABLE``, what it does not with the reason;
- ``make(name, **options) -> Environment`` (JAX) or ``-> HostEnvironment``;
- if it takes options, their table ``OPTIONS`` (name -> ``Option``), and those that evaluation changes, ``EVALUATION``;
- if it serves names beyond those it lists, ``serves(name) -> bool``;
- on the host, ``simulators(name, num_envs, seed, **options) -> Simulators``, without JAX and importing none.
"""

from typing import TYPE_CHECKING

from muzerox.envs.registry import SUITES, env_ids, is_host, make_env, not_installed, suite_options, unavailable
from muzerox.lazy import lazy_names

if TYPE_CHECKING:
    from muzerox.envs.contract import check_env, check_host_env
    from muzerox.envs.host import in_process, on_host
    from muzerox.envs.wrappers import auto_reset

__all__ = [
    "SUITES",
    "auto_reset",
    "check_env",
    "check_host_env",
    "env_ids",
    "in_process",
    "is_host",
    "make_env",
    "not_installed",
    "on_host",
    "suite_options",
    "unavailable",
]

_MODULES = {
    "auto_reset": ".wrappers",
    "check_env": ".contract",
    "check_host_env": ".contract",
    "in_process": ".host",
    "on_host": ".host",
}

__getattr__ = lazy_names(__name__, _MODULES)
