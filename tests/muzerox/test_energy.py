"""Counters of energy, in a folder such as Linux has under /sys/class/powercap."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muzerox.energy import EXTRA, find_meter


def zone(powercap: Path, folder: str, name: str, microjoules: int, size: int = 10**9) -> Path:
    """A zone that has counted so much; its counter."""
    path = powercap / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{size}\n")
    (path / "energy_uj").write_text(f"{microjoules}\n")
    return path / "energy_uj"


def test_packages_and_memory_are_counted_once(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 7_000_000)
    memory = zone(tmp_path, "intel-rapl:0:2", "dram", 1_000_000)
    within = zone(tmp_path, "intel-rapl:0:0", "core", 2_000_000)
    around = zone(tmp_path, "intel-rapl:2", "psys", 2_000_000)
    again = zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5_000_000)
    meter, says = find_meter("cpu", tmp_path)
    assert meter is not None
    assert says == "package-0 (intel-rapl:0), dram (intel-rapl:0:2), package-1 (intel-rapl:1)"
    first.write_text("6500000")
    second.write_text("7250000")
    memory.write_text("1125000")
    for other in (within, around, again):
        other.write_text("900000000")
    assert meter.joules() == pytest.approx(1.5 + 0.25 + 0.125)
    assert meter.joules() == 0.0


def test_a_counter_that_begins_again_loses_nothing(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 990_000_000, size=1_000_000_000)
    meter, _ = find_meter("cpu", tmp_path)
    assert meter is not None
    counter.write_text("4000000")
    assert meter.joules() == pytest.approx(14.0)


def test_why_there_is_no_meter_is_one_line(tmp_path: Path) -> None:
    assert find_meter("cpu", tmp_path) == (None, f"no counter of a processor's energy under {tmp_path}")
    meter, says = find_meter("tpu", tmp_path)
    assert meter is None
    assert "tpu" in says


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_counter_that_is_not_ours_to_read_says_who_may(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1).chmod(0)
    meter, says = find_meter("cpu", tmp_path)
    assert meter is None
    assert "chmod a+r" in says


def test_a_counter_without_its_file_says_which(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1).unlink()
    zone(tmp_path, "intel-rapl:1", "package-1", 1)  # half of the machine is not told for the whole
    meter, says = find_meter("cpu", tmp_path)
    assert meter is None
    assert str(tmp_path / "intel-rapl:0" / "energy_uj") in says


def test_a_gpu_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """Either the package is missing, or there is no GPU, or there is one and it is read."""
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    meter, says = find_meter("gpu", tmp_path)
    if meter is None:
        assert EXTRA in says or "NVML" in says or "no GPU" in says
    else:
        assert "gpu" in says
        assert meter.joules() >= 0.0
