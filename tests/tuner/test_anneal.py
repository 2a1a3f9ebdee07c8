"""The annealer against exhaustive answers, Boltzmann's law and a plain Metropolis rule."""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from predictor.compiler import NETWORK
from tuner import anneal

KEY = jax.random.key(0)
TRACES: list[tuple[int, ...]] = []  # shapes of the choices each time an energy is traced
jit_propose = jax.jit(anneal.propose)


def table_energy(choices: jax.Array, table: jax.Array) -> jax.Array:
    """Separable: the sum of ``table`` [n, D] at the choices."""
    TRACES.append(choices.shape)
    return jnp.sum(jnp.take_along_axis(table, choices, axis=0), axis=1)


def joint_energy(choices: jax.Array, table: jax.Array) -> jax.Array:
    """Not separable: any ``table`` of as many axes as there are dimensions."""
    return table[tuple(choices.T)]


def make_table(seed: int, size: int, dims: int) -> np.ndarray:
    """Random effects [size, dims]; those of the first dimension are a hundredth of the others'."""
    table = np.random.default_rng(seed).standard_normal((size, dims)).astype(np.float32)
    table[:, 0] *= 0.01
    return table


def make_rugged(seed: int) -> np.ndarray:
    """Energies of 15,625 configurations, hundreds of them local minima: six random terms of three dimensions each."""
    random = np.random.default_rng(seed)
    table = np.zeros((5,) * 6, np.float32)
    for dim in range(6):
        axes = [dim, *random.permutation([d for d in range(6) if d != dim])[:2]]
        table += random.standard_normal([5 if d in axes else 1 for d in range(6)]).astype(np.float32)
    return table


# Nearly every test calls one of these two programs: the sizes, like everything else they vary, are data.
TABLE = make_table(0, 10, 4)
separable = functools.partial(anneal.run, energy=table_energy, sizes=[10] * 4, chains=64, steps=50, args=(TABLE,))
rugged = functools.partial(anneal.run, energy=joint_energy, sizes=[5] * 6, chains=128, steps=200)


@pytest.mark.parametrize(("size", "dims"), [(10, 9), (1000, 3), (2, 30)])
def test_finds_the_optimum_of_a_billion_configurations(size: int, dims: int) -> None:
    for seed in range(10):
        table = make_table(seed, size, dims)
        result = anneal.run(jax.random.key(seed), table_energy, [size] * dims, args=(table,))
        np.testing.assert_array_equal(result.best, table.argmin(axis=0))
        assert float(result.energy) == pytest.approx(table.min(axis=0).sum(), rel=1e-5)


def test_finds_the_optimum_of_a_rugged_landscape() -> None:
    for seed in range(5):
        table = make_rugged(seed)
        result = rugged(jax.random.key(seed), args=(table,))
        assert float(result.energy) == table.min() == table[tuple(np.asarray(result.best))]


def test_same_key_same_answer() -> None:
    first, again, other = separable(KEY), separable(KEY), separable(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert np.any(np.asarray(first.trace.probability) != np.asarray(other.trace.probability))


def test_xla_is_told_what_it_is_to_know_and_the_answer_is_the_same() -> None:
    told = separable(KEY, compiler_options=NETWORK)
    np.testing.assert_array_equal(told.chain_best, separable(KEY).chain_best)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        separable(KEY, compiler_options={"xla_cpu_unheard_of": 1})


def test_second_call_compiles_nothing() -> None:
    separable(KEY)
    before = len(TRACES)
    assert before
    separable(jax.random.key(1), sizes=[10, 1, 3, 7], initial=[9, 0, 0, 6], args=(2 * TABLE,))
    separable(KEY, initial_temperature=3.0, final_temperature=1e-3, uniform=0.1, width=1.0, resample=0)
    separable(KEY, cooling=0.9)
    assert len(TRACES) == before


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0])
def test_chains_settle_on_boltzmann_probabilities(uniform: float) -> None:
    sizes, temperature = (2, 1, 4, 1, 3, 1), 4.0
    table = make_rugged(0)
    part = table[tuple(slice(size) for size in sizes)]
    counts = np.zeros(sizes)
    for key in jax.random.split(KEY, 32):
        # Cooling so near 1 that the temperature does not move.
        result = rugged(
            key, sizes=sizes, args=(table,), initial_temperature=temperature, cooling=1 - 1e-7, uniform=uniform, resample=0
        )
        np.add.at(counts, tuple(np.asarray(result.current).T), 1)
    assert float(result.temperature) == pytest.approx(temperature, rel=1e-4)
    expected = np.exp(-part / temperature) / np.exp(-part / temperature).sum() * counts.sum()
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-squared, 23 degrees of freedom: 1 in 1,000 is 49.7


