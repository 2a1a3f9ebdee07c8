"""Names of a module that are imported when they are asked for: who needs neither JAX nor the rest does not wait for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(owner: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of the module ``owner`` (PEP 562).

    Args:
      modules: by name, the module that defines it; with a dot before it, one of the package ``owner``.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {owner!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name], owner), name)
        setattr(sys.modules[owner], name, value)
        return value

    return find
