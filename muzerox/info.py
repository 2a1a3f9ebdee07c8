"""What this machine offers and what can be configured."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from typing import Any

import jax

from muzerox.compilation import home
from muzerox.envs import env_ids, not_installed, suite_options, unavailable

_PACKAGES = ("muzerox", "jax", "jaxlib", "flax", "mctx", "optax", "orbax-checkpoint", "gymnax", "pgx", "gymnasium", "numpy")


def versions() -> dict[str, Any]:
    """Devices and versions."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
        "backend": jax.default_backend(),
        "devices": ", ".join(str(device) for device in jax.devices()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "compilation cache": str(home() / "xla"),
    }


def environments() -> dict[str, dict[str, str]]:
    """Ids that are served by suite, options that they take, and what is not served with the reason."""
    served: dict[str, list[str]] = {}
    for env_id in env_ids():
        served.setdefault(env_id.partition(":")[0], []).append(env_id)
    return {
        "environments": {suite: " ".join(ids) for suite, ids in served.items()},
        "environment options": {
            f"{suite}:...?{name}": str(option) for suite, table in suite_options().items() for name, option in table.items()
        },
        "environments not served": {**unavailable(), **not_installed()},
    }


def describe(field: dataclasses.Field[Any]) -> str:
    """One line on a configuration key: default, unit, range, meaning."""
    meta = field.metadata
    limits = [
        f"one of {', '.join(meta['choices'])}" if meta["choices"] else "",
        f"above {_number(meta['above'])}" if meta["above"] is not None else "",
        f"from {_number(meta['low'])}" if meta["low"] is not None else "",
        f"to {_number(meta['high'])}" if meta["high"] is not None else "",
    ]
    default = "none" if field.default is None else f"{field.default} {meta['unit'] or ''}".rstrip()  # as --set takes it
    bounds = " ".join(x for x in limits if x)
    return f"{default}{f' ({bounds})' if bounds else ''}: {meta['doc']}"


def _number(bound: float) -> str:
    return f"{int(bound):,}" if float(bound).is_integer() else f"{bound:g}"
