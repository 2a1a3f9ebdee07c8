"""What a tuning's measurements say beyond the predictor, against a Gaussian process written out in NumPy."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from predictor import Workload
from tuner.residual import evaluate, make_residual
from tuner.space import Space, knobs_up_to, make_space

AXES = {"runtime.num_envs": (8, 16, 64), "search.engine": ("mctx", "fused"), "precision.level": ("O0", "O1", "O2")}
NOISES = (0.02, 0.04, 0.08)


@pytest.fixture
def space(workload: Workload) -> Space:
    knobs = [dataclasses.replace(knob, choices=AXES[knob.path]) for knob in knobs_up_to("neutral", "anakin") if knob.path in AXES]
    return make_space(knobs, {knob.path: knob.choices[0] for knob in knobs}, workload, lambda *_: True, 4096, math.inf)


def everywhere(space: Space) -> np.ndarray:
    return np.array(list(itertools.product(*(range(n) for n in space.sizes))), np.int32)


def distance(space: Space, axis: int, one: int, other: int) -> float:
    if space.knobs[axis].scale == "name":
        return 2.0 * (one != other)
    first, last = math.log2(space.choices[axis][0]), math.log2(space.choices[axis][-1])
    return abs(math.log2(space.choices[axis][one]) - math.log2(space.choices[axis][other])) / (last - first)


def kernel(space: Space, constant: float, effect: float, point: float, ones: np.ndarray, others: np.ndarray) -> np.ndarray:
    found = np.zeros((len(ones), len(others)))
    for row, column in np.ndindex(found.shape):
        apart = [distance(space, axis, *pair) for axis, pair in enumerate(zip(ones[row], others[column], strict=True))]
        effects = sum(math.exp(-x) for x in apart)
        found[row, column] = constant**2 + effect**2 * effects + point**2 * math.exp(-sum(apart))
    return found


def test_it_is_a_gaussian_process_of_effects_and_points(space: Space) -> None:
    points, rng = everywhere(space), np.random.default_rng(0)
    chosen = rng.permutation(len(points))[:9]
    missed = rng.normal(0.2, 0.3, len(chosen))
    residual = make_residual(space, points[chosen].tolist(), missed.tolist())
    scales = [float(x) for x in (residual.constant, residual.effect, residual.point)]
    cross, own = (kernel(space, *scales, points, others) for others in (points[chosen], points))
    seen = kernel(space, *scales, points[chosen], points[chosen])
    mean, deviation = (np.asarray(x) for x in evaluate(residual, jnp.asarray(points)))
    errors = []
    for noise in NOISES:  # which of them was chosen is not told
        inverse = np.linalg.inv(seen + noise**2 * np.eye(len(chosen)))
        expected = cross @ inverse @ missed
        spread = np.sqrt(np.diag(own - cross @ inverse @ cross.T))
        errors.append(max(np.abs(mean - expected).max(), np.abs(deviation - spread).max()))
    assert min(errors) < 2e-3


def test_before_anything_was_measured_nothing_is_corrected(space: Space) -> None:
    mean, deviation = evaluate(make_residual(space, (), ()), jnp.asarray(everywhere(space)))
    np.testing.assert_array_equal(mean, 0.0)
    assert np.ptp(np.asarray(deviation)) == 0.0  # the same everywhere: curiosity prefers nothing


def test_the_effect_of_a_knob_holds_where_it_was_not_measured(space: Space) -> None:
    """One engine is twice as slow as predicted, which five points tell: so it is expected to be at the others."""
    axis = [knob.path for knob in space.knobs].index("search.engine")
    points = everywhere(space)
    measured = points[[0, 1, 10, 13, 16]]
    assert set(measured[:, axis]) == {0, 1}
    mean, _ = evaluate(make_residual(space, measured.tolist(), (math.log(2.0) * measured[:, axis]).tolist()), jnp.asarray(points))
    slow, fast = (np.asarray(mean)[points[:, axis] == choice] for choice in (1, 0))
    assert slow.min() > 0.5 * math.log(2.0) > fast.max()


def test_least_is_known_of_what_is_farthest_from_what_was_measured(space: Space) -> None:
    points = everywhere(space)
    measured = points[points[:, 0] == 0]
    _, deviation = evaluate(make_residual(space, measured.tolist(), [0.0] * len(measured)), jnp.asarray(points))
    near, far = (float(np.asarray(deviation)[points[:, 0] == choice].mean()) for choice in (1, 2))
    there = float(np.asarray(deviation)[points[:, 0] == 0].max())
    assert there < near < far
