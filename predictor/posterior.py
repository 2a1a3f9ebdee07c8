"""Linear functions with Gaussian priors, in closed form: what is learnt from a handful of measurements, and how surely.

Coefficients come in blocks that share a prior scale; scales and noise are chosen by the evidence, the probability of what was
measured when the coefficients are integrated out (MacKay, 1992), so that a block which explains nothing is left near its prior.
Everything is NumPy in float64: there are tens to hundreds of measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

_WIDEST = 10.0  # of the factor on intervals
_FAR = 2.5  # standard deviations


class Block(NamedTuple):
    """Coefficients that share a scale."""

    design: np.ndarray  # [n, d], what a prior standard deviation of each adds to each measurement
    scales: tuple[float, ...]  # to choose from
    likely: float  # the scale expected before anything is measured: others cost, the more the further
    tolerance: float = 1.0  # of the logarithm of the scale


class Scales(NamedTuple):
    """What was chosen."""

    blocks: tuple[float, ...]
    noise: float


class Posterior(NamedTuple):
    """A Gaussian over the coefficients of all blocks together, and the noise of a measurement."""

    mean: np.ndarray  # [D], of the coefficients themselves
    root: np.ndarray  # [D, D]; the covariance is root @ root.T
    noise: float


def choose_scales(
    blocks: Sequence[Block], noises: Sequence[float], likely_noise: float, target: np.ndarray
) -> tuple[float, Scales]:
    """The scales and the noise that make ``target`` [n] most probable, their priors included, and how probable (a logarithm).

    One scale after the other is chosen among its choices while the others stand, until none changes: with four of them the
    maximum so found is nearly always that of all combinations, for a tenth of the work.
    """
    kernels = [block.design @ block.design.T for block in blocks]
    choices = [*(block.scales for block in blocks), tuple(noises)]
    likely = [*(block.likely for block in blocks), likely_noise]
    tolerances = [*(block.tolerance for block in blocks), 1.0]

    @functools.cache
    def evidence(picked: tuple[float, ...]) -> float:
        *scales, noise = picked
        covariance = noise**2 * np.eye(len(target))
        for scale, kernel in zip(scales, kernels, strict=True):
            covariance += scale**2 * kernel
        root = np.linalg.cholesky(covariance)
        scaled = np.linalg.solve(root, target)
        found = -0.5 * scaled @ scaled - np.sum(np.log(np.diag(root)))
        for scale, expected, tolerance in zip(picked, likely, tolerances, strict=True):
            if scale > 0.0:
                found -= 0.5 * (np.log(scale / expected) / tolerance) ** 2
        return float(found)

    picked = tuple(min(some, key=lambda scale: abs(scale - expected)) for some, expected in zip(choices, likely, strict=True))
    before = None
    while picked != before:
        before = picked
        for index, some in enumerate(choices):
            picked = max((_put(picked, index, scale) for scale in some), key=evidence)
    return evidence(picked), Scales(picked[:-1], picked[-1])


def _put(values: tuple[float, ...], index: int, value: float) -> tuple[float, ...]:
    return (*values[:index], value, *values[index + 1 :])


def condition(blocks: Sequence[Block], target: np.ndarray, scales: Scales) -> Posterior:
    """The posterior of all coefficients, given ``target`` [n]; the prior where n is 0."""
    prior = np.concatenate([np.full(block.design.shape[1], scale) for block, scale in zip(blocks, scales.blocks, strict=True)])
    design = np.concatenate([block.design for block in blocks], axis=1) * prior  # of coefficients with a prior of 1
    # The information of the measurements and of the prior; its Cholesky factor gives a root of its inverse.
    information = design.T @ design / scales.noise**2 + np.eye(len(prior))
    lower = np.linalg.cholesky(information)
    root = np.linalg.solve(lower, np.eye(len(prior))).T
    mean = root @ (root.T @ (design.T @ target)) / scales.noise**2
    return Posterior(prior * mean, prior[:, None] * root, scales.noise)


def leave_out(
    blocks: Sequence[Block], target: np.ndarray, scales: Scales, groups: Sequence[Hashable]
) -> tuple[np.ndarray, np.ndarray]:
    """Errors of each measurement, and their standard deviations, when those of its group are left out, [n] each.

    In closed form: leaving rows out of a Gaussian is inverting a block of its inverse (Rasmussen and Williams, 2006, 5.4.2).
    """
    covariance = scales.noise**2 * np.eye(len(target))
    for block, scale in zip(blocks, scales.blocks, strict=True):
        covariance = covariance + scale**2 * block.design @ block.design.T
    inverse = np.linalg.inv(covariance)
    weighted = inverse @ target
    errors, deviations = np.zeros(len(target)), np.zeros(len(target))
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    for rows in members.values():
        apart = np.linalg.inv(inverse[np.ix_(rows, rows)])
        errors[rows] = apart @ weighted[rows]
        deviations[rows] = np.sqrt(np.diag(apart))
    return errors, deviations


def conformal_factor(
    errors: np.ndarray,
    deviations: np.ndarray,
    groups: Sequence[Hashable] | None = None,
    coverage: float = 0.9,
    fallback: float = 1.645,
) -> float:
    """How many standard deviations an interval reaches to each side to hold ``coverage`` of what is measured next.

    The quantile of scores of held-out measurements, a little further for there being few (Vovk et al., 2005; normalised scores:
    Lei et al., 2018), and between two scores where it falls between them: the next one up would hold more than is asked, up to
    one in as many as there are. Those of a group are near or far together, and so weigh as much as one (by default each is its
    own). Of so few groups that no finite factor is sure, the largest score or ``fallback``, whichever is more.
    """
    scores = np.abs(errors) / deviations
    numbers = number(groups if groups is not None else range(len(scores)))
    count = len(set(numbers))
    rank = (count + 1) * coverage
    if rank > count:
        return float(min(max(fallback, *scores), _WIDEST)) if len(scores) else fallback
    order = np.argsort(scores)
    reached = np.cumsum(1.0 / np.bincount(numbers)[numbers][order])  # groups
    return float(min(np.interp(rank, reached, scores[order]), _WIDEST))


def number(groups: Iterable[Hashable]) -> np.ndarray:
    """[n] int, the number of each one's group, by when it first comes."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(group, len(numbers)) for group in groups], int)


def local_level(differences: np.ndarray, deviations: np.ndarray, *, start: float, prior: float, drift: float) -> float:
    """The level about which [n] differences, oldest first, lie now: a Kalman filter of a random walk seen through noise.

    Args:
      differences: [n].
      deviations: [n], how far each may be off.
      start: the level before the first.
      prior: standard deviation of that.
      drift: standard deviation of a step from one difference to the next.

    A difference further than ``_FAR`` standard deviations from where it was expected counts as one that far: a machine has
    hiccups (Martin and Masreliez, 1975).
    """
    level, variance = start, prior**2
    for difference, deviation in zip(differences, deviations, strict=True):
        variance += drift**2
        expected = variance + deviation**2
        surprise = np.clip((difference - level) / np.sqrt(expected), -_FAR, _FAR) * np.sqrt(expected)
        level += variance / expected * surprise
        variance *= deviation**2 / expected
    return float(level)
