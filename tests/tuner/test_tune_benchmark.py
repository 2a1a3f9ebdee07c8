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


def _sets(
    rng: np.random.Generator, speeds: np.ndarray, of_a_process: float, of_a_round: float, processes: int = 2, rounds: int = 24
) -> list[np.ndarray]:
    """Seconds of the rounds that ``processes`` of each share; processes are off by as much, bursts by as much."""
    return [
        np.exp(
            -np.log(speeds)
            + rng.normal(0.0, of_a_process, len(speeds))
            + rng.normal(0.0, of_a_round, (rounds // processes, len(speeds)))
        ).T
        for _ in range(processes)
    ]


def test_exact_rounds_give_exact_shares(bench: ModuleType) -> None:
    seconds = [[1.0] * 3, [0.8] * 3, [0.5] * 3]  # the start, what its tuning made of it, and the best known
    (row,) = bench.judge([seconds, seconds], [(0, 1)])
    assert row["ratio"] == pytest.approx(1.25)
    assert row["best_over_start"] == row["luckiest_over_start"] == pytest.approx(2.0)
    assert row["recovered"] == row["recovered_of_luckiest"] == pytest.approx(math.log(1.25) / math.log(2.0))
    assert row["best_env_steps_per_second"] == pytest.approx(2.0)
    assert row["recovered_error"] is None  # two sets do not tell
    (row,) = bench.judge([seconds] * 3, [(0, 1)])
    assert row["recovered"] == pytest.approx(math.log(1.25) / math.log(2.0))
    assert row["recovered_error"] == pytest.approx(0.0, abs=1e-12)


def test_where_nothing_is_faster_there_is_nothing_to_recover(bench: ModuleType) -> None:
    (row,) = bench.judge([[[1.0] * 3, [0.97] * 3]] * 2, [(0, 1)])
    assert row["recovered"] is None
    assert row["recovered_of_luckiest"] is None


def test_luck_is_not_taken_for_what_there_was_to_gain(bench: ModuleType) -> None:
    rng = np.random.default_rng(0)
    speeds = np.r_[1.0, np.full(7, 1.2)]  # all tunings found what is equally fast
    rows = [bench.judge(_sets(rng, speeds, 0.03, 0.1), [(0, 1)])[0] for _ in range(1000)]
    best, luckiest = (np.mean(np.log([row[name] for row in rows])) for name in ("best_over_start", "luckiest_over_start"))
    assert best == pytest.approx(math.log(1.2), abs=0.01)
    assert luckiest > math.log(1.2) + 0.03
    shares = [row["recovered"] for row in rows if row["recovered"] is not None]
    assert len(shares) > 990
    assert np.median(shares) == pytest.approx(1.0, abs=0.06)
    assert np.median([row["recovered_of_luckiest"] for row in rows]) < 0.9


def test_the_best_is_chosen_by_other_processes_than_judge_it(bench: ModuleType) -> None:
    sets = [[[1.0] * 2, [0.9] * 2, [seconds] * 2] for seconds in (0.5, 0.95, 0.95)]  # one process of the last was lucky
    (row,) = bench.judge(sets, [(0, 1)])
    gains = -np.log([0.9, 0.95, 0.95])  # the lucky process is judged by none that chose it: without it the second is the best
    assert math.log(row["best_over_start"]) == pytest.approx(gains.mean())


def test_many_processes_tell_more_than_many_rounds_of_two(bench: ModuleType) -> None:
    rng = np.random.default_rng(1)
    speeds = np.r_[1.0, 1.14, np.full(4, 1.2)]

    def shares(processes: int) -> tuple[np.ndarray, float]:
        rows = [bench.judge(_sets(rng, speeds, 0.04, 0.07, processes), [(0, 1)])[0] for _ in range(300)]
        rows = [row for row in rows if row["recovered"] is not None]
        assert len(rows) > 290
        told, errors = [row["recovered"] for row in rows], [row["recovered_error"] for row in rows]
        return np.array(told), np.nan if errors[0] is None else float(np.sqrt(np.mean(np.square(errors))))

    (by_two, _), (by_six, told) = shares(2), shares(6)
    assert by_six.std() < 0.75 * by_two.std()
    assert np.median(by_six) == pytest.approx(math.log(1.14) / math.log(1.2), abs=0.06)
    assert 0.7 < told / by_six.std() < 1.4  # the error that is told is the error that is made


def test_where_one_set_decides_that_there_is_something_to_gain_no_error_is_told(bench: ModuleType) -> None:
    sets = [[[1.0] * 2, [seconds] * 2] for seconds in (0.2, 0.9, 1.1)]  # without the first the start is the best there is
    (row,) = bench.judge(sets, [(0, 1)])
    assert row["recovered"] is not None
    assert row["recovered_error"] is None
