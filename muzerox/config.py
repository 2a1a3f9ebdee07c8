"""Configuration: nested frozen dataclasses, every field with a unit and a range.

``Config`` is hashable and static under ``jax.jit``. Fields are addressed by dotted paths such as
``search.num_simulations``; :meth:`Config.replace` and :meth:`Config.from_dict` take them, and everything a
user can get wrong raises :class:`muzerox.errors.ConfigError` at construction.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import math
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from muzerox.errors import ConfigError, nearest_name
from muzerox.sections import (
    AllocationConfig,
    NetworkConfig,
    PrecisionConfig,
    ReplayConfig,
    RuntimeConfig,
    SearchConfig,
    Section,
    TrainConfig,
    knob,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
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
        batch, envs = self.train.batch_size, self.runtime.num_envs
        capacity = self.replay.capacity
        for path, value in (("train.batch_size", batch), ("replay.min_size", self.replay.min_size)):
            if value > capacity:
                raise ConfigError(path, value, f"must not exceed replay.capacity ({capacity})", capacity)
        sebulba = self.runtime.kind == "sebulba"
        columns, workers = envs * self.selfplay_workers, "selfplay_workers * " if sebulba else ""
        needed = (self.sequence_length + 1) * columns
        if capacity < needed:
            raise ConfigError(
                "replay.capacity",
                capacity,
                f"must hold a sequence of every environment: (unroll_steps + td_steps + 2) * {workers}num_envs = {needed}",
                needed,
            )
        if self.train.reanalyze_fraction and not self.reanalyzed:
            rule = f"rounds to no sequence of a batch of train.batch_size ({batch})"
            raise ConfigError("train.reanalyze_fraction", self.train.reanalyze_fraction, rule, f"{1 / batch:g}")
        # What is split over which devices.
        name = "learning_devices" if sebulba else "num_devices"
        devices = getattr(self.runtime, name)
        split = (("train.batch_size", batch),) if sebulba else (("runtime.num_envs", envs), ("train.batch_size", batch))
        for path, value in split:
            if value % devices:
                rule = f"must be a multiple of runtime.{name} ({devices})"
                raise ConfigError(path, value, rule, max(devices, value // devices * devices))
        parts = 1 if sebulba else devices
        if envs % (self.search.split * parts):
            times = "" if sebulba else f" times runtime.num_devices ({devices})"
            rule = f"runtime.num_envs ({envs}) must be a multiple of it{times}"
            raise ConfigError("search.split", self.search.split, rule, math.gcd(self.search.split, envs // parts))
        simulations, final = self.search.num_simulations, self.search.final_simulations
        if final is not None and final < simulations:
            rule = f"must be at least search.num_simulations ({simulations}): searches deepen"
            raise ConfigError("search.final_simulations", final, rule, simulations)
        threads, cores = self.runtime.role_threads, self.allocation.cores
        if sebulba and cores is not None and threads > cores:
            raise ConfigError("runtime.role_threads", threads, f"must not exceed allocation.cores ({cores})", cores)
        steps = Fraction(batch) / self.replay_ratio
        if steps > 10**8:
            raise ConfigError(
                "train.replay_ratio",
                self.train.replay_ratio,
                f"must be at least batch_size / 1e8 = {batch / 1e8:g}",
                f"{batch / 1e8:g}",
            )

    @property
    def selfplay_workers(self) -> int:
        """Threads of self-play: one where the device does everything."""
        return self.runtime.selfplay_workers if self.runtime.kind == "sebulba" else 1

    @property
    def sequence_length(self) -> int:
        """Rows of replay a sample touches: unroll, bootstrap and the state after the last reward."""
        return self.train.unroll_steps + self.train.td_steps + 1

    @property
    def replay_ratio(self) -> Fraction:
        """``train.replay_ratio`` as a fraction, so that it is kept without rounding drift; a short one, within 1e-4 of it."""
        exact = Fraction(self.train.replay_ratio)
        rounded = (exact.limit_denominator(10**digits) for digits in itertools.count(3))
        return next(ratio for ratio in rounded if abs(ratio - exact) <= exact / 10**4)

    @property
    def reanalyzed(self) -> int:
        """Sequences of a batch that are searched again."""
        return round(self.train.reanalyze_fraction * self.train.batch_size)

    @property
    def deepenings(self) -> tuple[tuple[int, int], ...]:
        """From which environment step on a search makes how many simulations; the first from step 0.

        Progressive simulation (Wu et al., arXiv:2310.11305), by doubling: while the network knows little, a deep search of it
        tells little more than a shallow one.
        """
        simulations = [self.search.num_simulations]
        while simulations[-1] < (self.search.final_simulations or 0):
            simulations.append(min(2 * simulations[-1], self.search.final_simulations or 0))
        share = Fraction(self.train.max_env_steps, len(simulations))
        return tuple((math.ceil(number * share), count) for number, count in enumerate(simulations))

    def searching(self, simulations: int) -> Config:
        """The part of a training whose searches make so many simulations, as a configuration of its own."""
        return self.replace({"search.num_simulations": simulations, "search.final_simulations": None})

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
        """The tuned defaults for ``env``, whatever options its id sets, when there are some; the general defaults otherwise."""
        files = {file.name: file for file in importlib.resources.files("muzerox").joinpath("presets").iterdir()}
        file = files.get(env.partition("?")[0].replace(":", "_") + ".toml")
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


# What may change when a run is resumed: how long it goes on, how it is watched, what it is given, and by which of several ways
# the same is computed. None touches what a checkpoint holds; engine and split of the search add up in another order.
RESUMABLE = (
    "train.max_env_steps",
    "train.target_return",
    "train.eval_period",
    "train.eval_episodes",
    "train.checkpoint_period",
    "runtime.loop_count",
    "runtime.cpu_actors",
    "runtime.search_queue_size",
    "runtime.batch_queue_size",
    "runtime.role_threads",
    "runtime.step_in",
    "runtime.step_timeout",
    "runtime.max_failures",
    "search.engine",
    "search.split",
    "allocation.cores",
    "allocation.memory_gib",
    "allocation.device_memory",
    "allocation.devices",
)


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
