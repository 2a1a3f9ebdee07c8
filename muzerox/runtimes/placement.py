"""Meshes and shardings: which part of a state lies on which device."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from muzerox.allocation import GIB, available_cores, available_memory, resident_memory
from muzerox.config import Config, ReplayConfig
from muzerox.errors import ConfigError
from muzerox.parallel import AXIS
from muzerox.replay import ReplayState
from muzerox.sections import RuntimeConfig

log = logging.getLogger("muzerox.placement")


def offer_cpu_devices(count: int) -> None:
    """Has JAX make ``count`` CPU devices when it starts, if there are as many cores: a core each, as far as it is busy.

    Does nothing once JAX has started, or where ``XLA_FLAGS`` says how many: :func:`make_mesh` tells what is missing then. On
    accelerators those that are made are not used.
    """
    if not 1 < count <= len(available_cores()) or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    with contextlib.suppress(RuntimeError):  # it has started
        jax.config.update("jax_num_cpu_devices", count)


def make_mesh(num_devices: int) -> Mesh:
    """A mesh of the first ``num_devices`` devices. Raises ConfigError when there are fewer."""
    devices = jax.devices()
    there, cores = len(devices), len(available_cores()) if devices[0].platform == "cpu" else 0
    if there < num_devices <= cores:
        rule = f"JAX has started with {there}; jax.config.update('jax_num_cpu_devices', {num_devices}) has to come first"
        raise ConfigError("runtime.num_devices", num_devices, rule, there)
    if num_devices > there:
        most = max(there, cores)
        raise ConfigError("runtime.num_devices", num_devices, f"this machine has {most}", most)
    return Mesh(devices[:num_devices], (AXIS,))


def assign(runtime: RuntimeConfig) -> tuple[list[jax.Device], list[jax.Device], list[jax.Device]]:
    """The devices that act, search and learn under sebulba.

    Where there are enough, no device has two roles. Where there are not, searching shares the acting devices; where that is not
    enough either, every role starts from the first device. Raises ConfigError when a role asks for more than there are.

    On a CPU with ``runtime.role_threads`` the devices are made for the roles, and are not among ``jax.devices()``.
    """
    devices = jax.devices()
    made = bool(runtime.role_threads) and devices[0].platform == "cpu"
    there, what = (len(available_cores()), "cores") if made else (len(devices), "devices")
    roles = {f"{role}_devices": getattr(runtime, f"{role}_devices") for role in ("acting", "searching", "learning")}
    for name, count in (roles | {"role_threads": runtime.role_threads if made else 0}).items():
        if count > there:
            raise ConfigError(f"runtime.{name}", count, f"this machine has {there} {what}", there)
    if made:
        return _with_own_threads(runtime)
    acting, searching, learning = roles.values()
    if sum(roles.values()) <= len(devices):
        first, last = acting, acting + searching
    elif max(acting, searching) + learning <= len(devices):
        first, last = 0, max(acting, searching)
    else:
        first, last = 0, 0
    return devices[:acting], devices[first : first + searching], devices[last : last + learning]


def _with_own_threads(runtime: RuntimeConfig) -> tuple[list[jax.Device], list[jax.Device], list[jax.Device]]:
    """CPU devices with threads of their own; those that search learn too."""
    threads, searching, learning = runtime.role_threads, runtime.searching_devices, runtime.learning_devices
    # A row's search is short, and self-play has nothing to do without it: it is called, not handed over and waited for.
    acting = [cpu_devices(f"acting {index}", threads, 1, asynchronous=False)[0] for index in range(runtime.acting_devices)]
    others = list(cpu_devices("learning", threads, max(searching, learning)))
    return acting, others[:searching], others[:learning]


def host_device(runtime: RuntimeConfig, *, own: bool) -> jax.Device:
    """The CPU device where a replay in the host's memory lies. Where roles have their ``own`` threads it has too.

    Its programs are called: whoever reads the replay waits for them.
    """
    return cpu_devices("replay", runtime.role_threads, 1, asynchronous=False)[0] if own else jax.devices("cpu")[0]


@functools.cache
def cpu_devices(role: str, threads: int, count: int, *, asynchronous: bool = True) -> tuple[jax.Device, ...]:
    """``count`` CPU devices of a backend of their own, whose programs run on ``threads`` threads for each of them.

    Where it is not ``asynchronous``, a call of a program returns when the program is done. The backend lives as long as the
    process, as JAX's own does. The same arguments give the same devices, and another ``role`` others.
    """
    log.debug("%d CPU devices of %d threads each, for %s", count, threads, role)
    from jaxlib import xla_client  # JAX itself makes one backend a platform

    jax.devices()  # its own, before the number of threads is changed
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = str(threads * count)  # read when a backend is made, and only then
    try:
        backend: Any = xla_client.make_cpu_client(asynchronous=asynchronous, num_devices=count)
        return tuple(backend.local_devices())
    finally:
        if before is None:
            del os.environ["NPROC"]
        else:
            os.environ["NPROC"] = before


def is_own(device: jax.Device) -> bool:
    """It was made by :func:`assign`: JAX's defaults do not reach it."""
    return device.client is not jax.devices(device.platform)[0].client


