"""Configuration: fields, ranges, TOML, dotted paths, cross-field rules."""

from __future__ import annotations

import dataclasses
import importlib.resources
import math
import typing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muzerox import config_io
from muzerox.config import SECTIONS, Config, SearchConfig, paths
from muzerox.envs import env_ids
from muzerox.errors import ConfigError
from muzerox.runtimes import anakin, sebulba

PRESETS = sorted(file.name for file in importlib.resources.files("muzerox").joinpath("presets").iterdir())


def kind(path: str) -> Any:
    """The annotation of a field."""
    section, _, name = path.rpartition(".")
    return typing.get_type_hints(SECTIONS[section] if section else Config)[name]


def get(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def plain(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionary to dotted paths."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat.update(plain(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value})
    return flat


# Fields


@pytest.mark.parametrize("path", paths())
def test_field_is_documented(path: str) -> None:
    field = paths()[path]
    meta = field.metadata
    assert len(meta["doc"]) >= 10
    if path == "env":
        return  # its range is what the suites serve
    if kind(path) is str:
        assert meta["choices"]
        assert field.default in meta["choices"]
    else:
        assert meta["low"] is not None or meta["above"] is not None
        assert meta["high"] is not None
        low = meta["low"] if meta["low"] is not None else meta["above"]
        assert low < meta["high"]
        assert meta["unit"] or kind(path) in (float, float | None) or path == "seed"


def test_paths_cover_every_field() -> None:
    assert set(plain(Config().to_dict(keep_none=True))) == set(paths())


def test_documented_keys_exist() -> None:
    assert set(paths()) >= {
        "search.num_simulations",
        "search.algorithm",
        "runtime.kind",
        "runtime.num_envs",
        "runtime.loop_count",
        "precision.level",
        "train.max_env_steps",
        "train.target_return",
        "train.replay_ratio",
    }


@pytest.mark.parametrize("path", [p for p in paths() if kind(p) is not str])
def test_range_is_enforced(path: str) -> None:
    section, _, name = path.rpartition(".")
    make = SECTIONS[section] if section else Config
    meta = paths()[path].metadata
    whole = int in (kind(path), *typing.get_args(kind(path)))
    step = 1 if whole else 1e-3
    outside = [meta["high"] + max(step, abs(meta["high"]) * 1e-6 if not whole else 1)]
    outside.append(meta["low"] - step if meta["low"] is not None else meta["above"])
    for value in [*outside, *([] if whole else [math.nan, math.inf, -math.inf]), "text", True, [1], {"a": 1}]:
        with pytest.raises(ConfigError) as caught:
            make(**{name: value})
        assert str(caught.value).startswith(f"{path} = ")
        assert caught.value.path == path
        assert caught.value.value is value or caught.value.value == value


@pytest.mark.parametrize("path", [p for p in paths() if kind(p) is str and p != "env"])
def test_choices_are_enforced(path: str) -> None:
    for choice in paths()[path].metadata["choices"]:
        assert get(Config().replace(path, choice), path) == choice
    with pytest.raises(ConfigError, match=r"must be one of .*; nearest valid: "):
        Config().replace(path, "nonesuch")


def test_whole_numbers_become_floats_and_nothing_else_is_converted() -> None:
    config = Config().replace("train.learning_rate", 1)
    assert config.train.learning_rate == 1.0
    assert type(config.train.learning_rate) is float
    with pytest.raises(ConfigError, match="whole number; nearest valid: 16"):
        Config().replace("search.num_simulations", 16.0)


# Presets


@pytest.mark.parametrize("name", PRESETS)
def test_preset_loads(name: str) -> None:
    env = name.removesuffix(".toml").replace("_", ":", 1)
    assert env in env_ids()
    config = Config.preset(env)
    assert config.env == env
    assert config != Config(env=env)
    assert Config.preset(f"{env}?option=1") == dataclasses.replace(config, env=f"{env}?option=1")
    assert config_io.loads(config_io.dumps(config)) == config


def test_presets() -> None:
    assert "gymnax_CartPole-v1.toml" in PRESETS
    assert Config.preset("gymnax:CartPole-v1").train.target_return == 475.0
    assert Config.preset("pgx:hex") == Config(env="pgx:hex")  # one without a preset


# TOML


def values(path: str) -> st.SearchStrategy[Any]:
    """Values of a field from its whole range."""
    meta, annotation = paths()[path].metadata, kind(path)
    options = typing.get_args(annotation) or (annotation,)
    if path == "env":
        return st.text()  # whether an environment exists is not the configuration's business
    if annotation is str:
        return st.sampled_from(meta["choices"])
    if int in options:
        some: st.SearchStrategy[Any] = st.integers(meta["low"], meta["high"])
    else:
        low = meta["low"] if meta["low"] is not None else meta["above"]
        some = st.floats(low, meta["high"], exclude_min=meta["low"] is None)
    return st.none() | some if type(None) in options else some


TIED = {
    "search.final_simulations",
    "train.batch_size",
    "train.reanalyze_fraction",
    "train.unroll_steps",
    "train.td_steps",
    "train.replay_ratio",
}
TIED |= {"replay.capacity", "replay.min_size", "runtime.num_envs", "runtime.num_devices", "runtime.learning_devices"}
TIED |= {"runtime.selfplay_workers", "runtime.role_threads", "allocation.cores"}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    free = sorted(set(paths()) - TIED)
    chosen = draw(st.lists(st.sampled_from(free), unique=True, max_size=12))
    changes = {path: draw(values(path)) for path in chosen}
    devices = draw(st.sampled_from([1, 2, 3, 8]))
    changes["runtime.num_devices"] = changes["runtime.learning_devices"] = devices
    changes["runtime.selfplay_workers"] = draw(st.integers(1, 20))
    changes["runtime.role_threads"] = draw(st.integers(0, 4))
    changes["allocation.cores"] = draw(st.none() | st.integers(4, 100))
    changes["search.split"] = draw(st.sampled_from([1, 2, 7]))
    changes["runtime.num_envs"] = changes["search.split"] * devices * draw(st.integers(1, 100))
    changes["train.batch_size"] = devices * draw(st.integers(1, 100))
    changes["train.reanalyze_fraction"] = draw(st.just(0.0) | st.floats(1.0 / changes["train.batch_size"], 1.0))
    simulations = changes.get("search.num_simulations", SearchConfig().num_simulations)
    changes["search.final_simulations"] = draw(st.none() | st.integers(simulations, 10_000))
    changes["train.unroll_steps"] = draw(st.integers(1, 10))
    changes["train.td_steps"] = draw(st.integers(1, 50))
    changes["train.replay_ratio"] = draw(st.floats(1e-3, 1e4))
    rows = changes["train.unroll_steps"] + changes["train.td_steps"] + 2
    columns = changes["runtime.selfplay_workers"] * changes["runtime.num_envs"]
    changes["replay.capacity"] = rows * columns + draw(st.integers(800, 10**9))
    changes["replay.min_size"] = draw(st.integers(1, changes["replay.capacity"]))
    return Config().replace(changes)


@settings(max_examples=150)
@given(configs())
def test_round_trips(config: Config) -> None:
    assert config_io.loads(config_io.dumps(config)) == config
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict(config.to_dict(keep_none=True)) == config
    assert Config().replace(plain(config.to_dict(keep_none=True))) == config
    for path, value in plain(config.to_dict()).items():
        assert config_io.parse_assignment(f"{path}={config_io._toml(value)}") == (path, value)
    assert hash(config_io.loads(config_io.dumps(config))) == hash(config)
    assert config_io.fingerprint(config_io.loads(config_io.dumps(config))) == config_io.fingerprint(config)


def test_absent_values_over_a_preset_stay_absent() -> None:
    config = Config.preset("gymnax:CartPole-v1").replace("train.target_return", None)
    assert config.train.target_return is None
    assert config_io.loads(config_io.dumps(config)) == config


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(config_io.dumps(Config(seed=7)))
    assert config_io.load(file) == Config(seed=7)
    file.write_text("[train]\nbatch_size = 0")
    with pytest.raises(ConfigError, match=r"train\.batch_size = 0"):
        config_io.load(file)


# Changes


def test_replace() -> None:
    config = Config()
    changed = config.replace("search.num_simulations", 32)
    assert changed.search == SearchConfig(num_simulations=32)
    assert config.search.num_simulations == 16
    assert changed.replace("search.num_simulations", 16) == config
    assert config.replace({}) == config
    with pytest.raises(ConfigError, match=r"nearest valid: search\.num_simulations"):
        config.replace("search.num_simulation", 32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]


def test_replace_checks_only_the_end() -> None:
    """Two changes that are valid together and not one after the other."""
    changes = {"replay.capacity": 1200, "replay.min_size": 500}
    with pytest.raises(ConfigError):
        Config().replace("replay.capacity", 1200)
    assert Config().replace(changes).replay.capacity == 1200


def test_merge() -> None:
    config = Config.preset("gymnax:CartPole-v1")
    merged = config.merge({"seed": 3, "train": {"batch_size": 128}, "search": {}})
    assert merged == config.replace({"seed": 3, "train.batch_size": 128})
    assert merged.train.target_return == 475.0  # its neighbours stay
    with pytest.raises(ConfigError, match="train = 5: must be a section"):
        config.merge({"train": 5})


def test_from_dict() -> None:
    assert Config.from_dict({}) == Config()
    with pytest.raises(ConfigError, match=r"search\.depth: .*nearest valid: "):
        Config.from_dict({"search": {"depth": 3}})
    with pytest.raises(ConfigError, match=r"serach: .*nearest valid: search$"):
        Config.from_dict({"serach": {}})


def test_equal_and_hashable() -> None:
    assert Config() == Config()
    assert len({Config(), Config(), Config(seed=1)}) == 2
    assert Config().replace("train.discount", 1) == Config().replace("train.discount", 1.0)


# Derived values and rules across fields


@pytest.mark.parametrize(
    ("ratio", "fraction"),
    [(4.0, Fraction(4)), (0.1, Fraction(1, 10)), (1 / 3, Fraction(1, 3)), (2.5, Fraction(5, 2)), (6e-4, Fraction(3, 5000))],
)
def test_replay_ratio(ratio: float, fraction: Fraction) -> None:
    assert Config().replace("train.replay_ratio", ratio).replay_ratio == fraction


@given(ratio=st.floats(2.56e-6, 1e4))
def test_a_replay_ratio_is_kept_in_numbers_that_fit(ratio: float) -> None:
    config = Config().replace("train.replay_ratio", ratio)
    assert float(config.replay_ratio) == pytest.approx(ratio, rel=1e-4)
    assert config.train.batch_size * config.replay_ratio.denominator < 2**31
    for runtime in (anakin, sebulba):
        updates = runtime.updates_at(config, 10**10) - runtime.updates_at(config, 10**9)
        assert updates == pytest.approx(9 * 10**9 * ratio / config.train.batch_size, rel=2e-4, abs=2)


def test_derived() -> None:
    config = Config().replace({"train.unroll_steps": 5, "train.td_steps": 10, "train.reanalyze_fraction": 0.5})
    assert config.sequence_length == 16
    assert config.reanalyzed == 128


@pytest.mark.parametrize(
    ("changes", "path", "nearest"),
    [
        ({"train.batch_size": 131_073}, "train.batch_size", 131_072),
        ({"replay.min_size": 131_073}, "replay.min_size", 131_072),
        ({"replay.capacity": 1087, "replay.min_size": 1}, "replay.capacity", 1088),
        ({"runtime.num_devices": 3}, "runtime.num_envs", 63),
        ({"runtime.num_devices": 3, "runtime.num_envs": 2}, "runtime.num_envs", 3),
        ({"runtime.num_devices": 2, "train.batch_size": 1}, "train.batch_size", 2),
        ({"runtime.kind": "sebulba", "runtime.learning_devices": 3}, "train.batch_size", 255),
        (
            {"runtime.kind": "sebulba", "runtime.selfplay_workers": 4, "replay.capacity": 4000, "replay.min_size": 64},
            "replay.capacity",
            4352,
        ),
        ({"runtime.kind": "sebulba", "runtime.role_threads": 3, "allocation.cores": 2}, "runtime.role_threads", 2),
        ({"train.replay_ratio": 1e-7}, "train.replay_ratio", "2.56e-06"),
        ({"search.final_simulations": 8}, "search.final_simulations", 16),
        ({"train.batch_size": 6, "train.reanalyze_fraction": 0.05}, "train.reanalyze_fraction", "0.166667"),
    ],
)
def test_rules_across_fields(changes: dict[str, Any], path: str, nearest: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().replace(changes)
    assert caught.value.path == path
    assert caught.value.nearest == nearest
    fixed = nearest if not isinstance(nearest, str) else float(nearest)
    assert get(Config().replace({"train.batch_size": 6, **changes, path: fixed}), path) == fixed  # the nearest is valid


# Assignments and fingerprints


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("search.num_simulations=16", 16),
        ("search.num_simulations = 1_6 ", 16),
        ("train.learning_rate=1e-3", 1e-3),
        ("train.learning_rate=inf", math.inf),
        ("env=pgx:tic_tac_toe", "pgx:tic_tac_toe"),
        ("env='pgx:tic_tac_toe'", "pgx:tic_tac_toe"),
        ("env=a=b", "a=b"),
        ("train.target_return=none", None),
        ("train.target_return=None", None),
        ("search.x=true", True),
        ("search.x=[1, 2]", [1, 2]),
        ("search.x=", ""),
        ("seed=1\nenv=3", "1\nenv=3"),
    ],
)
def test_parse_assignment(text: str, value: object) -> None:
    path, parsed = config_io.parse_assignment(text)
    assert path == text.partition("=")[0].strip()
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["", "=", "=3", " =3", "seed", "seed:3"])
def test_parse_assignment_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="must look like path=value"):
        config_io.parse_assignment(text)


def test_fingerprint() -> None:
    mark = config_io.fingerprint(Config())
    assert len(mark) == 12
    assert int(mark, 16) >= 0
    assert config_io.fingerprint(Config()) == mark
    different = {config_io.fingerprint(Config().replace(p, v)) for p, v in {"seed": 1, "train.discount": 0.98}.items()}
    assert len(different | {mark}) == 3
