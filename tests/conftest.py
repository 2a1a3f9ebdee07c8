"""Strict JAX for every test, two fake CPU devices, and a home of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from muzerox.compilation import enable_cache

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, or the last of two workers is left alone with one of them."""

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
