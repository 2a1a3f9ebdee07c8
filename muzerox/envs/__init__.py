"""Environments: one adapter a file, found by suite.

To add a suite, write ``envs/<suite>.py`` with ``make(name) -> Environment`` and ``names() -> list[str]`` and add a row to
``SUITES``; the contract tests walk the table.
"""

from muzerox.envs.contract import check_env
from muzerox.envs.registry import SUITES, env_ids, make_env, unavailable
from muzerox.envs.wrappers import auto_reset

__all__ = ["SUITES", "auto_reset", "check_env", "env_ids", "make_env", "unavailable"]