def test_transition_probability_is_metropolis() -> None:
    values = [-1.0, 0.0, 0.3, 2.0, 1e30, math.inf]
    for old, new in itertools.product(values, values):
        expected = 1.0 if new <= old else math.exp(-(new - old) / 0.5)
        found = anneal.transition_probability(jnp.float32([old]), jnp.float32([new]), jnp.float32(0.5))
        assert float(found[0]) == pytest.approx(expected, rel=1e-5), (old, new)


@pytest.mark.parametrize("size", [2, 3, 4, 7, 10])
@pytest.mark.parametrize(("uniform", "width"), [(1.0, 0.1), (0.0, 0.1), (0.0, 0.6), (0.0, 5.0)])
def test_proposals_are_symmetric(size: int, uniform: float, width: float) -> None:
    half = np.random.default_rng(0).integers(0, 2**24, 4096)
    every = np.concatenate([half, 2**24 - 1 - half])  # a fraction and its mirror: a step down for every step up
    bits = jnp.asarray(np.stack([np.zeros_like(every), every << 8]).astype(np.uint32))
    counts = np.zeros((size, size), int)
    for value in range(size):
        current = jnp.full((every.size, 1), value, jnp.int32)
        moved = jit_propose(bits, current, np.int32([size]), np.int32([0]), np.uint32(1), uniform, width)
        counts[value] = np.bincount(np.asarray(moved)[:, 0], minlength=size)
    assert np.trace(counts) == 0
    np.testing.assert_allclose(counts, counts.T, atol=2 if uniform else 0)  # offsets share 2**24 fractions nearly evenly
    if uniform:
        np.testing.assert_allclose(counts[~np.eye(size, dtype=bool)], every.size / (size - 1), rtol=0.1)


def make_free(sizes: np.ndarray) -> tuple[np.ndarray, np.uint32]:
    """The dimensions with a choice, padded, and how many there are."""
    free = np.flatnonzero(sizes > 1).astype(np.int32)
    return np.pad(free, (0, sizes.size - free.size)), np.uint32(free.size)


@given(
    sizes=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 2**24)), min_size=4, max_size=4),
    seed=st.integers(0, 2**31),
    uniform=st.sampled_from([0.0, 0.5, 1.0]),
    width=st.floats(2**-20, 2**20, width=32),
)
@example(sizes=[1, 1, 1, 1], seed=0, uniform=0.5, width=0.1)
@example(sizes=[1, 2, 1, 2], seed=0, uniform=0.0, width=1e6)
@settings(max_examples=50)
def test_a_move_changes_one_dimension_and_stays_in_range(sizes: list[int], seed: int, uniform: float, width: float) -> None:
    random = np.random.default_rng(seed)
    grid = np.int32(sizes)
    current = random.integers(0, grid, (256, 4)).astype(np.int32)
    current[:100] = np.where(random.random((100, 4)) < 0.5, 0, grid - 1)  # ends and corners
    bits = random.integers(0, 2**32, (2, 256), dtype=np.uint32)
    bits[:, :2] = [[0, 2**32 - 1]] * 2
    moved = np.asarray(jit_propose(bits, current, grid, *make_free(grid), np.float32(uniform), np.float32(width)))
    assert ((moved >= 0) & (moved < grid)).all()
    np.testing.assert_array_equal((moved != current).sum(axis=1), 1 if grid.max() > 1 else 0)


def test_redraw_keeps_equals_and_drops_failures_of_odd_chains() -> None:
    redraw, rise, chain = jax.jit(anneal.redraw), np.float32(math.log(4.0)), np.arange(1000)
    for energy in (2.0, math.inf):
        np.testing.assert_array_equal(redraw(KEY, np.full(1000, energy, np.float32), rise), chain)
    energy = np.where(chain < 400, 0.0, np.where(chain < 500, 1.0, math.inf)).astype(np.float32)  # weights 1, 1/4 and 0
    index = np.asarray(redraw(KEY, energy, rise))
    np.testing.assert_array_equal(index[::2], chain[::2])
    assert (index[1::2] < 400).sum() == pytest.approx(500 * 400 / 425, abs=2)
    assert index[1::2].max() < 500


def test_redrawing_carries_good_states_to_odd_chains() -> None:
    # So cold that nothing bad is accepted: chains on their own end in local minima, many of them.
    call = functools.partial(rugged, KEY, args=(make_rugged(0),), initial_temperature=1e-6, cooling=0.99)
    together, apart = call(resample=20), call(resample=0)
    assert len(np.unique(together.current[1::2], axis=0)) == 1
    assert len(np.unique(apart.current[1::2], axis=0)) > 5
    assert float(together.current_energy[1]) == float(together.energy)
    np.testing.assert_array_equal(together.current[::2], apart.current[::2])


