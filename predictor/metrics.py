"""How good predictions are: errors, order within a workload, what choosing by them costs, and whether intervals hold.

Every figure is of held-out measurements; all arrays are NumPy's, logarithms are natural.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import kendalltau


def relative_errors(log_predicted: np.ndarray, log_measured: np.ndarray) -> np.ndarray:
    """|predicted - measured| / measured, [n] -> [n]."""
    return np.abs(np.expm1(np.asarray(log_predicted) - np.asarray(log_measured)))


def kendall_within(log_predicted: np.ndarray, log_measured: np.ndarray, workload: Sequence[Hashable]) -> float:
    """Kendall's tau of each workload's configurations, weighted by how many it has; NaN where none has two."""
    taus, weights = [], []
    for rows in groups(workload):
        if len(rows) > 1:
            taus.append(kendalltau(log_predicted[rows], log_measured[rows]).statistic)
            weights.append(len(rows))
    # Predictions that are all the same order nothing: a tau of 0.
    return float(np.average(np.nan_to_num(taus), weights=weights)) if taus else float("nan")


def slowdown(log_predicted: np.ndarray, log_measured: np.ndarray, workload: Sequence[Hashable], top: int) -> float:
    """The best measured of the ``top`` that are predicted to be fastest, over the best there is: geometric mean of workloads."""
    lost = []
    for rows in groups(workload):
        chosen = rows[np.argsort(log_predicted[rows], kind="stable")[:top]]
        lost.append(np.min(log_measured[chosen]) - np.min(log_measured[rows]))
    return float(np.exp(np.mean(lost)))


def coverage(log_measured: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """Share of measurements inside their intervals; all logarithms."""
    return float(np.mean((low <= log_measured) & (log_measured <= high)))


class Detection(NamedTuple):
    """How well failures are foreseen."""

    recall: float  # of those that failed, the share that was foreseen
    precision: float  # of those foreseen, the share that failed


def detection(foreseen: np.ndarray, failed: np.ndarray) -> Detection:
    """Of bools [n] each; NaN where nothing failed, or nothing was foreseen."""
    both = float(np.sum(foreseen & failed))
    return Detection(*(both / total if (total := float(np.sum(x))) else float("nan") for x in (failed, foreseen)))


def groups(labels: Sequence[Hashable]) -> list[np.ndarray]:
    """Row numbers of each label, in order of first appearance."""
    found: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        found.setdefault(label, []).append(row)
    return [np.array(rows) for rows in found.values()]


def noise_floor(repeated: Sequence[Sequence[float]]) -> float:
    """Mean relative error that repeating a measurement makes when the first is taken for a prediction of the second.

    Args:
      repeated: seconds of each configuration that was measured more than once.
    """
    errors = [abs(np.expm1(np.log(a) - np.log(b))) for values in repeated for a, b in itertools.pairwise(values)]
    return float(np.mean(errors)) if errors else float("nan")


def floor_of_means(repeated: Sequence[Sequence[float]]) -> float:
    """Mean relative error that is left to a perfect prediction when what it is held against is the mean of two measurements.

    The mean of two is off by half their sum of errors, which is distributed as half their difference; logarithms. ``repeated`` as
    for :func:`noise_floor`, of each the first two.
    """
    errors = [abs(np.expm1((np.log(values[0]) - np.log(values[1])) / 2.0)) for values in repeated if len(values) > 1]
    return float(np.mean(errors)) if errors else float("nan")


Metric = Callable[[np.ndarray, np.ndarray, Sequence[Hashable]], float]
METRICS: dict[str, Metric] = {
    "mape": lambda predicted, measured, _: float(np.mean(relative_errors(predicted, measured))),
    "median_error": lambda predicted, measured, _: float(np.median(relative_errors(predicted, measured))),
    "kendall_tau": kendall_within,
    "top1_slowdown": lambda predicted, measured, workload: slowdown(predicted, measured, workload, 1),
    "top5_slowdown": lambda predicted, measured, workload: slowdown(predicted, measured, workload, 5),
}
