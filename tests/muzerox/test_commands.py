"""The command: what it prints, what it leaves, and how others add to it. Also the agent of a run."""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import muzerox
from muzerox import config_io, evaluate, training
from muzerox.cli import main, make_config
from muzerox.commands import make_parser
from muzerox.config import Config, paths
from muzerox.errors import UserError
from muzerox.evaluate import Evaluation, summarise
from muzerox.report import Reporter, print_table
from muzerox.run_dir import RunDir

INSTALLED = str(Path(sys.executable).parent / "muzerox")


def one_object(text: str) -> dict[str, Any]:
    """``text`` is exactly one JSON object on one line."""
    assert text.endswith("\n")
    assert text.count("\n") == 1
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [row for row in RunDir(run).metrics() if row["kind"] == "evaluation"]


@pytest.fixture
def copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "copy"))


# info and help


def test_info_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    capsys.readouterr()  # the first time on a machine says on stderr that it is being measured
    assert main(["info", "--json"]) == 0
    captured = capsys.readouterr()
    found = one_object(captured.out)
    assert captured.err == ""
    assert found["backend"] == "cpu"
    assert found["devices"].count("cpu") == 2
    assert {"muzerox", "jax", "flax", "mctx", "gymnax", "pgx"} <= set(found)


def test_info_json_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json", "--envs", "--keys"]) == 0
    found = one_object(capsys.readouterr().out)
    assert set(found["configuration keys"]) == set(paths())
    assert "gymnax:CartPole-v1" in found["environments"]["gymnax"].split()
    assert "pgx:tic_tac_toe" in found["environments"]["pgx"].split()
    assert "continuous" in found["environments not served"]["gymnax:Pendulum-v1"]


def test_info_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["info", "--keys"]) == 0
    out = capsys.readouterr().out
    for path in paths():
        assert path in out
    assert "simulations of a search" in out
    assert "one of gumbel, muzero" in out
    assert "gymnax:CartPole-v1: environment id" in out
    assert "0 (from 0 to 2,147,483,647): seed" in out
    assert "none (from 1 to 10,000): largest depth" in out


def test_info_envs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["info", "--envs"]) == 0
    out = capsys.readouterr().out
    assert "gymnax:CartPole-v1" in out
    assert "pgx:backgammon" in out
    assert "several times in a row" in out


