"""Strict JAX for every test, two fake CPU devices, and a home of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported; XLA_FLAGS when it first compiles

import jax
from hypothesis import settings

from muzerox.compilation import enable_cache

DEVICES = "--xla_force_host_platform_device_count=2"
# Programs of tests run for milliseconds and compile for seconds: half as long where LLVM optimizes nothing, less with XLA's older
# emitters. Slow tests, which learn, compile as users do; processes that they start and kill do not. XLA ends a process that names
# a flag it has not: the emitters are for the version they were tried with.
QUICKLY = "--xla_backend_optimization_level=0"
if jax.__version__.startswith("0.10."):
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"

jax.config.update("jax_numpy_rank_promotion", "raise")
settings.register_profile("any machine", deadline=None)  # one that stands still for a moment has not failed
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """What XLA is told, here and in subprocesses, before anything is compiled; flags that were given have the last word."""
    given = os.environ.get("XLA_FLAGS", "").replace(QUICKLY, "")  # a worker has ours
    slow = config.option.markexpr.startswith(("slow", "thorough"))
    os.environ["XLA_FLAGS"] = " ".join([DEVICES, *([] if slow else [QUICKLY]), given])
    if slow:
        jax.devices()  # this process has read them
        os.environ["XLA_FLAGS"] = " ".join([DEVICES, QUICKLY, given])


@pytest.fixture
def compiling_as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subprocesses of a test whose figures are of compiled programs."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"].replace(QUICKLY, ""))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, or the last worker is left alone with one of them."""

    def seconds(item: pytest.Item) -> float:
        mark = item.get_closest_marker("slow")
        return float(mark.args[0]) if mark is not None and mark.args else 0.0

    items.sort(key=seconds, reverse=True)  # stable: the others stay in their order


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled programs are shared between the tests of a session and their subprocesses, and with nobody else."""
    base: Path = tmp_path_factory.getbasetemp()  # of this process; where there are several, in the session's own folder
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "muzerox-home"
    os.environ["MUZEROX_HOME"] = str(home)
    enable_cache()
