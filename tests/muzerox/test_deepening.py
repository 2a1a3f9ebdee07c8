"""Searches that deepen in the course of training: when, to what, and with nothing lost on the way."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_runs import TINY, assert_same, make_tiny_runtime, saved_state

from muzerox import Agent, Config, TrainResult, resume, train, training
from muzerox.run_dir import RunDir
from muzerox.runtimes import deepenings_by_updates, resolve_kind

DEEPENING = TINY | {"replay.capacity": 8192, "train.eval_period": 100_000, "search.final_simulations": 8}


def assert_rows_are_as_deep(run: RunDir) -> None:
    """Each row of training is of one depth, that of its updates, and every depth is there."""
    stages = deepenings_by_updates(run.load_config())
    seen = [(row["updates"], row["num_simulations"]) for row in run.metrics() if row["kind"] == "train"]
    for updates, simulations in seen:
        assert simulations == [count for first, count in stages if first < updates][-1]
    assert [count for _, count in stages] == sorted({simulations for _, simulations in seen})


@pytest.mark.parametrize(
    ("simulations", "final", "expected"),
    [
        (16, None, ((0, 16),)),
        (16, 16, ((0, 16),)),
        (4, 32, ((0, 4), (250, 8), (500, 16), (750, 32))),
        (4, 10, ((0, 4), (334, 8), (667, 10))),  # shares are rounded up
        (1, 2, ((0, 1), (500, 2))),
    ],
)
def test_simulations_double_in_equal_shares(simulations: int, final: int | None, expected: tuple) -> None:
    changes = {"search.num_simulations": simulations, "search.final_simulations": final, "train.max_env_steps": 1000}
    config = Config().replace(changes)
    assert config.deepenings == expected
    last = expected[-1][1]
    assert config.searching(last).deepenings == ((0, last),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, TrainResult]:
    """A training in one program that deepens twice, uninterrupted."""
    run = RunDir(tmp_path_factory.mktemp("deepening") / "run")
    return run, train(Config.preset("gymnax:CartPole-v1").replace(DEEPENING), run.path, quiet=True)


def test_a_training_that_deepens_is_one_after_the_other_of_each_depth(whole: tuple[RunDir, TrainResult]) -> None:
    """To the bit: the same updates by runtimes made by hand, each with its simulations, from the state of the one before."""
    run, result = whole
    config = run.load_config()
    stages = deepenings_by_updates(config)
    assert [simulations for _, simulations in stages] == [2, 4, 8]
    state: Any = make_tiny_runtime(config).init(jax.random.key(config.seed))
    for (first, simulations), (end, _) in pairwise((*stages, (result.updates, 0))):
        state, report = make_tiny_runtime(config.searching(simulations)).run(state, 1, end - first)
        assert report.updates == end
    assert_same(state, saved_state(run, config))

    assert_rows_are_as_deep(run)


def test_stopped_between_two_depths_it_goes_on_as_if_it_had_not_been(
    whole: tuple[RunDir, TrainResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = Config.preset("gymnax:CartPole-v1").replace(DEEPENING), RunDir(tmp_path / "parts")

    @contextlib.contextmanager
    def stop_once_deeper(_: Callable[[], None]) -> Iterator[Callable[[], bool]]:
        yield lambda: any(row.get("num_simulations") == 4 for row in run.metrics())

    with monkeypatch.context() as patched:
        patched.setattr(training, "_stop_signals", stop_once_deeper)
        first = train(config, run.path, quiet=True)
    assert not first.finished
    second = resume(run.path, quiet=True)
    assert second.finished
    at_once, result = whole
    assert (second.updates, second.mean_return) == (result.updates, result.mean_return)
    assert_same(saved_state(at_once, config), saved_state(run, config))
    assert_rows_are_as_deep(run)


def test_stopped_while_it_deepens_it_makes_no_update_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while there is no runtime to tell of it: that before is closed, the next one not made."""
    made = []

    def make(*args: Any) -> Any:
        made.append(training_runtime(*args))
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return made[-1]

    training_runtime = training.make_runtime
    monkeypatch.setattr(training, "make_runtime", make)
    run = RunDir(tmp_path / "run")
    result = train(Config.preset("gymnasium:CartPole-v1").replace(DEEPENING), run.path, quiet=True)
    config = resolve_kind(run.load_config(), training.make_env("gymnasium:CartPole-v1"))
    assert not result.finished
    assert result.updates == deepenings_by_updates(config)[1][0] == int(saved_state(run, config).learner.updates)


def test_threads_deepen_too_and_lose_no_step(tmp_path: Path) -> None:
    config, run = Config.preset("gymnasium:CartPole-v1").replace(DEEPENING), RunDir(tmp_path / "run")
    result = train(config, run.path, quiet=True)
    rows = [row for row in run.metrics() if row["kind"] == "train"]
    depths = [row["num_simulations"] for row in rows]
    assert depths == sorted(depths)
    assert set(depths) == {2, 4, 8}
    assert [row["updates"] for row in rows] == sorted({row["updates"] for row in rows})
    state = saved_state(run, resolve_kind(run.load_config(), training.make_env(config.env)))
    assert state.env_steps >= 512
    assert state.env_steps == result.env_steps or state.env_steps > rows[-1]["env_steps"]
    assert int(state.learner.updates) == result.updates == rows[-1]["updates"]
    assert Agent.load(run.path).config.search.num_simulations == 8, "it acts as it did at the end"
