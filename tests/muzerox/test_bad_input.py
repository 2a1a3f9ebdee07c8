"""Bad input to the command: one line on stderr, exit code 2, nothing on stdout, nothing written."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from refusals import INSTALLED, call, check, run, snapshot

from muzerox import config_io
from muzerox.config import Config
from muzerox.errors import UserError
from muzerox.run_dir import RunDir

# A command line and the parts its one line on stderr must all have. {T} is the directory the test plays in.
Case = tuple[str, list[str]]

ENVIRONMENT: dict[str, Case] = {
    "name": ("--env gymnax:CartPol-v1", ["env = 'gymnax:CartPol-v1'", "no such environment", "valid: gymnax:CartPole-v1"]),
    "suite": ("--env gymnx:CartPole-v1", ["env = 'gymnx:CartPole-v1'", "unknown suite", "valid: gymnax:CartPole-v1"]),
    "no colon": ("--env CartPole-v1", ["env = 'CartPole-v1'", "must be suite:name", "valid: gymnax:CartPole-v1"]),
    "only a colon": ("--env :", ["env = ':'", "unknown suite", "valid: "]),
    "empty": ("--env ''", ["env = ''", "must be suite:name"]),
    "continuous": ("--env gymnax:Pendulum-v1", ["env = 'gymnax:Pendulum-v1'", "actions are continuous", "valid: gymnax:"]),
    "turns": ("--env pgx:backgammon", ["env = 'pgx:backgammon'", "several times in a row", "valid: pgx:"]),
    "a path": ("--env gymnax:../../etc/passwd", ["env = 'gymnax:../../etc/passwd'", "no such environment"]),
    "long": ("--env gymnax:" + "x" * 5000, ["env = 'gymnax:xxx", "no such environment"]),
    "by --set": ("--set env=pgx:tictactoe", ["env = 'pgx:tictactoe'", "no such environment", "valid: pgx:tic_tac_toe"]),
    "not text": ("--config {T}/env.toml", ["env = 3", "must be text"]),
}

KEY: dict[str, Case] = {
    "name": ("--set search.num_simulation=3", ["search.num_simulation:", "not a configuration key", "search.num_simulations"]),
    "no section": ("--set num_simulations=3", ["num_simulations:", "not a configuration key", "search.num_simulations"]),
    "section": ("--set serach=1", ["serach:", "is not a configuration key", "nearest valid: search"]),
    "a section": ("--set search=3", ["search:", "is a section, not a key", "nearest valid: search.algorithm"]),
    "too deep": ("--set search.x.y=3", ["search.x.y:", "is not a configuration key"]),
    "in TOML": ("--config {T}/key.toml", ["search.num_simulation:", "not a configuration key", "valid: search.num_simulations"]),
    "section in TOML": ("--config {T}/section.toml", ["serach:", "not a configuration key", "nearest valid: search"]),
    "top in TOML": ("--config {T}/top.toml", ["sede:", "is not a configuration key", "nearest valid: seed"]),
    "scalar section": ("--config {T}/scalar.toml", ["search = 3", "must be a section with keys such as algorithm"]),
    "no equals": ("--set search.num_simulations", ["--set = 'search.num_simulations'", "must look like path=value"]),
    "no path": ("--set =3", ["--set = '=3'", "must look like path=value"]),
}

VALUE: dict[str, Case] = {
    "text for int": ("--set search.num_simulations=many", ["search.num_simulations = 'many'", "must be a whole number"]),
    "float for int": ("--set search.num_simulations=7.6", ["search.num_simulations = 7.6", "whole number", "valid: 8"]),
    "bool for int": ("--set train.batch_size=true", ["train.batch_size = True", "must be a whole number"]),
    "list for text": ("--set search.algorithm=[1,2]", ["search.algorithm = [1, 2]", "must be text"]),
    "text for float": ("--set train.discount=high", ["train.discount = 'high'", "must be a number"]),
    "absent": ("--set train.discount=none", ["train.discount:", "must be a number"]),
    "two lines": ("--set 'seed=1\nenv=3'", ["seed = '1\\nenv=3'", "must be a whole number"]),
    "5000 digits": ("--set train.learning_rate=" + "9" * 5000, ["train.learning_rate = '999", "must be a number"]),
    "400 digits": ("--set train.learning_rate=" + "9" * 400, ["train.learning_rate = 999", "must be finite"]),
    "deep": ("--set seed=" + "[" * 5000, ["seed = '[[[", "must be a whole number"]),
    "date in TOML": ("--config {T}/date.toml", ["seed = datetime.date(1979, 5, 27)", "must be a whole number"]),
    "zero": ("--set runtime.num_envs=0", ["runtime.num_envs = 0", "must be at least 1", "nearest valid: 1"]),
    "negative": ("--set train.batch_size=-1", ["train.batch_size = -1", "must be at least 1", "nearest valid: 1"]),
    "zero steps": ("--set train.max_env_steps=0", ["train.max_env_steps = 0", "must be at least 1"]),
    "zero ratio": ("--set train.replay_ratio=0", ["train.replay_ratio = 0.0", "must be greater than 0"]),
    "tiny ratio": ("--set train.replay_ratio=1e-9", ["train.replay_ratio = 1e-09", "at least batch_size / 1e8", "2.56e-06"]),
    "too large": ("--set network.width=9000", ["network.width = 9000", "must be at most 8192", "nearest valid: 8192"]),
    "above 1": ("--set train.discount=1.1", ["train.discount = 1.1", "must be at most 1.0", "nearest valid: 1.0"]),
    "NaN": ("--set train.learning_rate=nan", ["train.learning_rate = nan", "must be finite"]),
    "infinity": ("--set train.target_return=inf", ["train.target_return = inf", "must be finite"]),
    "overflow": ("--set train.max_grad_norm=1e999", ["train.max_grad_norm = inf", "must be finite"]),
    "choice": ("--set search.algorithm=gumble", ["search.algorithm = 'gumble'", "one of gumbel, muzero", "valid: gumbel"]),
    "precision": ("--set precision.level=O3", ["precision.level = 'O3'", "auto, O0, O1, O1_float16, O2", "nearest valid: O"]),
    "runtime": ("--set runtime.kind=anakim", ["runtime.kind = 'anakim'", "nearest valid: anakin"]),
    "seed": ("--seed -1", ["seed = -1", "must be at least 0", "nearest valid: 0"]),
    "large seed": ("--seed 4294967296", ["seed = 4294967296", "must be at most 2147483647"]),
    "text seed": ("--seed x", ["--seed", "'x'", "invalid int value"]),
}

TREES = ["search.num_simulations = 10000", "2^31 edges or more"]
MANY_ROOTS = "--set runtime.num_envs=131072 --set replay.capacity=12000000"
TOGETHER: dict[str, Case] = {
    "memory": ("--set replay.capacity=2000000000", ["replay.capacity = 2000000000", "GiB, and there are", "nearest valid: "]),
    "fine ratio": (
        "--set train.replay_ratio=9999.123 --set train.batch_size=256 --set replay.capacity=1000000 "
        "--set runtime.num_envs=8191 --set replay.min_size=1",
        ["train.replay_ratio = 9999.123", "too fine a fraction", "nearest valid: 9999"],
    ),
    "trees": (
        f"{MANY_ROOTS} --set search.num_simulations=10000",
        [*TREES, "131072 roots of 2 actions", "nearest valid: 8190"],
    ),
    "trees under sebulba": (
        f"{MANY_ROOTS} --set search.final_simulations=10000 --set runtime.kind=sebulba",
        [*TREES, "131072 roots of 2 actions", "nearest valid: 8190"],
    ),
    "trees of evaluation": (
        "--env pgx:connect_four --set search.num_simulations=10000 --set train.eval_episodes=100000",
        [*TREES, "100000 roots of 7 actions", "nearest valid: 3066"],
    ),
    "batch": ("--set train.batch_size=200000", ["train.batch_size = 200000", "must not exceed replay.capacity", "valid: 131072"]),
    "min_size": ("--set replay.min_size=200000", ["replay.min_size = 200000", "not exceed replay.capacity", "valid: 131072"]),
    "capacity": (
        "--set replay.capacity=500 --set replay.min_size=100",
        ["replay.capacity = 500", "must hold a sequence of every environment", "= 2880", "nearest valid: 2880"],
    ),
    "devices": (
        "--set runtime.num_devices=2 --set runtime.num_envs=7",
        ["runtime.num_envs = 7", "multiple of runtime.num_devices (2)", "nearest valid: 6"],
    ),
    "batch on devices": (
        "--set runtime.num_devices=2 --set train.batch_size=9",
        ["train.batch_size = 9", "multiple of runtime.num_devices (2)", "nearest valid: 8"],
    ),
    "host environment on the device": (
        "--env gymnasium:CartPole-v1 --set runtime.kind=anakin",
        ["runtime.kind = 'anakin'", "runs on the host", "nearest valid: sebulba"],
    ),
    "too many devices": ("--set runtime.num_devices=64", ["runtime.num_devices = 64", "this machine has 2", "nearest valid: 2"]),
}

FILE: dict[str, Case] = {
    "corrupt": ("--config {T}/corrupt.toml", ["{T}/corrupt.toml:", "is not valid TOML", "end of document"]),
    "huge number": ("--config {T}/digits.toml", ["{T}/digits.toml:", "is not valid TOML"]),
    "directory": ("--config {T}/directory.toml", ["{T}/directory.toml:", "cannot be read: Is a directory"]),
    "missing": ("--config {T}/missing.toml", ["{T}/missing.toml:", "no such file"]),
    "not UTF-8": ("--config {T}/latin.toml", ["{T}/latin.toml:", "cannot be read", "utf-8"]),
    "under a file": ("--config {T}/file/a.toml", ["{T}/file/a.toml:", "cannot be read: Not a directory"]),
    "empty": ("--config ''", ["--config = ''", "must not be empty"]),
}

OUT: dict[str, Case] = {
    "a run": ("--out {T}/killed", ["--out = '{T}/killed'", "already holds a run", "--resume {T}/killed"]),
    "not empty": ("--out {T}/full", ["--out = '{T}/full'", "exists and is not an empty directory"]),
    "a file": ("--out {T}/file", ["--out = '{T}/file'", "exists and is not an empty directory"]),
    "under a file": ("--out {T}/file/run", ["--out = '{T}/file/run'", "cannot be written"]),
    "empty": ("--out ''", ["directory = ''", "must not be empty"]),
    "long": ("--out {T}/" + "x" * 300, ["--out = '{T}/xxx", "cannot be written: File name too long"]),
}

RESUME: dict[str, Case] = {
    "nothing": ("--resume {T}/nothing", ["{T}/nothing:", "no such directory"]),
    "not a run": ("--resume {T}/full", ["{T}/full:", "is not a run: it has no config.toml"]),
    "a file": ("--resume {T}/file", ["{T}/file", "Not a directory"]),
    "empty": ("--resume ''", ["directory = ''", "must not be empty"]),
    "with --env": ("--resume {T}/killed --env gymnax:CartPole-v1", ["--env = 'gymnax:CartPole-v1'", "cannot be given with"]),
    "with --out": ("--resume {T}/killed --out {T}/new", ["--out = '{T}/new'", "cannot be given with --resume"]),
    "with --seed": ("--resume {T}/killed --seed 0", ["--seed = 0", "cannot be given with --resume"]),
    "fixed key": (
        "--resume {T}/killed --set search.num_simulations=3",
        ["search.num_simulations:", "cannot change when a run is resumed", "train.max_env_steps, train.target_return"],
    ),
    "bad value": ("--resume {T}/killed --set train.max_env_steps=0", ["train.max_env_steps = 0", "must be at least 1"]),
    "long": ("--resume {T}/" + "x" * 300, ["{T}/xxx", "cannot be read: File name too long"]),
    "long, with a value": (f"--resume {{T}}/{'x' * 300} --set train.max_env_steps=9", ["{T}/xxx", "cannot be read: File name"]),
    "corrupt config": ("--resume {T}/broken", ["{T}/broken/config.toml:", "is not valid TOML"]),
    "corrupt result": ("--resume {T}/ended", ["{T}/ended/result.json:", "is not a JSON object"]),
}

EVALUATE: dict[str, Case] = {
    "no directory": ("evaluate", ["required", "DIR"]),
    "missing": ("evaluate {T}/nothing", ["{T}/nothing:", "no such directory"]),
    "a file": ("evaluate {T}/file", ["{T}/file:", "is not a run"]),
    "long": ("evaluate {T}/" + "x" * 300, ["{T}/xxx", "cannot be read: File name too long"]),
    "no checkpoint": ("evaluate {T}/killed", ["{T}/killed/checkpoints:", "holds no checkpoint"]),
    "no episodes": ("evaluate {T}/killed --episodes 0", ["--episodes = 0", "must be from 1", "nearest valid: 1"]),
    "text episodes": ("evaluate {T}/killed --episodes x", ["--episodes", "'x'", "invalid int value"]),
    "seed": ("evaluate {T}/killed --seed -1", ["--seed = -1", "must be from 0", "nearest valid: 0"]),
    "precision": ("evaluate {T}/killed --precision O9", ["precision.level = 'O9'", "auto, O0, O1", "nearest valid: O"]),
}

OPTION: dict[str, Case] = {
    "command": ("trian", ["command = 'trian'", "no such command", "nearest valid: train"]),
    "quoted command": ('"it\'s"', ['command = "it\'s"', "no such command"]),
    "no command": ("", ["required: command"]),
    "option": ("train --envv x", ["--envv", "no such option", "nearest valid: --env"]),
    "with a value": ("train --sede=3", ["--sede:", "no such option", "nearest valid: --seed"]),
    "abbreviated": ("info --key", ["--key", "no such option", "nearest valid: --keys"]),
    "argument": ("train pong", ["'pong'", "unexpected argument"]),
    "no value": ("train --seed", ["--seed", "expected one argument"]),
}

TRAIN = {"environment": ENVIRONMENT, "key": KEY, "value": VALUE, "together": TOGETHER, "file": FILE}
CASES = {
    **{f"{g}, {k}": (f"train --out {{T}}/new {v[0]}", v[1]) for g, group in TRAIN.items() for k, v in group.items()},
    **{f"out, {k}": (f"train {v[0]}", v[1]) for k, v in OUT.items()},
    **{f"resume, {k}": (f"train {v[0]}", v[1]) for k, v in RESUME.items()},
    **{f"evaluate, {k}": v for k, v in EVALUATE.items()},
    **{f"option, {k}": v for k, v in OPTION.items()},
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything the cases name, and the working directory."""
    for name, text in {
        "corrupt.toml": "seed = 1\nsearch = [\n",
        "digits.toml": "seed = " + "9" * 5000,
        "env.toml": "env = 3",
        "key.toml": "[search]\nnum_simulation = 3",
        "section.toml": "[serach]\nnum_simulations = 3",
        "top.toml": "sede = 3",
        "scalar.toml": "search = 3",
        "date.toml": "seed = 1979-05-27",
        "file": "text",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.toml").write_bytes("env = 'Spaß'".encode("latin-1"))
    for name in ("directory.toml", "full", "killed", "broken", "ended"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    for name in ("killed", "ended"):  # before the first checkpoint
        (tmp_path / name / "config.toml").write_text(config_io.dumps(Config()))
    (tmp_path / "ended" / "result.json").write_text("{")
    (tmp_path / "broken" / "config.toml").write_text("seed = [")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_written(name: str, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, needles = CASES[name]
    before = snapshot(world)
    check(*call(line, world, capsys), needles, world)
    assert snapshot(world) == before


SUBPROCESS = ("environment, name", "together, batch", "out, not empty", "option, command")


@pytest.mark.parametrize("name", SUBPROCESS)
def test_the_installed_command(name: str, world: Path) -> None:
    line, needles = CASES[name]
    before = snapshot(world)
    check(*run(world, INSTALLED, *shlex.split(line.replace("{T}", str(world)))), needles, world)
    assert snapshot(world) == before


WITHOUT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from muzerox.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("package", "env"), [("gymnax", "gymnax:CartPole-v1"), ("pgx", "pgx:tic_tac_toe")])
def test_missing_package(package: str, env: str, world: Path) -> None:
    before = snapshot(world)
    needles = [f"env = '{env}'", f"needs the package {package}", f"pip install {package}"]
    check(*run(world, sys.executable, "-c", WITHOUT, package, "train", "--env", env, "--out", "new"), needles, world)
    assert snapshot(world) == before


def test_the_other_suites_work_without_a_package(world: Path) -> None:
    code, out, err = run(world, sys.executable, "-c", WITHOUT, "pgx", "info", "--envs", "--json")
    assert code == 0, err
    assert "gymnax:CartPole-v1" in out
    assert "pgx:" not in out
    needles = ["env = 'CartPole-v1'", "must be suite:name", "nearest valid: gymnax:CartPole-v1"]
    check(*run(world, sys.executable, "-c", WITHOUT, "pgx", "train", "--env", "CartPole-v1"), needles, world)


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/self").exists(), reason="root on Linux")
def test_no_permission_even_for_root(world: Path, tiny_options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = shlex.join(["train", "--out", "/proc/muzerox/run", *tiny_options])
    check(*call(line, world, capsys), ["--out = '/proc/muzerox/run'", "cannot be written"], world)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_no_permission(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (world / "full").chmod(0o555)
    before = snapshot(world)
    check(*call("train --out {T}/full/run", world, capsys), ["--out = '{T}/full/run'", "cannot be written"], world)
    assert snapshot(world) == before


def test_what_a_kill_left_of_the_first_file_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / ".config.toml.1234").write_text("half of it")
    RunDir(tmp_path).check_new()
    (tmp_path / "notes").write_text("somebody's")
    with pytest.raises(UserError, match="not an empty directory"):
        RunDir(tmp_path).check_new()
