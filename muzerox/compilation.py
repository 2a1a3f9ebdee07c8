"""Compiling less: the persistent cache, and compiling beside other work."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax


def home() -> Path:
    """Where muzerox keeps what outlives a run: ``MUZEROX_HOME``, or ``~/.cache/muzerox``."""
    return Path(os.environ.get("MUZEROX_HOME") or Path.home() / ".cache" / "muzerox")


def enable_cache() -> None:
    """Keeps compiled programs on disk between processes, unless JAX was already told where."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@contextlib.contextmanager
def cache_use() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether all large programs since then came from the cache: compiling takes memory and time."""
    seen = {"cache_hits": 0, "cache_misses": 0}  # a miss is counted where a program takes long enough to be kept

    def count(event: str, **_: Any) -> None:
        name = event.rpartition("/")[2]
        if name in seen:
            seen[name] += 1

    jax.monitoring.register_event_listener(count)
    try:
        yield lambda: seen["cache_hits"] > 0 and not seen["cache_misses"]
    finally:
        jax.monitoring.unregister_event_listener(count)


def compile_beside(function: Any, *args: Any) -> Callable[[], Any]:
    """Compiles a jitted function for the shapes of ``args`` in a thread; returns what waits for it.

    XLA compiles without holding Python's lock, so several programs compile on as many cores at once.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
    future: Future[Any] = executor.submit(lambda: function.lower(*args).compile())
    executor.shutdown(wait=False)
    return future.result