@pytest.mark.parametrize("command", [[], ["train"], ["evaluate"], ["info"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"usage: {' '.join(['muzerox', *command])}" in captured.out
    for expected in {
        "": ["train", "evaluate", "info"],
        "train": ["--env", "--config", "--set", "--seed", "--out", "--json", "--resume"],
        "evaluate": ["DIR", "--episodes", "--seed", "--precision", "--json"],
        "info": ["--envs", "--keys", "--json"],
    }["".join(command)]:
        assert expected in captured.out


def test_help_says_what_a_resumed_run_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    words = capsys.readouterr().out.replace(",", "").split()
    assert {word for word in words if "." in word and word in paths()} == set(training.RESUMABLE)


@pytest.mark.parametrize("text", ['pip install "muzerox[ale]"', "runs/a[/b]", "[bold]:bug:"])
def test_what_is_printed_is_printed_as_it_is(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(text, {text: text})
    with Reporter(RunDir(tmp_path), Config(), quiet=False, start=0) as reporter:
        reporter.say(text)
    captured = capsys.readouterr()
    assert captured.out.count(text) == 3
    assert captured.err == f"{text}\n"


# train and evaluate


def test_train_json(tmp_path: Path, tiny_options: list[str]) -> None:
    """The installed command, from nothing to a result."""
    command = [INSTALLED, "train", "--out", "run", "--seed", "3", "--json", *tiny_options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    found = one_object(done.stdout)
    assert found["finished"] is True
    assert found["solved"] is False
    assert found["env_steps"] >= 600
    assert found["episodes"] == 2
    assert found["updates"] > 0
    assert 0.1 < found["peak_memory_gib"] < 4.0
    assert "Traceback" not in done.stderr
    assert "WARNING" not in done.stderr
    assert f"saved update {found['updates']}" in done.stderr
    assert "evaluation at" in done.stderr

    run = tmp_path / "run"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    for name in ("config.toml", "metrics.jsonl", "result.json", "return_curve.png"):
        assert (run / name).stat().st_size > 0
    assert json.loads((run / "result.json").read_text()) == found
    assert (run / "return_curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((run / "tensorboard").iterdir())
    assert str(found["updates"]) in {p.name for p in (run / "checkpoints").iterdir()}
    config = config_io.load(run / "config.toml")
    assert config.seed == 3
    assert config.precision.level == "O0"  # what auto means here is written down
    assert {row["kind"] for row in RunDir(run).metrics()} == {"train", "evaluation", "saved"}


@pytest.mark.parametrize("options", [["--set", "env=pgx:tic_tac_toe"], ["--env", "pgx:tic_tac_toe"]])
def test_any_way_of_naming_the_environment_takes_its_preset(options: list[str]) -> None:
    config = make_config(make_parser().parse_args(["train", *options]))
    assert config == Config.preset("pgx:tic_tac_toe")
    assert config.train.td_steps == 9


def test_an_evaluation_that_reaches_the_target_is_confirmed(
    tmp_path: Path, tiny_options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Evaluation] = []

    def watch(*args: Any) -> Evaluation:
        seen.append(summarise(*args))
        return seen[-1]

    monkeypatch.setattr(evaluate, "summarise", watch)
    options = [*tiny_options, "--set", "train.target_return=1", "--set", "train.eval_period=100", "--json"]
    assert main(["train", "--out", str(tmp_path / "run"), *options]) == 0
    found = one_object(capsys.readouterr().out)
    assert found["solved"] is True
    assert found["env_steps"] < 600
    (row,) = evaluations(tmp_path / "run")
    first, second = seen  # those that reached it, and as many fresh ones, which alone are told
    assert (first.episodes, second.episodes) == (found["episodes"], found["episodes"]) == (2, 2)
    assert row["mean_return"] == found["mean_return"] == second.mean_return >= 1.0
    assert (first.mean_return, first.mean_length) != (second.mean_return, second.mean_length)


def test_train_prints_a_table(tmp_path: Path, tiny_options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), *tiny_options]) == 0
    captured = capsys.readouterr()
    assert "muzerox train: " in captured.out
    for name in ("solved", "evaluation", "environment steps/s", "updates/s", "first update after", "peak memory", "return curve"):
        assert name in captured.out
    assert "evaluation at" not in captured.out  # progress goes to stderr


@pytest.mark.parametrize("env", ["gymnax:CartPole-v1", "gymnasium:CartPole-v1"])  # a runtime each
def test_rewards_beyond_what_the_network_represents_are_told_once(
    env: str, tmp_path: Path, tiny_options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, options = tmp_path / "run", ["--set", "network.reward_bound=0.5", "--set", "runtime.loop_count=1"]
    assert main(["train", "--env", env, "--out", str(run), *tiny_options, *options]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert "100% of reward targets lie beyond network.reward_bound = 0.5" in line
    rows = [row for row in RunDir(run).metrics() if row["kind"] == "train"]
    assert [(row["reward_clipped"], row["value_clipped"]) for row in rows] == [(1.0, 0.0)] * len(rows)


def test_evaluate_json(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", str(finished_run), "--episodes", "3", "--json"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found = one_object(captured.out)
    assert {"mean_return", "std_return", "episodes"} <= set(found)
    assert found["episodes"] == 3
    assert found["unfinished"] == 0
    assert 8 <= found["mean_return"] <= 500
    assert found["std_return"] >= 0
    assert main(command) == 0
    assert one_object(capsys.readouterr().out) == found  # the same seed plays the same episodes
    assert main([*command, "--precision", "O1"]) == 0
    assert one_object(capsys.readouterr().out)["episodes"] == 3


def test_evaluate_table(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(finished_run), "--episodes", "3"]) == 0
    out = capsys.readouterr().out
    assert "mean_return" in out
    assert "episodes" in out


def test_resume_a_finished_run(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    assert main(["train", "--resume", str(copy), "--json"]) == 0
    captured = capsys.readouterr()
    assert "has already finished" in captured.err
    assert captured.err.count("\n") == 1
    assert one_object(captured.out) == {**json.loads((copy / "result.json").read_text()), "out": str(copy)}
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_resume_goes_on_with_more_steps(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = json.loads((copy / "result.json").read_text())
    assert main(["train", "--resume", str(copy), "--set", "train.max_env_steps=1000", "--json"]) == 0
    captured = capsys.readouterr()
    found = one_object(captured.out)
    assert f"resumed at update {first['updates']}" in captured.err
    assert found["env_steps"] >= 1000 > first["env_steps"]
    assert found["updates"] > first["updates"]
    assert config_io.load(copy / "config.toml").train.max_env_steps == 1000
    assert json.loads((copy / "result.json").read_text()) == found
    assert [row["updates"] for row in evaluations(copy)] == [first["updates"], found["updates"]]
    updates = [row["updates"] for row in RunDir(copy).metrics() if row["kind"] == "train"]
    assert updates == sorted(set(updates))


def test_resume_of_a_run_killed_before_its_first_checkpoint(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Starts again from the configuration and reaches the same numbers."""
    first = json.loads((copy / "result.json").read_text())
    reached = evaluations(copy)[-1]["mean_return"]
    for name in ("result.json", "return_curve.png"):
        (copy / name).unlink()
    shutil.rmtree(copy / "checkpoints")
    assert main(["train", "--resume", str(copy), "--json"]) == 0
    found = one_object(capsys.readouterr().out)
    for name in ("env_steps", "updates", "mean_return", "std_return"):
        assert found[name] == first[name]
    assert [row["mean_return"] for row in evaluations(copy)] == [reached]


# From Python


def test_agent_acts(finished_run: Path) -> None:
    agent = muzerox.Agent.load(finished_run)
    one = agent.act(np.zeros(4, np.float32))
    assert type(one) is int
    assert one in (0, 1)
    batch = np.linspace(-0.2, 0.2, 20, dtype=np.float32).reshape(5, 4)
    actions = agent.act(batch)
    assert actions.shape == (5,)
    assert actions.dtype == np.int32
    assert agent.act(batch.tolist()).tolist() == actions.tolist()
    assert agent.act(np.zeros(4), legal=[False, True]) == 1
    assert agent.act(batch, legal=np.tile([True, False], (5, 1))).tolist() == [0] * 5


@pytest.mark.parametrize(
    ("observation", "legal", "path"),
    [
        (np.zeros(3), None, "observation"),
        (np.zeros((2, 3)), None, "observation"),
        (np.zeros((2, 2, 4)), None, "observation"),
        (np.zeros((0, 4)), None, "observation"),
        (0.0, None, "observation"),
        (np.zeros(4), [True], "legal"),
        (np.zeros((2, 4)), [True, True], "legal"),
        (np.zeros(4), [False, False], "legal"),
        (np.zeros((2, 4)), [[True, True], [False, False]], "legal"),
    ],
)
def test_agent_refuses(observation: Any, legal: Any, path: str, finished_run: Path) -> None:
    with pytest.raises(UserError, match=f"^{path}"):
        muzerox.Agent.load(finished_run).act(observation, legal)


def test_public_names_are_not_modules() -> None:
    modules = {module.name for module in pkgutil.walk_packages(muzerox.__path__)}
    assert {"training", "config", "cli"} <= modules
    for name in muzerox.__all__:
        assert name not in modules
        assert not isinstance(getattr(muzerox, name), types.ModuleType)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"muzerox.{name}")
        assert getattr(muzerox, name).__doc__
