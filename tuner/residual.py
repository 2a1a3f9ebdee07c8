"""What a tuning's own measurements say beyond the predictor: a Gaussian process over the points of its grid.

The predictor is made for any work on any machine. Within one tuning most of a configuration stays as it is, and a dozen
measurements tell how much faster a knob's choice really is than predicted. What the predictor misses is taken for the sum of a
constant, of an effect of each knob by itself, and of what belongs to a point with all its neighbours: kernels that are added up
(Duvenaud, Nickisch and Rasmussen, 2011), with scales by the evidence. Its deviation tells where too little was measured.

D is the number of knobs, C of candidates, M of measured points, filled up to a power of two so that few programs are compiled.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tuner.space import Space, select

_CONSTANT = 0.5  # standard deviation of what all points have in common, in logarithms
_EFFECTS = (0.03, 0.06, 0.12, 0.25, 0.5)  # choices for the standard deviation of a knob's effect
_POINTS = (0.02, 0.05, 0.1, 0.2, 0.4)  # and of what belongs to a point
_NOISES = (0.02, 0.04, 0.08)  # and of measuring
_LIKELY = (0.12, 0.1, 0.04)  # of each, before anything was measured
_TOLERANCE = 1.0  # standard deviation of their logarithms
_APART = 2.0  # how far apart choices without an order are; the ends of an ordered knob are 1 apart


class Residual(NamedTuple):
    """Arrays that a compiled energy takes as an argument."""

    ordered: jax.Array  # [D] bool, whether a knob's choices have an order
    places: tuple[jax.Array, ...]  # by knob, [choices] float32: where each choice lies, the ends 1 apart
    measured: jax.Array  # [M, D] int32, points
    weights: jax.Array  # [M] float32; 0 of those that fill up
    root: jax.Array  # [M, M] float32, an inverse root of their covariance; 0 of those that fill up
    constant: jax.Array  # [] float32, standard deviations
    effect: jax.Array
    point: jax.Array


def capacity(count: int) -> int:
    """Rows of arrays for so many: a power of two of at least 16."""
    return int(2 ** math.ceil(math.log2(max(count, 16))))


def _geometry(space: Space) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """[D] whether a knob is ordered, and by knob where each of its choices lies, the ends being 1 apart."""
    places = []
    for knob, options in zip(space.knobs, space.choices, strict=True):
        logs = np.log2(np.asarray(options, np.float64)) if knob.scale == "log2" else np.linspace(0.0, 1.0, len(options))
        places.append(((logs - logs[0]) / (logs[-1] - logs[0])).astype(np.float32))
    return np.array([knob.scale == "log2" for knob in space.knobs]), tuple(places)


def _covariance(residual: Residual, points: jax.Array, others: jax.Array) -> jax.Array:
    """Of int32 [C, D] with int32 [M, D]: float32 [M, C].

    Exponentials are taken for each choice of a knob, and added up for candidates by a product: there are far fewer choices.
    """
    apart = []
    for knob, place in enumerate(residual.places):
        chosen, choice = others[:, knob][:, None], jnp.arange(place.shape[0], dtype=jnp.int32)[None, :]
        along = jnp.abs(place[None, :] - place[chosen])
        apart.append(jnp.where(residual.ordered[knob], along, _APART * (choice != chosen)))
    distance = jnp.concatenate(apart, axis=1)  # [M, choices]
    table = jnp.concatenate([jnp.exp(-distance), distance])
    effects, far = jnp.split(select(table, points, [place.shape[0] for place in residual.places]), 2)
    return residual.constant**2 + residual.effect**2 * effects + residual.point**2 * jnp.exp(-far)


_compiled_covariance = jax.jit(_covariance)


def evaluate(residual: Residual, points: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is to be added to predicted log seconds of int32 [C, D], and its standard deviation; float32 [C] each."""
    covariance = _covariance(residual, points, residual.measured)
    own = residual.constant**2 + residual.effect**2 * points.shape[1] + residual.point**2
    explained = jnp.sum(jnp.square(residual.root @ covariance), axis=0)
    return residual.weights @ covariance, jnp.sqrt(jnp.maximum(own - explained, 0.0))


def make_residual(space: Space, points: Sequence[Sequence[int]], missed: Sequence[float]) -> Residual:
    """From ``missed`` [M], measured less predicted log seconds of ``points`` [M, D]; of no points it corrects nothing."""
    count = len(points)
    size = capacity(count)
    measured = np.zeros((size, len(space.knobs)), np.int32)
    measured[:count] = np.asarray(points, np.int32).reshape(count, len(space.knobs))
    ordered, places = _geometry(space)
    nothing = np.zeros((size, size), np.float32)
    arrays = jax.tree.map(jnp.asarray, (ordered, places, measured, nothing[0], nothing))
    plain = Residual(*arrays, *map(jnp.float32, (0, 0, 0)))
    parts = [plain._replace(**{name: jnp.float32(1.0)}) for name in ("constant", "effect", "point")]
    constant, effects, together = (
        np.asarray(_compiled_covariance(part, part.measured, part.measured), np.float64)[:count, :count] for part in parts
    )
    target, best = np.asarray(missed, np.float64), -math.inf
    weights, root, chosen = np.zeros(count), np.zeros((count, count)), _LIKELY
    for scales in itertools.product(_EFFECTS, _POINTS, _NOISES):
        effect, point, noise = scales
        covariance = _CONSTANT**2 * constant + effect**2 * effects + point**2 * together + noise**2 * np.eye(count)
        lower = np.linalg.cholesky(covariance)
        inverse = np.linalg.solve(lower, np.eye(count))
        scaled = inverse @ target
        evidence = -0.5 * scaled @ scaled - np.sum(np.log(np.diag(lower)))
        evidence -= 0.5 * sum((math.log(x / likely) / _TOLERANCE) ** 2 for x, likely in zip(scales, _LIKELY, strict=True))
        if evidence > best:
            best, weights, root, chosen = evidence, inverse.T @ scaled, inverse, scales
    return plain._replace(
        weights=jnp.asarray(np.pad(weights, (0, size - count)), jnp.float32),
        root=jnp.asarray(np.pad(root, (0, size - count)), jnp.float32),
        constant=jnp.float32(_CONSTANT),
        effect=jnp.float32(chosen[0]),
        point=jnp.float32(chosen[1]),
    )
