"""The annealer on landscapes that are hard in known ways, and its moves one by one against the rule of Metropolis."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tuner import anneal
from tuner.anneal import Energy

SEEDS, NEEDED = 20, 19  # 95%
DIMS, SIZE = 8, 6


def deceptive(choices: jax.Array, target: jax.Array) -> jax.Array:
    """Traps (Deb and Goldberg, 1993) of pairs: every step away from the target's pair gains, but the pair itself wins."""
    away = jnp.abs(choices - target[None]).reshape(-1, DIMS // 2, 2).sum(axis=2)
    slope = -0.8 * away / jnp.max(jnp.maximum(target, SIZE - 1 - target).reshape(-1, 2).sum(axis=1))
    return jnp.sum(jnp.where(away == 0, -1.0, slope), axis=1)


def conditional(choices: jax.Array, target: jax.Array) -> jax.Array:
    """The first dimension says which half of the others exists; its best choice is the worst one while they are wrong."""
    off = (choices[:, 1:] != target[None, 1:]).astype(jnp.float32)
    ours, theirs = off[:, :3].sum(axis=1), off[:, 3:].sum(axis=1)
    return jnp.where(choices[:, 0] == target[0], 2.0 * ours, 1.0 + 0.5 * theirs)


def plateau(choices: jax.Array, target: jax.Array) -> jax.Array:
    """Stairs: only every third step towards the target is felt."""
    return jnp.ceil(jnp.sum(jnp.abs(choices - target[None]), axis=1) / 3.0)


@pytest.mark.parametrize("landscape", [deceptive, conditional, plateau])
@pytest.mark.parametrize("candidates", [1, 4])
def test_it_finds_the_optimum_in_nearly_every_seed(landscape: Energy, candidates: int) -> None:
    found = 0
    for seed in range(SEEDS):
        target = np.random.default_rng(seed).integers(0, SIZE, DIMS).astype(np.int32)
        steps = 500 // candidates  # as many evaluations
        result = anneal.run(jax.random.key(seed), landscape, [SIZE] * DIMS, steps=steps, args=(target,), candidates=candidates)
        optimum = float(landscape(jnp.asarray(target[None]), target)[0])
        assert float(result.energy) >= optimum - 1e-6  # nothing is below what it was made to have
        found += float(result.energy) <= optimum + 1e-6
    assert found >= NEEDED


def rise(choices: jax.Array, height: jax.Array) -> jax.Array:
    return choices[:, 0] * height


@pytest.mark.parametrize("candidates", [1, 3])
@pytest.mark.parametrize("height", [0.1, 0.7, 2.0])
def test_moves_are_accepted_as_often_as_metropolis_says(height: float, candidates: int) -> None:
    """One step of many chains from the lower of two states: each candidate is the upper one."""
    chains = 20_000
    result = anneal.run(
        jax.random.key(7),
        rise,
        [2],
        chains=chains,
        steps=1,
        initial=np.zeros((chains, 1), np.int32),
        args=(np.float32(height),),
        initial_temperature=1.0,
        resample=0,
        candidates=candidates,
    )
    expected = 1.0 - (1.0 - math.exp(-height)) ** candidates
    moved = float(np.asarray(result.current).sum())
    deviation = math.sqrt(chains * expected * (1.0 - expected))
    assert abs(moved - chains * expected) < 4.0 * deviation  # 1 in 16,000 by chance
    assert float(result.accepted) == pytest.approx(moved / chains)


def test_chains_go_on_from_where_others_stood() -> None:
    stood = np.random.default_rng(0).integers(0, SIZE, (64, DIMS)).astype(np.int32)
    stood[0] = -1  # anywhere
    result = anneal.run(
        jax.random.key(0), plateau, [SIZE] * DIMS, chains=64, steps=0, initial=stood, args=(np.zeros(DIMS, np.int32),)
    )
    np.testing.assert_array_equal(np.asarray(result.current)[1:], stood[1:])
    assert (np.asarray(result.current)[0] >= 0).all()


def test_less_heat_starts_colder() -> None:
    arguments = (jax.random.key(0), plateau, [SIZE] * DIMS)
    target = (np.zeros(DIMS, np.int32),)
    warm, cool = (anneal.run(*arguments, chains=64, steps=5, args=target, heat=heat).trace.temperature[0] for heat in (1.0, 0.25))
    assert float(cool) == pytest.approx(0.25 * float(warm))


def test_normal_steps_are_narrower_when_it_is_cold() -> None:
    """One long dimension, normal steps only: how far the chains went in a step, at two temperatures of the same run."""
    chains, size = 2000, 10_000
    start = np.full((chains, 1), size // 2, np.int32)
    key, options = jax.random.key(1), {"chains": chains, "initial": start, "uniform": 0.0, "width": 0.1, "resample": 0}

    def flat(choices: jax.Array) -> jax.Array:
        return 0.0 * choices[:, 0]

    def spread(steps: int) -> float:
        schedule = {"initial_temperature": 1.0, "cooling": 0.01}
        return float(np.std(np.asarray(anneal.run(key, flat, [size], steps=steps, **options, **schedule).current)))  # type: ignore[arg-type]

    first, second = spread(1), spread(2)
    assert first == pytest.approx(0.1 * size, rel=0.1)
    assert second**2 - first**2 == pytest.approx((0.1 * first) ** 2, abs=0.05 * first**2)
