"""The share of the machine a run may use, really applied: cores, memory of the process, accelerators and their memory."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Sequence

from muzerox import usage
from muzerox.config import AllocationConfig
from muzerox.errors import ConfigError, RunFailed

GIB = 2**30
_WATCH_SECONDS = 0.05
_DEVICE_SHARE = "XLA_CLIENT_MEM_FRACTION"  # read when JAX first touches a device; there is no later
_VISIBLE = "CUDA_VISIBLE_DEVICES"  # read by the driver, at the same moment
_GPU = re.compile(r"nvidia\d+")  # of /dev


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


def visible_gpus(folder: str = "/dev") -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls the GPUs this process may use: those it names already, or else all there are.

    JAX is not asked, which would start it. ``folder``: where devices are files.
    """
    files = os.listdir(folder) if os.path.isdir(folder) else []
    # The driver numbers those that can be opened from 0, whatever their files are called: a container may have nvidia3 alone.
    there = [str(number) for number in range(sum(_GPU.fullmatch(name) is not None for name in files))]
    if (named := os.environ.get(_VISIBLE)) is None:
        return there
    # The driver takes the names up to the first that is none; where there is no GPU, none is one.
    names = [name.strip() for name in named.split(",")]
    return [name for name in names if name and name != "-1"] if there else []


def check(allocation: AllocationConfig) -> None:
    """Raises ConfigError when the allocation is more than this machine has."""
    cores, memory = len(available_cores()), available_memory() / GIB
    if allocation.cores is not None and allocation.cores > cores:
        raise ConfigError("allocation.cores", allocation.cores, f"this process may use {cores}", cores)
    if allocation.memory_gib is not None and not os.path.exists("/proc/self/statm"):
        raise ConfigError("allocation.memory_gib", allocation.memory_gib, "cannot be limited on this system; leave it absent")
    if allocation.memory_gib is not None and allocation.memory_gib > memory:
        raise ConfigError("allocation.memory_gib", allocation.memory_gib, f"this machine has {memory:.1f}", f"{memory:.1f}")
    if allocation.devices is not None and allocation.devices > (gpus := len(visible_gpus())):
        there = f"this process may use {gpus} GPUs" if gpus else "this process may use no GPU, and others cannot be hidden"
        raise ConfigError("allocation.devices", allocation.devices, there, gpus or "leave it absent")


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
            _before_jax("device_memory", allocation.device_memory, _DEVICE_SHARE, str(allocation.device_memory))
        if allocation.devices is not None:
            _before_jax("devices", allocation.devices, _VISIBLE, ",".join(visible_gpus()[: allocation.devices]))
        yield


@contextlib.contextmanager
def _cores(count: int) -> Iterator[None]:
    before = available_cores()
    _set_affinity(before[:count])
    try:
        yield
    finally:
        _set_affinity(before)


def _set_affinity(cores: Sequence[int], process: int | str = "self") -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("allocation.cores", len(cores), "cannot be limited on this system; leave it absent")
    for thread in os.listdir(f"/proc/{process}/task"):
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


def keep_to(cores: Sequence[int]) -> None:
    """Keeps this process and those that it started, with all their threads, to these cores from now on.

    Raises:
      ConfigError: this system cannot.
    """
    _set_affinity(cores)
    for process in usage.descendants():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            _set_affinity(cores, process)


@contextlib.contextmanager
def lent(cores: Sequence[int]) -> Iterator[None]:
    """Lets this process, and those that it started, use ``cores`` inside the block, and keeps them to their own after it.

    Compiling is done sooner with more, if not as soon as by who owns them: XLA has made as many threads by then as its own cores
    are, and programs are compiled for so many.

    Raises:
      ConfigError: this system cannot.
    """
    own = available_cores()
    keep_to(cores)
    try:
        yield
    finally:
        keep_to(own)


def resident_memory() -> int:
    """Bytes of memory that this process holds; 0 on a system that does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def running_out(advice: str) -> Iterator[None]:
    """Turns a device that runs out of memory into a RunFailed of one line, which ends with ``advice``."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = str(error).splitlines()[0][:120]
        raise RunFailed(f"{jax.devices()[0].device_kind} is out of memory ({why}); {advice}") from error


def _before_jax(field: str, value: float, variable: str, text: str) -> None:
    """Sets what is read when JAX starts. Raises ConfigError when it has started with something else."""
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        os.environ[variable] = text
    elif os.environ.get(variable) != text:
        raise ConfigError(f"allocation.{field}", value, "JAX has already started; set it before, or use the command")
