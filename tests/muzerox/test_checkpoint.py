"""Saving and resuming: bit for bit, and without what killed saves leave behind."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_runs import TINY, assert_same, make_tiny_runtime

from muzerox import Config, resume, train
from muzerox.checkpoint import Checkpoints
from muzerox.errors import CheckpointError
from muzerox.run_dir import RunDir

SETTINGS = TINY | {"replay.capacity": 1024, "train.reanalyze_fraction": 0.25, "train.eval_period": 256}


def tiny_config(env: str = "gymnax:CartPole-v1") -> Config:
    return Config.preset(env).replace(SETTINGS)


@pytest.mark.parametrize("env", ["gymnax:CartPole-v1", "pgx:tic_tac_toe"])
@pytest.mark.parametrize("kind", ["prioritized", "uniform"])
def test_twice_n_is_n_save_load_n(tmp_path: Path, env: str, kind: str) -> None:
    config = tiny_config(env).replace("replay.kind", kind)
    runtime = make_tiny_runtime(config)
    straight, _ = runtime.run(runtime.init(jax.random.key(3)), 12)

    half, _ = runtime.run(runtime.init(jax.random.key(3)), 6)
    writer = Checkpoints(tmp_path / "checkpoints", writable=True)
    writer.save(12, half, half.learner.params)
    runtime.run(half, 1)  # donates the buffers that are being saved: the save must hold copies
    assert writer.finished(wait=True) == [12]
    writer.close()

    reader = Checkpoints(tmp_path / "checkpoints", writable=False)
    restored = reader.restore_state(jax.eval_shape(runtime.init, jax.random.key(0)))
    reader.close()
    resumed, report = runtime.run(restored, 6)
    assert report.updates == 24
    assert_same(straight, resumed)


def test_a_save_is_told_though_another_is_under_way(tmp_path: Path) -> None:
    """Else a run whose saves take as long as what is between them never says that it saved."""
    writer = Checkpoints(tmp_path / "checkpoints", writable=True)
    told: list[int] = []
    for step in range(1, 6):
        writer.save(step, {"x": np.zeros(2**20)}, {"x": np.zeros(1)})
        told += writer.finished()
        assert told in (list(range(1, step)), list(range(1, step + 1)))
    assert told + writer.finished(wait=True) == [1, 2, 3, 4, 5]
    writer.close()


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    config = tiny_config()
    whole = train(config.replace("train.max_env_steps", 1024), tmp_path / "whole", quiet=True)
    first = train(config, tmp_path / "parts", quiet=True)
    second = resume(tmp_path / "parts", changes={"train.max_env_steps": 1024}, quiet=True)
    assert first.env_steps < second.env_steps == whole.env_steps
    assert second.mean_return == whole.mean_return

    like = jax.eval_shape(make_tiny_runtime(config).init, jax.random.key(0))
    states = []
    for name in ("whole", "parts"):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", writable=False)
        states.append(checkpoints.restore_state(like))
        checkpoints.close()
    assert_same(*states)

    updates = [row["updates"] for row in RunDir(tmp_path / "parts").metrics() if row["kind"] == "train"]
    assert updates == sorted(set(updates)), "an update was logged twice"


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    config = tiny_config()
    RunDir(tmp_path / "run").create(config)
    leftover = tmp_path / "run" / "checkpoints" / "8.orbax-checkpoint-tmp-123"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("written")
    again = resume(tmp_path / "run", quiet=True)
    reference = train(config, tmp_path / "reference", quiet=True)
    assert again.finished
    assert (again.env_steps, again.mean_return) == (reference.env_steps, reference.mean_return)
    assert not list((tmp_path / "run" / "checkpoints").glob("*tmp*"))


def test_the_metrics_of_a_lost_stretch_are_written_again_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics_file.write_text('{"updates": 2}\n{"updates": 4}\n{"updates": 6}\n{"upda')
    assert [row["updates"] for row in run.metrics()] == [2, 4, 6]
    run.rewind_metrics(4)
    assert run.metrics_file.read_text() == '{"updates": 2}\n{"updates": 4}\n'


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that refuses larger files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def poll(checkpoints: Checkpoints) -> None:
    while checkpoints._manager.is_saving_in_progress():
        time.sleep(0.01)
    checkpoints.finished()


@pytest.mark.parametrize(
    "notice",
    [poll, lambda c: c.finished(wait=True), lambda c: c.save(2, *[{"x": np.zeros(1)}] * 2), lambda c: c.close()],
    ids=["finished", "wait", "save", "close"],
)
def test_a_save_that_fails_in_the_background_is_not_told_as_saved(notice: Callable[[Checkpoints], None], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, writable=True)
    params = {"x": np.random.default_rng(0).random(1 << 17)}
    with files_of_at_most(1 << 16):
        checkpoints.save(1, params, params)  # returns at once: the disk refuses later
        with pytest.raises(CheckpointError, match=f"^{tmp_path}: cannot be written: File too large$"):
            notice(checkpoints)
    checkpoints.close()  # which has nothing to add
    assert not (tmp_path / "1").exists()
