"""Coefficients of the stages from measurements: near 1 where the counts are right."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import nnls

from predictor.analytic import STAGES
from predictor.overlap import effective_weights

# Counts of stages are to scale: on 45 runs of four environments on two CPU cores their coefficients came out near 1.
PRIOR = np.ones(len(STAGES), np.float32)  # before anything was measured
_ITERATIONS = 10


def fit_coefficients(
    stage_matrix: np.ndarray,
    seconds: np.ndarray,
    weights: np.ndarray | None = None,
    *,
    prior: np.ndarray = PRIOR,
    ridge: float = 0.3,
) -> np.ndarray:
    """Coefficients that make the stages come to what was measured: non-negative least squares of relative errors.

    An error is relative to the geometric mean of measured and predicted, so that half and double count the same (relative to
    the measured seconds alone, predicting nothing would cost no more than predicting double); the predicted half of that is
    of the iteration before, and so is how much of a stage overlaps with others. The prior is scaled to the median of the
    measurements first; ``ridge`` measurements' worth of weight then hold every coefficient near it, so that one measurement
    moves all of them and many determine each.

    Args:
      stage_matrix: [M, S] seconds, before coefficients.
      seconds: [M] measured, positive.
      weights: [M, B, S] of :func:`predictor.overlap.bound_weights`; None: stages add up.
      prior: [S] positive.

    Returns:
      float32 [S], none negative. The prior where nothing was measured.
    """
    if len(seconds) == 0:
        return np.asarray(prior, np.float32)
    matrix, measured = np.asarray(stage_matrix, np.float64), np.asarray(seconds, np.float64)

    def share(terms: np.ndarray) -> np.ndarray | float:
        """How much of each stage's seconds the whole has, where it stands: all of them, unless stages overlap."""
        return 1.0 if weights is None else effective_weights(terms, np.asarray(weights, np.float64))

    scaled = np.asarray(prior, np.float64)
    terms = matrix * scaled
    ratio = np.median(measured / np.sum(terms * share(terms), axis=1))
    scaled, terms = scaled * ratio, terms * ratio  # [M, S] by the scaled prior; what is solved for are factors near 1
    held = math.sqrt(ridge) * np.eye(len(scaled))
    factors = np.ones(len(scaled))
    for _ in range(_ITERATIONS):
        parts = terms * share(terms * factors)
        unit = np.sqrt(measured * (parts @ factors))
        rows, wanted = np.concatenate([parts / unit[:, None], held]), np.concatenate([measured / unit, np.diag(held)])
        factors, _ = nnls(rows, wanted)
    return (factors * scaled).astype(np.float32)