def memory(mesh: Mesh) -> int | None:
    """Bytes that the devices of ``mesh`` hold together; CPU devices share the host's. None where a device does not tell."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        return available_memory()
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return sum(filter(None, limits)) if all(limits) else None


def check_replay(config: Config, ring: Any, *, on_host: bool, device_bytes: int | None) -> None:
    """Raises ConfigError when the replay alone is more than the memory that it is to lie in, with the capacity that would fit.

    Args:
      ring: the replay, or its shapes.
      on_host: it lies in the host's memory, of which the process may hold ``allocation.memory_gib``.
      device_bytes: of the devices that it is split over together; None where they do not tell.
    """
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(ring))
    limit, whose, capacity = device_bytes, "there are", config.replay.capacity
    if on_host:
        limit, given = available_memory(), config.allocation.memory_gib
        if given is not None and given * GIB < limit:
            limit, whose = int(given * GIB), "allocation.memory_gib is not enough memory:"
    if limit is None or needed <= limit:
        return
    # Saving copies it, and the process itself takes what it holds by now.
    held = resident_memory() if on_host else 0
    fits = int(capacity * max(limit - held, 0) / needed) // 2
    rule = f"takes {needed / GIB:,.1f} GiB, and {whose} {limit / GIB:,.1f}"
    nearest: Any = fits
    try:
        config.replace("replay.capacity", fits)
    except ConfigError:  # so few transitions that other settings would have to change too
        nearest = f"allocation.memory_gib = {math.ceil(4.0 * (2 * needed + held) / GIB) / 4.0:g}" if on_host else None
    raise ConfigError("replay.capacity", capacity, rule, nearest)


def split_axis(mesh: Mesh, tree: Any, axis: int) -> Any:
    """Shardings that split ``axis`` of every leaf over the mesh and copy leaves that lack it."""

    def sharding(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        if len(leaf.shape) <= axis:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))

    return jax.tree.map(sharding, tree)


def place_storage(config: ReplayConfig, shardings: ReplayState) -> ReplayState:
    """The shardings of a replay, its rows where ``replay.placement`` says; priorities stay on the device."""
    if config.placement == "device":
        return shardings
    return shardings.replace(storage=jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), shardings.storage))


def learner_shardings(devices: list[jax.Device]) -> tuple[Sharding, Sharding]:
    """Of what every learning device has whole, and of batches, which are split; one device knows no meshes."""
    if len(devices) == 1:
        return SingleDeviceSharding(devices[0]), SingleDeviceSharding(devices[0])
    mesh = Mesh(devices, (AXIS,))
    return NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))


def put(tree: Any, where: jax.Device | Sharding) -> Any:
    """``tree`` there, whose leaves lie all in one place. One that is there already is returned as it is.

    ``jax.device_put`` finds that out too, in tens of microseconds for every leaf.
    """
    sharding = where if isinstance(where, Sharding) else SingleDeviceSharding(where)
    first = next(iter(jax.tree.leaves(tree)), None)
    return tree if isinstance(first, jax.Array) and first.sharding == sharding else jax.device_put(tree, where)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Shardings that copy every leaf to every device."""
    return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)
