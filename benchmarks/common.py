"""What every benchmark shares: choosing the device, the machine's name, and where records go."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

DATA = Path(__file__).with_name("data")
_HERE = Path(__file__).resolve().parent
# A benchmark may have the name of the package it measures, and the folder of a script comes first: it comes last instead.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE] + [str(_HERE.parent), str(_HERE)]


def make_parser(description: str) -> argparse.ArgumentParser:
    """``--device`` and ``--record``, which mean the same in every benchmark; from here on one that is told to end takes the
    programs that it runs with it, as it does when it is interrupted: they would disturb what is timed next.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), help="JAX platform (default: the best there is)")
    parser.add_argument("--record", action="store_true", help=f"append the record to {DATA}/<benchmark>.jsonl")
    return parser


def use_device(device: str | None) -> None:
    """Chooses the platform for this process and its children; must run before jax is imported."""
    if device is not None:
        os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(device, device)


def make_console() -> Console:
    """Standard error; as wide as tables need where it is no terminal, for which rich would take 80 columns."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 160)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import jax

    from tuner.measuring.fingerprint import cpu_name

    cpuinfo = Path("/proc/cpuinfo")
    model = (cpu_name(cpuinfo.read_text()) if cpuinfo.exists() else "") or platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": model,
        "cores": cores,
        "devices": [device.device_kind for device in jax.devices()],
        "backend": jax.default_backend(),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def need(*packages: str) -> None:
    """Ends with one line where a package to compare with is missing, before anything is measured."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"needs {', '.join(missing)}: pip install 'muzerox[benchmarks]'")


def finish(name: str, figures: dict[str, Any], *, record: bool) -> None:
    """Prints one JSON record and, if asked, appends it to the benchmark's file."""
    line = json.dumps({"benchmark": name, "date": time.strftime("%Y-%m-%d"), "machine": machine(), **figures})
    print(line)
    if record:
        DATA.mkdir(exist_ok=True)
        with (DATA / f"{name}.jsonl").open("a") as file:
            file.write(line + "\n")