def test_geometric_cooling_to_the_final_temperature() -> None:
    result = separable(KEY, initial_temperature=2.0, cooling=0.9)
    np.testing.assert_allclose(result.trace.temperature, 2.0 * 0.9 ** np.arange(50), rtol=1e-5)
    assert float(result.temperature) == pytest.approx(2.0 * 0.9**50, rel=1e-5)
    result = separable(KEY, initial_temperature=2.0, final_temperature=0.02)
    np.testing.assert_allclose(result.trace.temperature, 2.0 * 0.01 ** (np.arange(50) / 50), rtol=1e-5)
    assert float(result.temperature) == pytest.approx(0.02, rel=1e-5)
    assert int(result.steps) == 50
    result = separable(KEY)
    assert float(result.temperature) == pytest.approx(1e-4 * float(result.trace.temperature[0]), rel=1e-5)


def test_stops_at_the_temperature_or_after_the_steps() -> None:
    cold = separable(KEY, initial_temperature=1.0, cooling=0.5, final_temperature=0.1)
    assert int(cold.steps) == 4  # 1, 0.5, 0.25, 0.125, and 0.0625 stops it
    assert float(cold.temperature) == pytest.approx(0.0625)
    for trace in cold.trace:
        np.testing.assert_array_equal(np.isnan(trace), np.arange(50) >= 4)
    assert int(separable(KEY, initial_temperature=1.0, cooling=0.5, final_temperature=1e-30).steps) == 50
    assert int(separable(KEY, initial_temperature=1.0, cooling=0.5).steps) == 50
    # The estimated temperature may turn out to be below the final one.
    below = separable(KEY, final_temperature=1e9)
    assert int(below.steps) == 0
    assert float(below.energy) == float(below.current_energy.min())


def test_no_steps_returns_the_start() -> None:
    result = separable(KEY, steps=0, initial=[1, 2, 3, 4])
    np.testing.assert_array_equal(result.current[::2], [[1, 2, 3, 4]] * 32)
    assert not np.any(np.all(np.asarray(result.current[1::2]) == [1, 2, 3, 4], axis=1))
    assert result.trace.best_energy.shape == (0,)
    assert (int(result.steps), float(result.accepted)) == (0, 0.0)


def test_result_is_consistent() -> None:
    result = separable(KEY)
    for choices, energy in ((result.current, result.current_energy), (result.chain_best, result.chain_best_energy)):
        np.testing.assert_allclose(table_energy(choices, jnp.asarray(TABLE)), energy, rtol=1e-5)
    np.testing.assert_array_equal(result.best, result.chain_best[int(jnp.argmin(result.chain_best_energy))])
    best = np.asarray(result.trace.best_energy)
    assert (np.diff(best) <= 0).all()
    assert best[-1] == float(result.energy) == float(result.chain_best_energy.min())
    probability = np.asarray(result.trace.probability)
    assert ((probability >= 0) & (probability <= 1)).all()
    assert probability[0] > probability[-1]
    assert float(result.accepted) == pytest.approx(probability.mean(), abs=0.05)


def test_units_of_energy_do_not_matter() -> None:
    seconds, other = separable(KEY), separable(KEY, args=(1024 * TABLE,))  # a power of two: exact
    np.testing.assert_array_equal(seconds.current, other.current)
    np.testing.assert_array_equal(1024 * seconds.trace.temperature, other.trace.temperature)


def test_one_chain_starts_at_the_initial_configuration_and_estimates_a_temperature() -> None:
    for initial in (None, [3, 0, 0, 2]):
        result = separable(KEY, chains=1, initial=initial)
        assert 0.5 < float(result.trace.temperature[0]) < 10
    stuck = separable(KEY, chains=1, initial=TABLE.argmin(axis=0), initial_temperature=1e-9)
    np.testing.assert_array_equal(stuck.current[0], TABLE.argmin(axis=0))
    assert float(stuck.accepted) == 0.0


def test_dimensions_without_a_choice_stay_put() -> None:
    table = make_rugged(0)
    result = rugged(KEY, sizes=[1, 5, 1, 1, 5, 1], args=(table,))
    assert float(result.energy) == table[0, :, 0, 0, :, 0].min()
    assert not np.asarray(result.current)[:, [0, 2, 3, 5]].any()
    only = rugged(KEY, sizes=[1] * 6, args=(table,))
    assert np.asarray(only.best).tolist() == [0] * 6
    assert float(only.energy) == table[(0,) * 6]


