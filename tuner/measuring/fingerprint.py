"""The machine's measured rates: matrix products, copies, dispatches. Measured once a machine, in a subprocess, and kept."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from predictor import Hardware
from tuner.bridge import compiler_options, device_facts, home, tell, write_atomically
from tuner.disk import kept, saving
from tuner.measuring.worker_client import Worker, WorkerFailed

_REPEATS = 11
_HOW = 4  # rates are measured: what was kept of another way is not of use


def measure_rates() -> dict[str, Any]:
    """The fields of a Hardware, measured in this process on the default device. Takes a few seconds."""
    import os

    import jax
    import jax.numpy as jnp

    def seconds(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
        """Wall seconds of a call on what the last one returned, the least: other work can only add to it."""
        times = []
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            x = jax.block_until_ready(function(x))
            times.append(time.perf_counter() - start)
        return min(times[1:])

    facts = device_facts()
    size = 2048 if facts["platform"] == "cpu" else 8192

    def sums(a: jax.Array, b: jax.Array) -> jax.Array:
        """A product as networks have it: of float32 all bits, where less is the default; of bfloat16 sums in float32.

        A processor that multiplies 16 bits as they are (AMX) may be asked to by that alone, and is several times as fast.
        """
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def flops(dtype: Any) -> float:
        matrix = jnp.full((size, size), 1.0 / size, dtype)  # its own square

        @jax.jit
        def product(a: jax.Array) -> jax.Array:
            return sums(a, a).astype(dtype)

        return 2.0 * size**3 / seconds(product, matrix)

    # 64 MiB, 1 GiB: beyond the caches. Passes over one buffer: a fresh one would be timed with its page faults.
    array = jnp.zeros(2**24 if facts["platform"] == "cpu" else 2**28, jnp.float32)
    passes, loop, small, width = 10, 1000, 2048, 64
    # Operations a step of the loop. In a CUDA graph the loop's own condition takes as long as several kernels, and trainings'
    # loops, of tens of kernels, hardly notice.
    pairs = 1 if facts["platform"] == "cpu" else 16

    @partial(jax.jit, donate_argnums=0)
    def copy(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, passes, lambda i, x: x + i.astype(jnp.float32), x)

    @partial(jax.jit, compiler_options=compiler_options())  # as trainings are compiled, whose loops these stand for
    def chain(x: jax.Array) -> jax.Array:
        # A product, as most operations of a network are, too small to take time itself.
        def step(_: jax.Array, x: jax.Array) -> jax.Array:
            for _pair in range(pairs):
                x = jnp.tanh(x @ x)
            return x

        return jax.lax.fori_loop(0, loop // pairs, step, x)

    def element(dtype: Any) -> float:
        """Seconds of an element of a small array that is computed with twice, and each time made as wide as it was."""

        @partial(jax.jit, compiler_options=compiler_options())
        def passes_over(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, loop, lambda _, x: x * jnp.asarray(0.75, dtype) + jnp.asarray(0.25, dtype), x)

        return seconds(passes_over, jnp.ones(small, dtype)) / (loop * small)

    def output(dtype: Any) -> float:
        """Seconds of an element that a small layer makes of sums in 32 bits, as networks do."""
        kernel = jnp.eye(width, dtype=dtype)

        @partial(jax.jit, compiler_options=compiler_options())
        def layers(x: jax.Array) -> jax.Array:
            def layer(_: jax.Array, x: jax.Array) -> jax.Array:
                return jax.nn.relu(sums(x, kernel)).astype(dtype)

            return jax.lax.fori_loop(0, loop, layer, x)

        return seconds(layers, jnp.ones((width, width), dtype)) / (loop * width**2)

    rates = {
        "float32_flops": flops(jnp.float32),
        "bfloat16_flops": flops(jnp.bfloat16),
        "copy_bytes_per_second": 2.0 * passes * array.nbytes / seconds(copy, array),
        "dispatch_seconds": seconds(jax.jit(lambda a: a + 1.0), jnp.zeros(8)),
        "operation_seconds": seconds(chain, jnp.eye(8) * 0.1) / (loop // pairs * pairs) / 2,
    }
    if facts["platform"] == "cpu":  # accelerators narrow on the way
        # Where processors multiply 16 bits as they are, a layer gains more by that than it loses to narrowing.
        longer = min(of(jnp.bfloat16) - of(jnp.float32) for of in (element, output))
        rates["narrowing_seconds"] = max(0.0, longer) / 2.0
    one_core = rates["float32_flops"]
    if facts["platform"] == "cpu" and facts["cores"] > 1:
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores[:1])
        one_core = flops(jnp.float32)
    return {"cpu": _cpu_model(), **facts, **rates, "one_core_flops": one_core}


def _cpu_model() -> str:
    import platform

    try:
        with open("/proc/cpuinfo") as file:
            return cpu_name(file.read()) or platform.processor() or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def cpu_name(cpuinfo: str) -> str:
    """The first processor of /proc/cpuinfo, by name and numbers: virtual machines call several generations just ``AMD EPYC``."""
    lines = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    first = {name.strip(): value.strip() for name, _, value in lines}
    numbers = [f"{key.lower()} {first[key]}" for key in ("cpu family", "model", "CPU implementer", "CPU part") if key in first]
    return ", ".join([*filter(None, [first.get("model name")]), *numbers])


def fingerprint(*, again: bool = False, say: Callable[[str], None] = tell) -> Hardware:
    """This machine's Hardware: kept under ``MUZEROX_HOME/hardware`` after the first time, unless ``again``.

    ``say`` takes the one line that says it is being measured; by default it goes to stderr.

    Raises:
      UserError: it cannot be kept there.
      WorkerFailed: the device could not be used.
    """
    folder = home() / "hardware"
    key = _cheap_key()
    file = folder / f"{key}.json"
    text = None if again else kept(file)
    if text is not None:
        with contextlib.suppress(ValueError, TypeError):  # of an older version, or damaged: measured anew
            return Hardware.from_dict(json.loads(text))
    with saving("MUZEROX_HOME", home()):  # what cannot be kept is not measured first
        folder.mkdir(parents=True, exist_ok=True)
    say("measuring the machine, once: a few seconds")
    with Worker({"kind": "fingerprint"}) as worker:
        hardware = Hardware.from_dict(worker.answer())
    with saving("MUZEROX_HOME", home()):
        write_atomically(file, json.dumps(hardware.to_dict(), indent=1) + "\n")
    return hardware


def _cheap_key() -> str:
    """What can be known of this machine without starting JAX."""
    import hashlib
    import importlib.metadata
    import os

    from tuner.bridge import available_cores, available_memory

    visible = {name: os.environ.get(name, "") for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
    gpu = any(os.path.exists(path) for path in ("/dev/nvidia0", "/dev/accel0"))
    facts = [_HOW, _cpu_model(), len(available_cores()), round(available_memory() / 2**30), visible, gpu]
    facts += [importlib.metadata.version("jaxlib"), *_accelerators()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _accelerators(gpus: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """What lets JAX use an accelerator, by version, and NVIDIA's by model: with another of either it is another machine."""
    import importlib.metadata

    plugins = importlib.metadata.entry_points(group="jax_plugins")
    found = sorted(f"{plugin.name} {plugin.dist.version}" for plugin in plugins if plugin.dist is not None)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found.append(f"libtpu {importlib.metadata.version('libtpu')}")
    with contextlib.suppress(OSError):
        told = [file.read_text(errors="replace") for file in gpus.glob("*/information")]
        found += sorted(line for text in told for line in text.splitlines() if line.startswith("Model:"))
    return found


__all__ = ["WorkerFailed", "fingerprint", "measure_rates"]
