"""Compiling less: the persistent cache, and compiling beside other work."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.experimental.xla_metadata import set_xla_metadata

# Of what the compiler took when it made what the cache holds; and what it, or reading the cache, takes now.
_SAVED, _COMPILED = "/jax/compilation_cache/compile_time_saved_sec", "/jax/core/compile/backend_compile_duration"
_SPARED = 0.25
# Compiler options of programs that run once or twice: compiling them takes far longer than running them, and takes cores from the
# compilation of what trains.
ONCE = {"xla_backend_optimization_level": 0}
# What CUDA's graphs hold: XLA's defaults, conditions and loops; and a graph from one operation on, which may be a loop.
_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION",
    "xla_gpu_graph_min_graph_size": 1,
}


_compiling: set[Future[Any]] = set()  # what compiles beside other work, and has not ended


def home() -> Path:
    """Where muzerox keeps what outlives a run: ``MUZEROX_HOME``, or ``~/.cache/muzerox``."""
    return Path(os.environ.get("MUZEROX_HOME") or Path.home() / ".cache" / "muzerox")


def enable_cache() -> None:
    """Keeps compiled programs on disk between processes, unless JAX was already told where."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(home() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compiler_options(threads: int | None = None, backend: str | None = None) -> dict[str, Any] | None:
    """What ``jax.jit`` is told of the programs that train and play; None for XLA's defaults.

    For a CPU device with one thread: XLA orders operations so that several can run at once, and its executor hands half of those
    that are ready to the device's threads; the rest of a loop follows them. To one thread that is a handover for nothing: the
    order that takes the least memory keeps a program where it is called. A search of 16 roots takes 0.86 of the time. With two
    threads it is the other way round.

    For a GPU: a search of small networks is hundreds of kernels of a microsecond each, and asking for one takes the host longer.
    CUDA's graphs hold whole loops with their conditions: the device goes from kernel to kernel by itself. XLA leaves loops out of
    them unless it is told. Trainings of CartPole on an H100 make 1.3 to 1.55 times the steps. Who names
    ``xla_gpu_enable_command_buffer`` in ``XLA_FLAGS`` has it their way.

    Args:
      threads: those of a CPU device that was made for a role; None for JAX's own devices.
      backend: JAX's default one where None.
    """
    if threads is not None:
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if threads == 1 else None
    chosen = "xla_gpu_enable_command_buffer" in os.environ.get("XLA_FLAGS", "")
    return dict(_GRAPHS) if (backend or jax.default_backend()) == "gpu" and not chosen else None


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as one operation of the program that calls it on CPU: XLA does not take it apart.

    XLA's executor hands operations to another thread as soon as more than eight are ready to run, and whoever called the program
    waits for that thread to wake up. Many small operations that depend on little, such as those of a draw of random numbers, run
    one after the other where they are an operation of their own.
    """
    if jax.default_backend() != "cpu":
        return function
    compiled = jax.jit(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(*args)

    return call


@contextlib.contextmanager
def cache_use() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether much of what was compiled since then came from the cache.

    Compiling takes time and memory: who was spared a quarter of it cannot tell how much. By seconds, not by programs: on a busy
    machine small ones take long enough to be looked for, and were too fast to be kept.
    """
    seconds = {_SAVED: 0.0, _COMPILED: 0.0}

    def count(event: str, duration_secs: float, **_: Any) -> None:
        if event in seconds:
            seconds[event] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield lambda: seconds[_SAVED] > _SPARED * (seconds[_SAVED] + seconds[_COMPILED])
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def compile_beside(function: Any, *args: Any) -> Callable[[], Any]:
    """Compiles a jitted function for the shapes of ``args`` in a thread; returns what waits for it.

    XLA compiles without holding Python's lock, so several programs compile on as many cores at once.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
    future: Future[Any] = executor.submit(lambda: function.lower(*args).compile())
    _compiling.add(future)
    future.add_done_callback(_compiling.discard)
    executor.shutdown(wait=False)
    return future.result


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code; at once where a program is still compiling, which Python would wait for, for minutes.

    Nothing that is registered to run at exit runs then: whoever calls this has closed what is to be closed.
    """
    if _compiling:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        os._exit(code)
    sys.exit(code)
