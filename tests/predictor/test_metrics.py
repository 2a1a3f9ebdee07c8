"""Figures by which predictions are judged, against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from predictor.metrics import (
    METRICS,
    coverage,
    detection,
    floor_of_means,
    groups,
    kendall_within,
    noise_floor,
    relative_errors,
    slowdown,
)

SECONDS = np.log([1.0, 2.0, 4.0, 8.0, 3.0, 6.0])
WORKLOAD = ["a", "a", "a", "a", "b", "b"]


def test_errors_are_relative_to_what_was_measured() -> None:
    predicted = np.log([1.1, 1.0, 4.0, 16.0, 3.0, 6.0])
    np.testing.assert_allclose(relative_errors(predicted, SECONDS), [0.1, 0.5, 0.0, 1.0, 0.0, 0.0], atol=1e-12)
    assert METRICS["mape"](predicted, SECONDS, WORKLOAD) == pytest.approx(1.6 / 6)
    assert METRICS["median_error"](predicted, SECONDS, WORKLOAD) == pytest.approx(0.05)


def test_order_counts_within_a_workload_only() -> None:
    assert kendall_within(SECONDS, SECONDS, WORKLOAD) == 1.0
    assert kendall_within(-SECONDS, SECONDS, WORKLOAD) == -1.0
    # Of b every prediction is a thousand times too large, which changes no order.
    shifted = SECONDS + np.where(np.array(WORKLOAD) == "b", np.log(1000.0), 0.0)
    assert kendall_within(shifted, SECONDS, WORKLOAD) == 1.0
    one_swap = SECONDS[[1, 0, 2, 3, 4, 5]]  # of six pairs of a; both of b are right
    assert kendall_within(one_swap, SECONDS, WORKLOAD) == pytest.approx((4 * (5 - 1) / 6 + 2 * 1.0) / 6)
    assert kendall_within(np.zeros(6), SECONDS, WORKLOAD) == 0.0
    assert math.isnan(kendall_within(SECONDS[:1], SECONDS[:1], ["a"]))


def test_choosing_by_predictions_costs_what_the_chosen_is_slower() -> None:
    assert slowdown(SECONDS, SECONDS, WORKLOAD, 1) == 1.0
    wrong = -SECONDS  # the slowest of each: 8 times and twice the best
    assert slowdown(wrong, SECONDS, WORKLOAD, 1) == pytest.approx(math.sqrt(8.0 * 2.0))
    assert slowdown(wrong, SECONDS, WORKLOAD, 2) == pytest.approx(math.sqrt(4.0 * 1.0))
    assert slowdown(wrong, SECONDS, WORKLOAD, 5) == 1.0


def test_intervals_failures_and_noise() -> None:
    assert coverage(SECONDS, SECONDS - 0.1, SECONDS + np.array([0.1, 0.1, 0.1, -0.05, 0.1, 0.1])) == pytest.approx(5 / 6)
    failed, foreseen = np.array([True, True, False, False]), np.array([True, False, True, False])
    assert detection(foreseen, failed) == (0.5, 0.5)
    assert detection(failed, failed) == (1.0, 1.0)
    assert math.isnan(detection(np.zeros(4, bool), failed).precision)
    assert noise_floor([[1.0, 1.25], [2.0, 1.0], [3.0]]) == pytest.approx((0.2 + 1.0) / 2)
    assert math.isnan(noise_floor([[1.0]]))
    assert floor_of_means([[1.0, 4.0], [9.0, 9.0, 1.0], [3.0]]) == pytest.approx((0.5 + 0.0) / 2)
    assert math.isnan(floor_of_means([[1.0]]))


def test_groups_keep_their_order() -> None:
    assert [rows.tolist() for rows in groups(["x", "y", "x", "z", "y"])] == [[0, 2], [1, 4], [3]]
