"""The share of the machine a run may use, really applied: cores, memory of the process, memory of the accelerator."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from muzerox.config import AllocationConfig
from muzerox.errors import ConfigError

GIB = 2**30
_WATCH_SECONDS = 0.05
_DEVICE_SHARE = "XLA_CLIENT_MEM_FRACTION"  # read when JAX first touches a device; there is no later


def available_cores() -> list[int]:
    """Numbers of the cores this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def available_memory() -> int:
    """Bytes of memory of this machine, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(limit) as file:  # absent, or the word max
            total = min(total, int(file.read()))
    return total


def check(allocation: AllocationConfig) -> None:
    """Raises ConfigError when the allocation is more than this machine has."""
    cores, memory = len(available_cores()), available_memory() / GIB
    if allocation.cores is not None and allocation.cores > cores:
        raise ConfigError("allocation.cores", allocation.cores, f"this process may use {cores}", cores)
    if allocation.memory_gib is not None and not os.path.exists("/proc/self/statm"):
        raise ConfigError("allocation.memory_gib", allocation.memory_gib, "cannot be limited on this system; leave it absent")
    if allocation.memory_gib is not None and allocation.memory_gib > memory:
        raise ConfigError("allocation.memory_gib", allocation.memory_gib, f"this machine has {memory:.1f}", f"{memory:.1f}")


@contextlib.contextmanager
def applied(allocation: AllocationConfig) -> Iterator[None]:
    """Keeps this process to its allocation inside the block; what is absent is not limited.

    Enter it before JAX first touches a device: XLA makes as many threads as there are cores then, and takes its share of
    an accelerator's memory. Cores taken away later are obeyed, and a share of an accelerator is refused.

    Raises:
      ConfigError: more than the machine has, or too late.
    """
    check(allocation)
    with contextlib.ExitStack() as stack:
        if allocation.cores is not None:
            stack.enter_context(_cores(allocation.cores))
        if allocation.memory_gib is not None:
            stack.enter_context(_memory(int(allocation.memory_gib * GIB)))
        if allocation.device_memory is not None:
            _device_memory(allocation.device_memory)
        yield


@contextlib.contextmanager
def _cores(count: int) -> Iterator[None]:
    before = available_cores()
    _set_affinity(before[:count])
    try:
        yield
    finally:
        _set_affinity(before)


def _set_affinity(cores: list[int]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("allocation.cores", len(cores), "cannot be limited on this system; leave it absent")
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def _memory(size: int) -> Iterator[None]:
    """Ends the process with one line when it holds more than ``size`` bytes.

    A limit of the system (RLIMIT_DATA) would reach libraries in the middle of an allocation, and they abort or hang.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_SECONDS):
            held = resident_memory()
            if held > size:
                line = f"out of memory: the process holds {held / GIB:.2f} GiB, its allocation is {size / GIB:.2f}"
                os.write(2, f"{line} (allocation.memory_gib)\n".encode())
                os._exit(1)

    watcher = threading.Thread(target=watch, name="memory", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def resident_memory() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _device_memory(share: float) -> None:
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        if os.environ.get(_DEVICE_SHARE) != str(share):
            raise ConfigError("allocation.device_memory", share, "JAX has already started; set it before, or use the command")
        return
    os.environ[_DEVICE_SHARE] = str(share)
