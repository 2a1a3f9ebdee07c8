"""How the benchmark of searchers plays them: on a recorded grid, within their budget, nothing measured twice."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BUDGET = 7
NAMES = (
    "ours",
    "ours, nothing pretrained",
    "ours, no graph network",
    "ours, not annealed",
    "ours, not curious",
    "random",
    "Optuna TPE",
    "Optuna TPE, knob by knob",
    "Optuna GP",
    "Optuna CMA-ES",
    "GP, expected improvement",
    "BoTorch",
    "XGBoost, as AutoTVM",
    "scipy dual_annealing",
)


@pytest.fixture(scope="module")
def bench(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("tuner")


@pytest.fixture(scope="module")
def grid(bench: ModuleType) -> Any:
    return bench.load(bench.DATA / "grids")[0]


def test_every_searcher_is_played_here(bench: ModuleType) -> None:
    assert tuple(bench.SEARCHERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_search_measures_as_many_as_it_may(bench: ModuleType, grid: Any, name: str) -> None:
    missing = [package for package in bench.NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    trials = bench.play(grid, name, 0, BUDGET)
    points = [trial.point for trial in trials]
    assert len(set(points)) == len(points) == BUDGET
    assert points[0] == bench.play(grid, "random", 0, 1)[0].point  # all from the same start
    assert all(trial.seconds == grid.seconds.get(trial.point, math.inf) for trial in trials)
    course = bench.course_of(grid, trials, BUDGET)
    assert np.all(np.diff(course.elapsed) > 0)
    assert np.all(np.diff(course.by_trial) <= 0)
    assert course.by_trial[-1] >= 1.0
    found = bench.judge(course)
    assert found["after_4"] == min(trial.seconds for trial in trials[:4]) / np.exp(grid.best)


def test_ours_is_the_same_for_the_same_seed(bench: ModuleType, grid: Any) -> None:
    first, again = ([trial.point for trial in bench.play(grid, "ours", 3, 4)] for _ in range(2))
    assert first == again
