"""What is predicted from, and what comes back: plain data that any trainer can fill in.

Nothing here knows muzerox. A :class:`Workload` is a training configuration in numbers, a :class:`Hardware` is a machine in
measured rates, a :class:`Measurement` is what one run of a workload cost, a :class:`Prediction` what it is expected to.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

import jax

_MOST = sys.float_info.max  # of any number
SCHEMA = 6  # of what is stored: another number is another version's, and is not read


class Outcome(enum.StrEnum):
    """How a measured run ended. One that failed is kept: it teaches what is feasible."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    NONFINITE = "nonfinite"
    CRASHED = "crashed"


class SchemaError(ValueError):
    """A record that cannot be read; ``str(error)`` is one line."""


class OtherVersion(SchemaError):
    """A record that another version of this package wrote."""


class _Record:
    """Plain dictionaries to and from a frozen dataclass, every field checked."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> typing.Self:
        """The inverse of :meth:`to_dict`. Raises SchemaError on missing or unknown fields, wrong types, impossible numbers."""
        if not isinstance(tree, Mapping):
            raise SchemaError(f"{cls.__name__} = {tree!r:.100}: must have fields by name")
        hints = typing.get_type_hints(cls)
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        missing = [
            name
            for name, f in fields.items()
            if name not in tree and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        unknown = sorted(set(tree) - set(fields))
        if missing or unknown:
            what = f"lacks {missing[0]}" if missing else f"has no field {unknown[0]}"
            raise SchemaError(f"{cls.__name__}: {what}")
        return cls(**{name: _read(f"{cls.__name__}.{name}", value, hints[name]) for name, value in tree.items()})


def _read(path: str, value: Any, kind: Any) -> Any:
    """``value`` as the annotated ``kind``; raises SchemaError."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for item in allowed:
        origin = typing.get_origin(item) or item
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value <= _MOST:
            raise SchemaError(f"{path} = {value!r:.100}: must be a finite number, and not negative")
        if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if origin is tuple and isinstance(value, list | tuple):
            inner = typing.get_args(item)[0]
            return tuple(_read(path, x, inner) for x in value)
        if origin is dict and isinstance(value, Mapping):
            inner = typing.get_args(item)[1]
            return {str(name): _read(f"{path}.{name}", x, inner) for name, x in value.items()}
        if issubclass(origin, enum.Enum) and value in list(origin):
            return origin(value)
        if dataclasses.is_dataclass(origin) and isinstance(value, Mapping):
            return origin.from_dict(value)  # type: ignore[union-attr]
        plain = origin not in (float, tuple, dict) and not issubclass(origin, enum.Enum)
        if plain and isinstance(value, origin) and (origin is bool or not isinstance(value, bool)):
            return value
    raise SchemaError(f"{path} = {value!r:.100}: must be {kind}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware(_Record):
    """A machine in measured rates. They are of the default device, with every core this process may use."""

    cpu: str  # model name
    cores: int  # cores this process may run on
    memory_bytes: int  # of the host
    platform: str  # cpu, gpu or tpu
    device: str  # kind of the default device
    devices: int
    device_memory_bytes: int  # of one device; the host's on cpu
    float32_flops: float  # of a large matrix product, operations a second (a multiplication and an addition are two)
    bfloat16_flops: float
    copy_bytes_per_second: float  # read and written, of an array larger than the caches
    dispatch_seconds: float  # calling a compiled program that does nothing, and waiting for it
    operation_seconds: float  # one small operation inside a compiled loop
    one_core_flops: float  # float32, with one core (cpu); float32_flops elsewhere
    # Of one element, on one core and in its cache, that is written in bfloat16 for float32: one instruction where a processor has
    # it, several where not. 0: nothing, as where small products in bfloat16 gain more than that, or not measured (before
    # 2026-11-29).
    narrowing_seconds: float = 0.0

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> typing.Self:
        """As of any record. A machine without cores, memory or speed is none."""
        found = super().from_dict(tree)
        missing = [name for name, value in vars(found).items() if value == 0 and name != "narrowing_seconds"]
        if missing:
            raise SchemaError(f"Hardware.{missing[0]} = 0: must be more than that")
        return found

    @property
    def on_host(self) -> bool:
        """Whether the device is the host's processor: its cores and memory are those of the threads."""
        return self.platform == "cpu"

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits for the kind of machine; rates, which are noisy, do not count."""
        kind = [self.cpu, self.cores, round(self.memory_bytes / 2**30), self.platform, self.device, self.devices]
        return hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:12]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(_Record):
    """A training configuration in numbers.

    A pytree: each field is one number, or a float32 array [C] with one entry a candidate. ``flops`` count a multiplication
    and an addition as two operations, for one row, forward.
    """

    # environment
    observation_bytes: float
    num_actions: float
    num_players: float
    num_envs: float
    # networks: operations a row, parameters, layers that run one after the other, elements a row that are written beside products
    represent_flops: float
    dynamics_flops: float
    predict_flops: float
    represent_params: float
    dynamics_params: float
    predict_params: float
    represent_layers: float
    dynamics_layers: float
    predict_layers: float
    represent_elements: float
    dynamics_elements: float
    predict_elements: float
    represent_moved: float  # elements a row that are padded, joined or looked up: neighbours of the cells of an image
    dynamics_moved: float
    predict_moved: float
    hidden_size: float  # elements of a hidden state
    num_bins: float
    # self-play
    num_simulations: float
    puct: float  # 1 for MuZero's PUCT search, 0 for Gumbel
    search_split: float  # parts a batch of roots is searched in, one after the other
    search_engine: float  # index of the engine
    # replay
    capacity: float  # transitions
    stored_observations: float  # of each: 1, or 2 where episodes may be truncated, so that the one it led to is kept too
    replay_ratio: float  # sequences an environment step
    prioritized: float  # 1 or 0
    replay_on_host: float  # 1 or 0
    # training loop
    batch_size: float
    unroll_steps: float
    td_steps: float
    reanalyze_fraction: float
    loop_count: float  # updates a dispatch
    # runtime: one program on the device (0, and so are those below, but one worker), or threads that meet at queues (1)
    sebulba: float
    selfplay_workers: float  # threads that step ``num_envs`` environments each
    cpu_actors: float  # threads that draw contexts from the replay
    search_queue_size: float  # contexts
    batch_queue_size: float  # batches
    acting_devices: float
    searching_devices: float  # each has a thread that makes targets and reanalyzes
    learning_devices: float
    role_threads: float  # of XLA on a CPU, that self-play has to itself, and those who search and learn; 0: all are shared
    step_in_process: float  # 1: each worker's environments step in a process of their own
    host_step_seconds: float  # of one environment in Python or C; 0 where it is a program of the device
    # hardware it runs on
    compute_bits: float  # of matrix products
    embedding_bits: float  # of hidden states in a tree
    cores: float
    num_devices: float  # that one program is split over
    memory_bytes: float  # of the host's, that the process may hold; 0: no less than there is
    device_share: float  # of an accelerator's memory, that the process may hold; 1: all there is
    # Rows of a batch that are learnt from at once on a CPU's device of one core, where a convolution makes much of each; 0: all.
    cached_rows: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction(_Record):
    """What a workload is expected to cost. Every key but ``interval`` and ``shares`` is one of :class:`Measurement`."""

    outcome: Outcome
    seconds_per_env_step: float  # steady state, per transition summed over environments, learning and reanalysis included
    interval: tuple[float, ...]  # of these seconds: what would be measured lies between the two nine times in ten
    shares: dict[str, float]  # of these seconds, by stage; they add up to 1, and what is hidden behind another stage has none
    env_steps_per_second: float
    updates_per_second: float
    compile_seconds: float
    warmup_seconds: float  # from a compiled program to a steady state
    peak_bytes: float  # resident memory of the process, with the copy of its state that saving takes
    cpu_use: float  # cores busy on average
    device_peak_bytes: float | None = None  # of an accelerator; absent where the device is the host
    batch_staleness: float | None = None  # age of a batch's targets when it is learnt from, updates; absent without threads
    error: str | None = None  # one line, where the outcome is not ok


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement(_Record):
    """What one run of a workload cost. Figures are absent where it did not get as far."""

    hardware: Hardware
    workload: Workload
    outcome: Outcome
    error: str | None = None  # one line, where the outcome is not ok
    seconds_per_env_step: float | None = None  # median of repeats
    env_steps_per_second: float | None = None
    updates_per_second: float | None = None
    compile_seconds: float | None = None
    warmup_seconds: float | None = None
    peak_bytes: float | None = None  # resident memory of the process, with the copy of its state that saving takes
    device_peak_bytes: float | None = None  # where the device tells
    cpu_use: float | None = None  # cores busy on average, in the steady state
    joules_per_env_step: float | None = None  # of the whole processor and accelerators, where counters can be read
    repeats: tuple[float, ...] = ()  # seconds an environment step of each repeat
    wall_seconds: float = 0.0  # of the whole measurement, process start included
    # Of a runtime with threads, means over the steady state; absent elsewhere.
    batch_staleness: float | None = None  # age of a batch's targets when it is learnt from, updates
    acting_staleness: float | None = None  # age of the parameters that chose an action, updates
    waits: dict[str, float] = dataclasses.field(default_factory=dict)  # threads waiting, by what they wait for
    from_cache: bool = False  # an earlier process had compiled its programs: a first run takes longer, and half a GiB more
    compile_cores: int | None = None  # that compiling took, where it was lent more than the workload has
    schema: int = SCHEMA

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> typing.Self:
        """The inverse of :meth:`to_dict`. Raises OtherVersion, or SchemaError on missing or unknown fields and wrong types."""
        version = tree.get("schema", 1)
        if version != SCHEMA:
            raise OtherVersion(f"{cls.__name__}: written by another version (schema {version!r:.20}; this one reads {SCHEMA})")
        return super().from_dict(tree)
