"""Other configurations for a run: at a checkpoint, which keeps every bit of what is learnt, and while it runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_runs import TINY, assert_same, plain, saved_state

from muzerox import Config, live, resume, train
from muzerox.errors import ConfigError
from muzerox.live import LiveKnobs
from muzerox.report import Reporter
from muzerox.run_dir import RunDir

SETTINGS = TINY | {"replay.capacity": 8192, "train.eval_period": 100_000}
# What another phase may have; each key differs from the one before.
THREADS: dict[str, Any] = {
    "runtime.step_in": "process",
    "runtime.loop_count": 3,
    "runtime.cpu_actors": 2,
    "runtime.search_queue_size": 3,
    "runtime.batch_queue_size": 4,
    "runtime.role_threads": 1,
    "search.engine": "mctx",
    "search.split": 2,
    "allocation.cores": 1,
}
ONE_PROGRAM: dict[str, Any] = {"runtime.loop_count": 5, "search.engine": "mctx", "search.split": 4, "allocation.cores": 1}


def test_a_switch_at_a_checkpoint_keeps_every_bit(tmp_path: Path) -> None:
    """Parameters, optimiser, replay and counters are the same for a process with another configuration."""
    config, run = Config.preset("gymnasium:CartPole-v1").replace(SETTINGS), RunDir(tmp_path / "run")
    trained = train(config, run.path, quiet=True)
    config = run.load_config()
    before, after = (saved_state(run, chosen) for chosen in (config, config.replace(THREADS)))
    assert_same(before, after)
    assert int(after.learner.updates) == trained.updates > 10
    assert after.env_steps == before.env_steps >= 512


@pytest.mark.parametrize("changes", [{"runtime.role_threads": 1}, {"search.num_simulations": 2, "search.final_simulations": 4}])
def test_what_a_training_began_with_is_let_go(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where self-play's rows go into a copy of the first ring, on a client of its own or in another pipeline: it may be large."""
    rows = 2048  # of each environment: nothing else has so many
    config = Config.preset("gymnasium:CartPole-v1").replace({**SETTINGS, "replay.capacity": 16 * rows, **changes})
    held: list[int] = []
    told = Reporter.training

    def count(reporter: Reporter, *args: Any) -> None:
        rings = [x for x in jax.live_arrays() if rows in x.shape[:2] and not x.is_deleted() and x.devices() <= set(jax.devices())]
        held.append(len({x.unsafe_buffer_pointer() for x in rings if x.ndim > 2}))
        told(reporter, *args)

    monkeypatch.setattr(Reporter, "training", count)
    assert train(config, tmp_path / "run", quiet=True).finished
    of_one = 3  # observations, those that episodes were cut at, policies
    assert len(held) > 2
    assert max(held[1:]) <= (0 if "runtime.role_threads" in changes else of_one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "changes"), [("gymnasium:CartPole-v1", THREADS), ("gymnax:CartPole-v1", ONE_PROGRAM)], ids=["sebulba", "anakin"]
)
def test_a_switched_run_goes_on_from_what_it_had(env: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config, run = Config.preset(env).replace(SETTINGS), RunDir(tmp_path / "run")
    first = train(config, run.path, quiet=True)
    config = run.load_config()
    changed = config.replace(changes)
    before, after = saved_state(run, config), saved_state(run, changed)
    assert_same(before, after)
    second = resume(run.path, changes={**changes, "train.max_env_steps": 1024}, quiet=True)
    assert run.load_config() == changed.replace("train.max_env_steps", 1024)
    assert second.updates > first.updates
    later = saved_state(run, changed)
    assert later.env_steps >= 1024
    assert int(later.learner.updates) == second.updates
    if hasattr(after, "actors"):
        return
    # What was in the replay before the switch still is, but for the episodes that threads left unfinished.
    for worker, count in enumerate(np.asarray(before.replay.count)):
        columns = slice(8 * worker, 8 * worker + 8)
        for (name, x), (_, y) in zip(plain(before.replay.storage), plain(later.replay.storage), strict=True):
            kept = count - 1 if name == ".truncated" else count
            np.testing.assert_array_equal(x[:kept, columns], y[:kept, columns], err_msg=name)


def test_an_exact_knob_that_is_switched_leaves_the_whole_training_as_it_was(tmp_path: Path) -> None:
    config = Config.preset("gymnax:CartPole-v1").replace(SETTINGS)
    train(config.replace("train.max_env_steps", 1024), tmp_path / "whole", quiet=True)
    train(config, tmp_path / "parts", quiet=True)
    resume(tmp_path / "parts", changes={"train.max_env_steps": 1024, "runtime.loop_count": 7}, quiet=True)
    whole, parts = (saved_state(RunDir(tmp_path / name), config) for name in ("whole", "parts"))
    assert_same(whole, parts)


def test_a_training_takes_other_knobs_while_it_runs(tmp_path: Path) -> None:
    config, run = (
        Config.preset("gymnax:CartPole-v1").replace({**SETTINGS, "train.max_env_steps": 100_000}),
        RunDir(tmp_path / "run"),
    )

    def ask() -> None:
        while not run.metrics():
            time.sleep(0.01)
        live.ask(run, {"runtime.loop_count": 9})
        while run.live_file.exists():
            time.sleep(0.01)
        live.ask(run, {"train.batch_size": 32})  # which it cannot

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    result = train(config, run.path, quiet=True)
    asking.join(10)
    assert not asking.is_alive(), "the training ended before it was asked"
    assert result.finished
    assert run.load_config().runtime.loop_count == 9
    assert run.load_config().train.batch_size == 16
    assert not run.live_file.exists()


def test_cores_are_given_and_taken_while_it_runs(tmp_path: Path) -> None:
    config, run = Config.preset("gymnax:CartPole-v1").replace("runtime.kind", "anakin"), RunDir(tmp_path / "run")
    run.create(config)
    there = sorted(os.sched_getaffinity(0))
    if len(there) < 2:
        pytest.skip("one core")
    live.ask(run, {"allocation.cores": 1})
    knobs = LiveKnobs(run, config)
    assert knobs.poll() is None, "what an earlier process was asked for"
    done = threading.Event()
    beside = threading.Thread(target=done.wait)
    beside.start()
    try:
        live.ask(run, {"allocation.cores": 1})
        assert knobs.poll() == config.replace("allocation.cores", 1) == run.load_config()
        assert os.sched_getaffinity(0) == os.sched_getaffinity(beside.native_id or 0) == {there[0]}
        live.ask(run, {"allocation.cores": len(there) + 1})
        with pytest.raises(ConfigError, match="was started with fewer"):
            knobs.poll()
        live.ask(run, {"allocation.cores": len(there)})
        assert knobs.poll() is not None
        assert os.sched_getaffinity(0) == os.sched_getaffinity(beside.native_id or 0) == set(there)
    finally:
        done.set()
        beside.join()
        os.sched_setaffinity(0, there)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "must be an object"),
        ("{", "must be an object"),
        ("\udcff", "must be an object"),
        ('{"runtime.num_envs": 16}', "cannot change while this training runs"),
        ('{"runtime.loop_count": 0}', "must be at least 1"),
    ],
)
def test_what_cannot_be_taken_is_said_and_gone(text: str, said: str, tmp_path: Path) -> None:
    config, run = Config.preset("gymnax:CartPole-v1").replace("runtime.kind", "anakin"), RunDir(tmp_path / "run")
    run.create(config)
    knobs = LiveKnobs(run, config)
    run.live_file.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=said):
        knobs.poll()
    assert knobs.poll() is None
    assert run.load_config() == config


def test_a_request_that_cannot_be_read_is_told_of_once(tmp_path: Path) -> None:
    config, run = Config.preset("gymnax:CartPole-v1").replace("runtime.kind", "anakin"), RunDir(tmp_path / "run")
    run.create(config)
    run.live_file.mkdir()
    knobs = LiveKnobs(run, config)
    with pytest.raises(ConfigError, match=r"live\.json: cannot be taken: Is a directory"):
        knobs.poll()
    assert knobs.poll() is None


def test_knobs_that_cannot_be_kept_are_not_taken(tmp_path: Path) -> None:
    config, run = Config.preset("gymnax:CartPole-v1").replace("runtime.kind", "anakin"), RunDir(tmp_path / "run")
    run.create(config)
    knobs, there = LiveKnobs(run, config), os.sched_getaffinity(0)
    run.config_file.unlink()
    run.config_file.mkdir()
    live.ask(run, {"allocation.cores": 1})
    with pytest.raises(ConfigError, match=r"config\.toml: cannot be written: "):
        knobs.poll()
    assert os.sched_getaffinity(0) == there
    assert knobs.poll() is None
