"""Configuration: nested frozen dataclasses, every field with a unit and a range.

``Config`` is hashable and static under ``jax.jit``. Fields are addressed by dotted paths such as
``search.num_simulations``; :meth:`Config.replace` and :meth:`Config.from_dict` take them, and everything a
user can get wrong raises :class:`muzerox.errors.ConfigError` at construction.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from fractions import Fraction
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
            return float(value)
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


class _Section:
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
class NetworkConfig(_Section):
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
class SearchConfig(_Section):
    """Tree search."""

    prefix: ClassVar[str] = "search."
    algorithm: str = knob("gumbel", "Gumbel MuZero, or MuZero with PUCT", choices=("gumbel", "muzero"))
    engine: str = knob(
        "auto",
        "implementation of the search, same answers; auto takes the one measured faster on the backend",
        choices=("auto", "mctx", "fused"),
    )
    num_simulations: int = knob(16, "simulations of a search", unit="simulations", low=1, high=10_000)
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
    pb_c_init: float = knob(1.25, "PUCT: exploration constant", low=0.0, high=1e4)
    pb_c_base: float = knob(19652.0, "PUCT: growth of the exploration constant", unit="visits", above=0.0, high=1e9)
    dirichlet_alpha: float = knob(0.3, "PUCT: concentration of the root noise", above=0.0, high=1e3)
    dirichlet_fraction: float = knob(0.25, "PUCT: share of noise in the root prior", unit="share", low=0.0, high=1.0)
    temperature: float = knob(1.0, "PUCT: temperature of the action sampled while training", low=0.0, high=100.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(_Section):
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
class TrainConfig(_Section):
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
    weight_decay: float = knob(1e-4, "AdamW weight decay", low=0.0, high=10.0)
    max_grad_norm: float = knob(5.0, "gradients are clipped to this global norm", above=0.0, high=1e9)
    policy_weight: float = knob(1.0, "weight of the policy loss", low=0.0, high=1e4)
    value_weight: float = knob(0.25, "weight of the value loss", low=0.0, high=1e4)
    reward_weight: float = knob(1.0, "weight of the reward loss", low=0.0, high=1e4)
    eval_period: int = knob(50_000, "environment steps between evaluations", unit="environment steps", low=1, high=2_000_000_000)
    eval_episodes: int = knob(
        64, "episodes of an evaluation; as many again confirm one that reaches the target", unit="episodes", low=1, high=100_000
    )
    checkpoint_period: float = knob(30.0, "seconds between checkpoints", unit="seconds", low=0.0, high=1e6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig(_Section):
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
class RuntimeConfig(_Section):
    """Where and in what portions things run."""

    prefix: ClassVar[str] = "runtime."
    kind: str = knob(
        "anakin", "anakin: environments, search, replay and learner in one program on the device", choices=("anakin",)
    )
    num_envs: int = knob(64, "environments stepped in parallel", unit="environments", low=1, high=1_000_000)
    loop_count: int = knob(
        32,
        "learner updates fused into a dispatch; fewer where a report or an evaluation is due",
        unit="updates",
        low=1,
        high=100_000,
    )
    num_devices: int = knob(
        1, "devices of the mesh that environments, replay and batches are split over", unit="devices", low=1, high=100_000
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllocationConfig(_Section):
    """The share of the machine this run may use; what is absent is not limited."""

    prefix: ClassVar[str] = "allocation."
    cores: int | None = knob(None, "cores the process runs on", unit="cores", low=1, high=100_000)
    memory_gib: float | None = knob(None, "memory the process may hold", unit="GiB", above=0.0, high=1e6)
    device_memory: float | None = knob(
        None, "share of each accelerator's memory that JAX takes; without effect on CPU", unit="share", above=0.0, high=1.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(_Section):
    """Everything that determines a run.

    Raises:
      ConfigError: a value has the wrong type or is out of range, or two values contradict each other.
    """

    env: str = knob("gymnax:CartPole-v1", "environment id, suite:name")
    seed: int = knob(0, "seed of every random stream", low=0, high=2**31 - 1)
    network: NetworkConfig = dataclasses.field(default_factory=NetworkConfig)
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    replay: ReplayConfig = dataclasses.field(default_factory=ReplayConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    runtime: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    allocation: AllocationConfig = dataclasses.field(default_factory=AllocationConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        batch, envs, devices = self.train.batch_size, self.runtime.num_envs, self.runtime.num_devices
        capacity = self.replay.capacity
        for path, value in (("train.batch_size", batch), ("replay.min_size", self.replay.min_size)):
            if value > capacity:
                raise ConfigError(path, value, f"must not exceed replay.capacity ({capacity})", capacity)
        needed = (self.sequence_length + 1) * envs
        if capacity < needed:
            raise ConfigError(
                "replay.capacity",
                capacity,
                f"must hold a sequence of every environment: (unroll_steps + td_steps + 2) * num_envs = {needed}",
                needed,
            )
        for path, value in (("runtime.num_envs", envs), ("train.batch_size", batch)):
            if value % devices:
                rule = f"must be a multiple of runtime.num_devices ({devices})"
                raise ConfigError(path, value, rule, max(devices, value // devices * devices))
        if envs % (self.search.split * devices):
            rule = f"runtime.num_envs ({envs}) must be a multiple of it times runtime.num_devices ({devices})"
            raise ConfigError("search.split", self.search.split, rule, math.gcd(self.search.split, envs // devices))
        steps = Fraction(batch) / self.replay_ratio
        if steps > 10**8:
            raise ConfigError(
                "train.replay_ratio",
                self.train.replay_ratio,
                f"must be at least batch_size / 1e8 = {batch / 1e8:g}",
                f"{batch / 1e8:g}",
            )

    @property
    def sequence_length(self) -> int:
        """Rows of replay a sample touches: unroll, bootstrap and the state after the last reward."""
        return self.train.unroll_steps + self.train.td_steps + 1

    @property
    def replay_ratio(self) -> Fraction:
        """``train.replay_ratio`` as a fraction, so that it is kept without rounding drift."""
        return Fraction(self.train.replay_ratio).limit_denominator(1000) or Fraction(self.train.replay_ratio)

    @property
    def reanalyzed(self) -> int:
        """Sequences of a batch that are searched again."""
        return round(self.train.reanalyze_fraction * self.train.batch_size)

    def replace(self, path: str | Mapping[str, Any], value: Any = None) -> Config:
        """A copy with one dotted path, or a mapping of them, changed together.

        Raises:
          ConfigError: unknown path, wrong type, out of range.
        """
        changes = dict(path) if isinstance(path, Mapping) else {path: value}
        tree = self.to_dict(keep_none=True)
        for dotted, item in changes.items():
            _set_path(tree, dotted, item)
        return Config.from_dict(tree)

    def merge(self, tree: Mapping[str, Any]) -> Config:
        """A copy with the keys of a nested dictionary, such as a TOML file's, over these. Raises ConfigError."""
        merged = self.to_dict()
        for name, value in tree.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(name), dict)
            merged[name] = {**merged[name], **value} if both else value
        return Config.from_dict(merged)

    def to_dict(self, *, keep_none: bool = False) -> dict[str, Any]:
        """Nested plain dictionary; absent (None) values are left out unless ``keep_none``."""

        def strip(tree: dict[str, Any]) -> dict[str, Any]:
            return {k: strip(v) if isinstance(v, dict) else v for k, v in tree.items() if keep_none or v is not None}

        return strip(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Config:
        """The inverse of :meth:`to_dict`; missing keys take their defaults.

        Raises:
          ConfigError: unknown key, wrong type, out of range.
        """
        values: dict[str, Any] = {}
        for name, value in tree.items():
            if name in SECTIONS:
                if not isinstance(value, Mapping):
                    raise ConfigError(name, value, f"must be a section with keys such as {next(iter(_names(SECTIONS[name])))}")
                unknown = [key for key in value if key not in _names(SECTIONS[name])]
                if unknown:
                    raise _unknown(f"{name}.{unknown[0]}")
                values[name] = SECTIONS[name](**value)
            elif name in _names(cls):
                values[name] = value
            else:
                raise _unknown(name)
        return cls(**values)

    @classmethod
    def preset(cls, env: str) -> Config:
        """The tuned defaults for ``env`` when there are some, the general defaults otherwise."""
        files = {file.name: file for file in importlib.resources.files("muzerox").joinpath("presets").iterdir()}
        file = files.get(env.replace(":", "_") + ".toml")
        tree = tomllib.loads(file.read_text("utf-8")) if file is not None else {}
        return cls.from_dict({"env": env, **tree})


SECTIONS: dict[str, type] = {
    "network": NetworkConfig,
    "search": SearchConfig,
    "replay": ReplayConfig,
    "train": TrainConfig,
    "precision": PrecisionConfig,
    "runtime": RuntimeConfig,
    "allocation": AllocationConfig,
}


def _names(section: type) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]


def paths() -> dict[str, dataclasses.Field[Any]]:
    """Every settable path with its dataclass field (default, unit, range in ``metadata``)."""
    result = {f.name: f for f in dataclasses.fields(Config) if f.metadata}
    for name, section in SECTIONS.items():
        result.update({f"{name}.{f.name}": f for f in dataclasses.fields(section)})
    return result


def _unknown(path: str) -> ConfigError:
    if path in SECTIONS:
        return ConfigError(path, None, "is a section, not a key", f"{path}.{_names(SECTIONS[path])[0]}")
    return ConfigError(path, None, "is not a configuration key", nearest_name(path, [*paths(), *SECTIONS]))


def _set_path(tree: dict[str, Any], path: str, value: Any) -> None:
    if path not in paths():
        raise _unknown(path)
    *sections, name = path.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value