def test_failed_energies_are_never_accepted_over_finite_ones() -> None:
    random = np.random.default_rng(0)
    table = make_rugged(0)
    failed = random.random(table.shape) < 0.6
    table[failed] = random.choice([np.nan, np.inf, -np.inf], failed.sum())
    finite, broken = np.argwhere(~failed)[0], np.argwhere(failed)[0]
    result = rugged(KEY, initial=finite, args=(table,), resample=0)
    assert float(result.energy) == table[~failed].min()
    assert np.isfinite(np.asarray(result.current_energy)[::2]).all()
    assert np.isfinite(np.asarray(result.trace.temperature)).all()
    assert float(rugged(KEY, initial=broken, args=(table,)).energy) == table[~failed].min()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_all_energies_failed(value: float) -> None:
    result = rugged(KEY, args=(np.full((5,) * 6, value, np.float32),))
    assert float(result.energy) == math.inf
    assert ((np.asarray(result.best) >= 0) & (np.asarray(result.best) < 5)).all()
    assert int(result.steps) == 200


BAD: list[tuple[dict[str, Any], str]] = [
    ({"key": 0}, "key = 0: must be one typed key; nearest valid: jax.random.key(0)"),
    ({"key": jax.random.split(KEY, 2)}, "must be one typed key"),
    ({"energy": 3}, "energy = 3: must be a hashable function of choices"),
    ({"energy": lambda x: x.astype(jnp.float32)}, "energy = 'float32 [8, 2]': must return float32 [8] for choices int32 [8, 2]"),
    ({"energy": lambda x: x[:, 0]}, "energy = 'int32 [8]': must return float32 [8]"),
    ({"energy": lambda x: 1.0}, "energy = 'float': must return float32 [8]"),  # noqa: ARG005
    ({"sizes": []}, "sizes = []: must be a list of 1 to 65535 integers; nearest valid: [1]"),
    ({"sizes": [[2, 3]]}, "must be a list of"),
    ({"sizes": [2.5, 3]}, "must be a list of"),
    ({"sizes": [0, 2**24 + 1]}, "must be from 1 to 16777216 each; nearest valid: [1, 16777216]"),
    ({"chains": 0}, "chains = 0: must be at least 1; nearest valid: 1"),
    ({"chains": 2.0}, "chains = 2.0: must be an integer of at least 1"),
    ({"steps": -1}, "steps = -1: must be at least 0; nearest valid: 0"),
    ({"resample": -2}, "resample = -2: must be at least 0"),
    ({"initial": [0]}, "initial = [0]: must be a list of 2 integers, or one for each of 8 chains; nearest valid: [0, 0]"),
    ({"initial": [[0, 0]] * 7}, "must be a list of 2 integers, or one for each of 8 chains"),
    ({"initial": [[-2, 0]] * 8}, "must be from -1 to sizes - 1 each; nearest valid: [[-1, 0],"),
    ({"initial": [0.0, 1.0]}, "must be a list of 2 integers"),
    ({"initial": [-1, 7]}, "initial = [-1, 7]: must be from 0 to sizes - 1 each; nearest valid: [0, 2]"),
    ({"initial_temperature": 0.0}, "initial_temperature = 0.0: must be from 1e-30 to 1e+30; nearest valid: 1e-30"),
    ({"final_temperature": -1.0}, "final_temperature = -1.0: must be from 1e-30 to 1e+30; nearest valid: 1e-30"),
    ({"final_temperature": math.nan}, "final_temperature = nan"),
    ({"initial_temperature": 1.0, "final_temperature": 1.0}, "must be less than initial_temperature (1.0)"),
    ({"cooling": 1.0}, "cooling = 1.0: must be greater than 0 and less than 1; nearest valid: 0.99"),
    ({"cooling": 0.0}, "cooling = 0.0"),
    ({"uniform": 1.5}, "uniform = 1.5: must be from 0 to 1; nearest valid: 1.0"),
    ({"width": 0.0}, "width = 0.0: must be greater than 0 and finite; nearest valid: 0.25"),
    ({"heat": math.inf}, "heat = inf: must be greater than 0 and finite; nearest valid: 1.0"),
    ({"candidates": 0}, "candidates = 0: must be at least 1; nearest valid: 1"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments_are_named_in_one_line(change: dict[str, Any], message: str) -> None:
    good = {"key": KEY, "energy": lambda x: x[:, 0].astype(jnp.float32), "sizes": [2, 3], "chains": 8, "steps": 3}
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        anneal.run(**(good | change))
    assert "\n" not in str(caught.value)
