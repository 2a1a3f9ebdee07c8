"""How the benchmark of tunings judges what they found: the luck of the fastest of many is not what there was to gain."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest


@pytest.fixture(scope="module")
def bench(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("tune")


def _halves(rng: np.random.Generator, speeds: np.ndarray, of_a_process: float, of_a_round: float) -> list[np.ndarray]:
    """Seconds of 12 rounds each, of processes that are off by as much, as bursts are."""
    return [
        np.exp(-np.log(speeds) + rng.normal(0.0, of_a_process, len(speeds)) + rng.normal(0.0, of_a_round, (12, len(speeds)))).T
        for _ in range(2)
    ]


def test_exact_rounds_give_exact_shares(bench: ModuleType) -> None:
    seconds = [[1.0] * 3, [0.8] * 3, [0.5] * 3]  # the start, what its tuning made of it, and the best known
    (row,) = bench.judge([seconds, seconds], [(0, 1)])
    assert row["ratio"] == pytest.approx(1.25)
    assert row["best_over_start"] == row["luckiest_over_start"] == pytest.approx(2.0)
    assert row["recovered"] == row["recovered_of_luckiest"] == pytest.approx(math.log(1.25) / math.log(2.0))
    assert row["best_env_steps_per_second"] == pytest.approx(2.0)


def test_where_nothing_is_faster_there_is_nothing_to_recover(bench: ModuleType) -> None:
    (row,) = bench.judge([[[1.0] * 3, [0.97] * 3]] * 2, [(0, 1)])
    assert row["recovered"] is None
    assert row["recovered_of_luckiest"] is None


def test_luck_is_not_taken_for_what_there_was_to_gain(bench: ModuleType) -> None:
    rng = np.random.default_rng(0)
    speeds = np.r_[1.0, np.full(7, 1.2)]  # all tunings found what is equally fast
    rows = [bench.judge(_halves(rng, speeds, 0.03, 0.1), [(0, 1)])[0] for _ in range(1000)]
    best, luckiest = (np.mean(np.log([row[name] for row in rows])) for name in ("best_over_start", "luckiest_over_start"))
    assert best == pytest.approx(math.log(1.2), abs=0.01)
    assert luckiest > math.log(1.2) + 0.03
    shares = [row["recovered"] for row in rows if row["recovered"] is not None]
    assert len(shares) > 990
    assert np.median(shares) == pytest.approx(1.0, abs=0.06)
    assert np.median([row["recovered_of_luckiest"] for row in rows]) < 0.9
