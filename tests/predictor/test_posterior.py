"""Gaussian linear functions in closed form, against the definitions."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.posterior import Block, Scales, choose_scales, condition, conformal_factor, leave_out, local_level


def problem(seed: int, rows: int = 12) -> tuple[tuple[Block, Block], np.ndarray, Scales]:
    rng = np.random.default_rng(seed)
    blocks = tuple(Block(rng.standard_normal((rows, width)), (0.1, 1.0), 1.0) for width in (3, 5))
    scales = Scales((0.7, 0.3), 0.2)
    weights = [scale * rng.standard_normal(block.design.shape[1]) for block, scale in zip(blocks, scales.blocks, strict=True)]
    target = sum(b.design @ w for b, w in zip(blocks, weights, strict=True)) + scales.noise * rng.standard_normal(rows)
    return blocks, target, scales


@pytest.mark.parametrize("rows", [0, 1, 12, 40])
def test_the_posterior_is_bayes_rule(rows: int) -> None:
    blocks, target, scales = problem(0, rows)
    found = condition(blocks, target, scales)
    prior = np.diag([0.7**2] * 3 + [0.3**2] * 5)
    design = np.concatenate([block.design for block in blocks], axis=1)
    gain = prior @ design.T @ np.linalg.inv(design @ prior @ design.T + 0.2**2 * np.eye(rows))
    np.testing.assert_allclose(found.mean, gain @ target, atol=1e-9)
    np.testing.assert_allclose(found.root @ found.root.T, prior - gain @ design @ prior, atol=1e-9)


def test_leaving_out_is_fitting_without() -> None:
    blocks, target, scales = problem(1)
    groups = ["a", "a", "b", "c", "c", "c", "d", "e", "f", "g", "h", "a"]
    errors, deviations = leave_out(blocks, target, scales, groups)
    design = np.concatenate([block.design for block in blocks], axis=1)
    for row, group in enumerate(groups):
        others = np.array([other != group for other in groups])
        without = condition([b._replace(design=b.design[others]) for b in blocks], target[others], scales)
        variance = np.sum((design[row] @ without.root) ** 2) + scales.noise**2
        assert errors[row] == pytest.approx(target[row] - design[row] @ without.mean, abs=1e-9)
        assert deviations[row] == pytest.approx(np.sqrt(variance), abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_block_that_explains_nothing_is_not_heard(seed: int) -> None:
    rng = np.random.default_rng(seed)
    useful, useless = rng.standard_normal((2, 60, 4))
    target = useful @ np.array([1.0, -1.0, 0.5, 2.0]) + 0.1 * rng.standard_normal(60)
    blocks = [Block(useful, (0.0, 0.3, 1.0), 1.0), Block(useless, (0.0, 0.3, 1.0), 1.0)]
    _, scales = choose_scales(blocks, (0.03, 0.1, 0.3), 0.1, target)
    assert scales == Scales((1.0, 0.0), 0.1)


def test_the_scales_chosen_one_by_one_are_the_most_probable_together() -> None:
    for seed in range(5):
        blocks, target, _ = problem(seed)
        evidence, scales = choose_scales(blocks, (0.1, 0.2), 0.1, target)
        fixed = [
            choose_scales([b._replace(scales=(s,)) for b, s in zip(blocks, pair, strict=True)], (noise,), 0.1, target)
            for pair in [(x, y) for x in (0.1, 1.0) for y in (0.1, 1.0)]
            for noise in (0.1, 0.2)
        ]
        assert (evidence, scales) == max(fixed, key=lambda found: found[0])


@pytest.mark.parametrize("count", [13, 30, 200])
def test_intervals_hold_nine_of_ten(count: int) -> None:
    """Scores of another scale than the model believes; the tails of a Student's t. Of 13 the last would hold 93 of a hundred."""
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(1000):
        seen, new = 2.5 * rng.standard_t(5, count), 2.5 * rng.standard_t(5, 50)
        inside.append(np.mean(np.abs(new) <= conformal_factor(seen, np.ones(count))))
    assert 0.89 <= np.mean(inside) <= 0.915


def test_of_too_few_scores_no_quantile_is_known() -> None:
    assert conformal_factor(np.zeros(0), np.zeros(0)) == pytest.approx(1.645)
    assert conformal_factor(np.array([0.1, 0.2]), np.ones(2)) == pytest.approx(1.645)
    assert conformal_factor(np.array([0.1, 4.0]), np.ones(2)) == 4.0
    assert conformal_factor(np.array([0.1, 1e9]), np.ones(2)) == 10.0


def test_the_level_is_the_posterior_of_a_random_walk() -> None:
    rng = np.random.default_rng(2)
    differences, deviations = 0.3 + 0.1 * rng.standard_normal(6), rng.uniform(0.1, 0.3, 6)
    found = local_level(differences, deviations, start=0.1, prior=0.5, drift=0.2)
    steps = np.tril(np.ones((6, 6)))
    covariance = 0.5**2 + 0.2**2 * steps @ steps.T
    gain = covariance[-1] @ np.linalg.inv(covariance + np.diag(deviations**2))
    assert found == pytest.approx(0.1 + gain @ (differences - 0.1))


def test_a_hiccup_moves_the_level_no_further_than_a_surprise() -> None:
    level = [local_level(np.array([0.0, 0.0, x]), np.full(3, 0.1), start=0.0, prior=1.0, drift=0.02) for x in (0.2, 3.0, 30.0)]
    assert 0.0 < level[0] < level[1] == level[2] < 0.2
