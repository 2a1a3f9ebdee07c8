"""What the machine uses of energy: counters of its processors and memory (RAPL, by Linux), and of NVIDIA's devices (NVML).

They count the whole of a package or a device, whatever runs on it, and idling too: what a training is paid for, not what its
instructions took (Khan et al., "RAPL in action", 2018, on how far these counters are to be trusted).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from muzerox.allocation import visible_gpus

POWERCAP = Path("/sys/class/powercap")
EXTRA = 'pip install "muzerox[energy]"'


class Counter(NamedTuple):
    """Something that counts joules upwards."""

    name: str
    read: Callable[[], float]  # joules
    size: float = math.inf  # joules after which it begins again


class Meter:
    """Joules of several counters together, from one look to the next."""

    def __init__(self, counters: list[Counter]):
        self.counters = counters
        self._last = [counter.read() for counter in counters]

    def joules(self) -> float:
        """Since the last look, or since it was made; a counter that began again since must have done so only once.

        That takes a processor twenty minutes and more. Raises OSError when a counter cannot be read any more.
        """
        now = [counter.read() for counter in self.counters]
        used = [
            after - before + (counter.size if after < before else 0.0)
            for after, before, counter in zip(now, self._last, self.counters, strict=True)
        ]
        self._last = now
        return sum(used)


def find_meter(platform: str, powercap: Path = POWERCAP) -> tuple[Meter | None, str]:
    """A meter of a machine whose default device is of ``platform``, and what it counts; None and why where it cannot be read.

    The processor's on ``cpu``, NVIDIA's devices too on ``gpu`` (the processor's may be missing there: it is the smaller part).
    """
    counters, why = _packages(powercap)
    if platform == "gpu":
        devices, why = _devices()
        counters = [*counters, *devices] if devices else []
    elif platform != "cpu":
        counters, why = [], f"nothing here reads the energy of a {platform}"
    return (Meter(counters), ", ".join(c.name for c in counters)) if counters else (None, why)


def _packages(powercap: Path) -> tuple[list[Counter], str]:
    """Processors and, where it has a counter of its own, memory; and why there are none: all can be read, or none counts.

    Other zones are parts of a package, or hold one (``psys``), or are the same once more (``intel-rapl-mmio``).
    """
    counters: list[Counter] = []
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's are called so too
        try:
            name = (zone / "name").read_text().strip()
            if not (name.startswith("package") or name == "dram"):
                continue
            size = float((zone / "max_energy_range_uj").read_text()) * 1e-6
            counter = Counter(f"{name} ({zone.name})", functools.partial(_joules, zone / "energy_uj"), size)
            counter.read()
        except OSError as error:
            return [], f"{error.filename}: {error.strerror}; as root: chmod a+r {powercap}/intel-rapl:*/energy_uj"
        counters.append(counter)
    return counters, f"no counter of a processor's energy under {powercap}"


def _joules(file: Path) -> float:
    """Of a counter of microjoules."""
    return float(file.read_text()) * 1e-6


def _devices() -> tuple[list[Counter], str]:
    """NVIDIA's devices that this process may use, and why there are none."""
    try:
        import pynvml
    except ImportError:
        return [], f"the energy of a GPU needs the package nvidia-ml-py, which is not installed: {EXTRA}"
    try:
        pynvml.nvmlInit()
        counters = []
        for name in visible_gpus():
            if name.startswith(("GPU-", "MIG-")):
                handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            else:
                handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))

            def read(handle: object = handle) -> float:
                try:
                    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3  # millijoules
                except pynvml.NVMLError as error:
                    raise OSError(str(error)) from None

            read()
            counters.append(Counter(f"gpu {name}", read))
        return counters, "no GPU is visible"
    except (pynvml.NVMLError, OSError, ValueError) as error:
        return [], f"NVML: {error}"
