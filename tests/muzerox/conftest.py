"""Tiny runs that have finished, made once and copied by whoever changes them."""

from __future__ import annotations

from pathlib import Path

import pytest

import muzerox

pytest.register_assert_rewrite("refusals")  # so that what a refusal lacks is shown

TINY = {
    "train.max_env_steps": 600,
    "replay.min_size": 64,
    "replay.capacity": 4096,
    "runtime.num_envs": 8,
    "runtime.loop_count": 2,
    "train.batch_size": 16,
    "train.eval_episodes": 2,
    "search.num_simulations": 2,
    "network.width": 8,
    "network.depth": 1,
    "train.unroll_steps": 1,
}


@pytest.fixture(scope="session")
def tiny_options() -> list[str]:
    """Command-line options of the tiny run."""
    return [part for path, value in TINY.items() for part in ("--set", f"{path}={value}")]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory. Do not write in it: copy it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    config = muzerox.Config.preset("gymnax:CartPole-v1").replace(TINY)
    result = muzerox.train(config, out=out, quiet=True)
    assert result.finished
    return out


@pytest.fixture(scope="session")
def finished_game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of a game for two. Do not write in it: copy it."""
    out = tmp_path_factory.mktemp("finished") / "game"
    config = muzerox.Config.preset("pgx:tic_tac_toe").replace(TINY)
    assert muzerox.train(config, out=out, quiet=True).finished
    return out
