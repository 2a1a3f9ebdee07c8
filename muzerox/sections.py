"""The sections of a configuration: each field with its meaning, unit and range, checked at construction."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar

from muzerox.errors import ConfigError, nearest_name


def knob(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    above: float | None = None,
) -> Any:
    """A dataclass field with its meaning, unit and range.

    ``low`` and ``high`` are inclusive, ``above`` is exclusive.
    """
    metadata = {"doc": doc, "unit": unit, "low": low, "high": high, "choices": choices, "above": above}
    return dataclasses.field(default=default, metadata=metadata)


def _check_type(path: str, value: Any, kind: Any) -> Any:
    """``value`` as ``kind`` (int to float is the only conversion); raises ConfigError."""
    allowed = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for item in allowed:
        if item is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise ConfigError(path, value, "must be finite") from None
        if isinstance(value, item) and (item is bool or not isinstance(value, bool)):
            return value
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "absent"}
    rule = "must be " + " or ".join(names[item] for item in allowed)
    nearest = round(value) if isinstance(value, float) and int in allowed and math.isfinite(value) else None
    raise ConfigError(path, value, rule, nearest)


def _check_range(path: str, value: Any, meta: Mapping[str, Any]) -> None:
    """Raises ConfigError when ``value`` is outside the range or choices of its field."""
    if value is None:
        return
    choices, low, high, above = meta["choices"], meta["low"], meta["high"], meta["above"]
    if choices is not None and value not in choices:
        raise ConfigError(path, value, f"must be one of {', '.join(choices)}", nearest_name(value, choices))
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(path, value, "must be finite")
    if low is not None and value < low:
        raise ConfigError(path, value, f"must be at least {low}", low)
    if above is not None and value <= above:
        raise ConfigError(path, value, f"must be greater than {above}")
    if high is not None and value > high:
        raise ConfigError(path, value, f"must be at most {high}", high)


class Section:
    """Checks every field of a dataclass by its annotation and its metadata."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if not field.metadata:
                continue
            path = f"{self.prefix}{field.name}"
            value = _check_type(path, getattr(self, field.name), hints[field.name])
            _check_range(path, value, field.metadata)
            object.__setattr__(self, field.name, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig(Section):
    """Representation, dynamics and prediction networks."""

    prefix: ClassVar[str] = "network."
    kind: str = knob(
        "auto",
        "torso; auto takes resnet for images and boards of 4x4 cells or more, mlp otherwise",
        choices=("auto", "mlp", "resnet"),
    )
    width: int = knob(64, "hidden state size and layer width (mlp), channels (resnet)", unit="units", low=1, high=8192)
    depth: int = knob(2, "hidden layers (mlp) or residual blocks (resnet) of each network", unit="layers", low=1, high=64)
    num_bins: int = knob(21, "categories of the value and reward heads", unit="bins", low=2, high=4096)
    value_bound: float = knob(100.0, "largest absolute value the value head represents", unit="return", above=0.0, high=1e9)
    reward_bound: float = knob(1.0, "largest absolute reward the reward head represents", unit="reward", above=0.0, high=1e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig(Section):
    """Tree search."""

    prefix: ClassVar[str] = "search."
    algorithm: str = knob("gumbel", "Gumbel MuZero, or MuZero with PUCT", choices=("gumbel", "muzero"))
    engine: str = knob(
        "auto",
        "implementation of the search, same answers; auto takes the one measured faster on the backend",
        choices=("auto", "mctx", "fused"),
    )
    num_simulations: int = knob(16, "simulations of a search", unit="simulations", low=1, high=10_000)
    final_simulations: int | None = knob(
        None,
        "simulations of a search at the end of training: doubled on the way, in equal shares of max_env_steps; "
        "absent: num_simulations all along",
        unit="simulations",
        low=1,
        high=10_000,
    )
    split: int = knob(
        1,
        "parts a batch of roots is searched in, one after the other, as far as they divide it: smaller trees stay in cache",
        unit="parts",
        low=1,
        high=4096,
    )
    max_depth: int | None = knob(None, "largest depth of the tree; absent means unlimited", unit="plies", low=1, high=10_000)
    max_considered_actions: int = knob(16, "Gumbel: actions sampled at the root", unit="actions", low=1, high=10_000)
    gumbel_scale: float = knob(1.0, "Gumbel: scale of the root noise while training", low=0.0, high=100.0)
    value_scale: float = knob(0.1, "Gumbel: scale of the completed Q values", above=0.0, high=1e4)
    maxvisit_init: float = knob(50.0, "Gumbel: visits added to the completed Q values' scale", unit="visits", low=0.0, high=1e6)
    min_value_range: float = knob(
        1e-8,
        "a node's values are scaled to 0..1 by how far apart they are, or by this if they are closer: differences that the "
        "network cannot tell do not decide then",
        unit="return",
        above=0.0,
        high=1e9,
    )
    pb_c_init: float = knob(1.25, "PUCT: exploration constant", low=0.0, high=1e4)
    pb_c_base: float = knob(19652.0, "PUCT: growth of the exploration constant", unit="visits", above=0.0, high=1e9)
    dirichlet_alpha: float = knob(0.3, "PUCT: concentration of the root noise", above=0.0, high=1e3)
    dirichlet_fraction: float = knob(0.25, "PUCT: share of noise in the root prior", unit="share", low=0.0, high=1.0)
    # mctx takes an action without visits for one of 1e-38 of them: far beyond 5 it plays such, which may be illegal.
    temperature: float = knob(1.0, "PUCT: temperature of the action sampled while training", low=0.0, high=5.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(Section):
    """Sequence ring on the device."""

    prefix: ClassVar[str] = "replay."
    kind: str = knob("prioritized", "how starts of sequences are drawn", choices=("prioritized", "uniform"))
    capacity: int = knob(131_072, "transitions kept, summed over environments", unit="transitions", low=1, high=2_000_000_000)
    placement: str = knob(
        "device", "memory the ring lies in; host leaves an accelerator's to the search", choices=("device", "host")
    )
    min_size: int = knob(2_048, "transitions collected before the first update", unit="transitions", low=1, high=2_000_000_000)
    priority_exponent: float = knob(0.6, "prioritized: 0 is uniform, 1 proportional to the error", low=0.0, high=2.0)
    importance_exponent: float = knob(0.4, "prioritized: strength of the importance weights", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """Learning, evaluation and when to stop."""

    prefix: ClassVar[str] = "train."
    max_env_steps: int = knob(1_000_000, "training ends here", unit="environment steps", low=1, high=2_000_000_000)
    target_return: float | None = knob(
        None, "training ends when an evaluation's mean return reaches this; absent: never", unit="return", low=-1e9, high=1e9
    )
    replay_ratio: float = knob(4.0, "sampled sequences per environment step", unit="samples/step", above=0.0, high=10_000.0)
    batch_size: int = knob(256, "sequences of an update", unit="sequences", low=1, high=1_000_000)
    unroll_steps: int = knob(5, "steps the model is unrolled in the loss", unit="steps", low=1, high=100)
    td_steps: int = knob(10, "rewards summed before the value target bootstraps", unit="steps", low=1, high=10_000)
    discount: float = knob(0.99, "discount of a step", low=0.0, high=1.0)
    reanalyze_fraction: float = knob(
        0.0, "share of a batch whose policy targets are searched again with the target network", unit="share", low=0.0, high=1.0
    )
    random_action: float = knob(
        0.0,
        "share of self-play actions drawn uniformly among the legal ones; value targets stop short of them",
        unit="share",
        low=0.0,
        high=1.0,
    )
    target_period: int = knob(100, "updates between copies into the target network", unit="updates", low=1, high=10_000_000)
    learning_rate: float = knob(2e-3, "AdamW step size", low=0.0, high=10.0)
    final_learning_rate: float | None = knob(
        None, "AdamW step size at max_env_steps, reached in a straight line; absent: learning_rate all along", low=0.0, high=10.0
    )
    weight_decay: float = knob(1e-4, "AdamW weight decay", low=0.0, high=10.0)
    max_grad_norm: float = knob(5.0, "gradients are clipped to this global norm", above=0.0, high=1e9)
    policy_weight: float = knob(1.0, "weight of the policy loss", low=0.0, high=1e4)
    value_weight: float = knob(0.25, "weight of the value loss", low=0.0, high=1e4)
    reward_weight: float = knob(1.0, "weight of the reward loss", low=0.0, high=1e4)
    eval_period: int = knob(50_000, "environment steps between evaluations", unit="environment steps", low=1, high=2_000_000_000)
    eval_episodes: int = knob(
        64,
        "episodes of an evaluation; where they reach the target, as many fresh ones must reach it too",
        unit="episodes",
        low=1,
        high=100_000,
    )
    checkpoint_period: float = knob(30.0, "seconds between checkpoints", unit="seconds", low=0.0, high=1e6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Section):
    """Mixed precision; the levels are the rows of ``muzerox.precision.POLICIES``."""

    prefix: ClassVar[str] = "precision."
    level: str = knob("auto", "auto takes O0 on CPU and O1 on GPU and TPU", choices=("auto", "O0", "O1", "O1_float16", "O2"))
    loss_scale: str = knob(
        "auto", "auto takes dynamic for float16 and none otherwise", choices=("auto", "none", "static", "dynamic")
    )
    initial_loss_scale: float = knob(2.0**15, "first (dynamic) or only (static) loss scale", low=1.0, high=2.0**40)
    loss_scale_period: int = knob(
        2_000, "finite updates before a dynamic loss scale doubles", unit="updates", low=1, high=10_000_000
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig(Section):
    """Where and in what portions things run."""

    prefix: ClassVar[str] = "runtime."
    kind: str = knob(
        "auto",
        "anakin: environments, search, replay and learner in one program on the device; sebulba: host threads that step "
        "environments, search and learn meet at queues; auto takes anakin where the environment is of JAX",
        choices=("auto", "anakin", "sebulba"),
    )
    num_envs: int = knob(
        64, "environments stepped together; under sebulba, by each self-play worker", unit="environments", low=1, high=1_000_000
    )
    loop_count: int = knob(
        32,
        "learner updates fused into a dispatch; fewer where a report or an evaluation is due. Under sebulba parameters are "
        "published after each",
        unit="updates",
        low=1,
        high=100_000,
    )
    num_devices: int = knob(
        1,
        "anakin: devices of the mesh that environments, replay and batches are split over; on a CPU each is a core",
        unit="devices",
        low=1,
        high=100_000,
    )
    selfplay_workers: int = knob(2, "sebulba: threads that step num_envs environments each", unit="threads", low=1, high=4096)
    cpu_actors: int = knob(1, "sebulba: threads that sample the replay and prepare contexts", unit="threads", low=1, high=4096)
    search_queue_size: int = knob(
        2, "sebulba: contexts that may wait for targets and reanalysis", unit="contexts", low=1, high=4096
    )
    batch_queue_size: int = knob(2, "sebulba: batches that may wait for the learner", unit="batches", low=1, high=4096)
    acting_devices: int = knob(1, "sebulba: devices that search for self-play", unit="devices", low=1, high=100_000)
    searching_devices: int = knob(
        1, "sebulba: devices that make targets and reanalyze; also where the replay lies", unit="devices", low=1, high=100_000
    )
    learning_devices: int = knob(1, "sebulba: devices that an update's batch is split over", unit="devices", low=1, high=100_000)
    role_threads: int = knob(
        0,
        "sebulba on a CPU: threads of XLA that self-play has to itself, and targets and learning together; 0: all share as many "
        "as there are cores. Small networks are faster with 1, which no operation is handed between",
        unit="threads",
        low=0,
        high=4096,
    )
    step_in: str = knob(
        "thread",
        "sebulba: where a self-play worker's environments step: in its thread, or in a process of their own, which can be ended "
        "when it hangs and does not share Python's lock",
        choices=("thread", "process"),
    )
    step_timeout: float = knob(
        60.0,
        "sebulba: environments that take longer for a step have failed: a worker's are replaced, an evaluation's end training. "
        "With step_in = thread nothing watches an evaluation: a simulator that hangs there blocks the training for ever",
        unit="seconds",
        above=0.0,
        high=1e6,
    )
    max_failures: int = knob(
        10,
        "sebulba: failures of one worker in a row, nothing done between them, that end training",
        unit="failures",
        low=1,
        high=1_000_000,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationConfig(Section):
    """The share of the machine this run may use; what is absent is not limited."""

    prefix: ClassVar[str] = "allocation."
    cores: int | None = knob(None, "cores the process runs on", unit="cores", low=1, high=100_000)
    memory_gib: float | None = knob(None, "memory the process may hold", unit="GiB", above=0.0, high=1e6)
    device_memory: float | None = knob(
        None, "share of each accelerator's memory that JAX takes; without effect on CPU", unit="share", above=0.0, high=1.0
    )
    devices: int | None = knob(None, "accelerators the process sees, the first ones", unit="accelerators", low=1, high=100_000)
