"""Simulated annealing over discrete grids: many chains at once, one compiled program, any batched energy.

Simulated annealing is Kirkpatrick, Gelatt and Vecchi, Science 220 (1983), with geometric cooling: after every step the
temperature T becomes a*T. Many chains over a learned cost model follow AutoTVM (arXiv:1805.08166). As the temperature
falls every second chain is redrawn from all by their Boltzmann weights, so that it goes on from a good one: population
annealing (Hukushima and Iba, AIP Conference Proceedings 690, 2003). Redrawn chains find badly scaled dimensions, chains
on their own (``resample=0`` leaves no others) find their way over rugged ground, half of each do both: benchmarks/anneal.py.
Nothing here knows what a configuration means. C is the number of chains, D that of dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from predictor.compiler import OPTIMIZED

Energy = Callable[..., jax.Array]  # (int32 [C, D], *args) -> float32 [C]

_LARGEST_SIZE = 2**24  # choices are drawn from float32 fractions
_LARGEST_COUNT = 2**16  # dimensions are drawn from 16 bits
_TEMPERATURES = (1e-30, 1e30)  # what float32 holds, with room for the ratio below
_FINAL_RATIO = 1e-4  # final over initial temperature when neither it nor the cooling factor is given
_PROBES = 64  # at least so many uniform configurations stand behind an estimated initial temperature


class Trace(NamedTuple):
    """One entry a step, for plots; NaN after the last step made."""

    best_energy: jax.Array  # [steps] float32, the lowest seen so far
    temperature: jax.Array  # [steps] float32, the one the step was made at
    probability: jax.Array  # [steps] float32, transition probability of the proposed moves, mean over chains


class Result(NamedTuple):
    """Where the chains ended and the best they saw. Energies that were NaN or infinite read +inf."""

    best: jax.Array  # [D] int32, best configuration seen by any chain
    energy: jax.Array  # [] float32, its energy
    current: jax.Array  # [C, D] int32, where each chain stands
    current_energy: jax.Array  # [C] float32
    chain_best: jax.Array  # [C, D] int32, best configuration seen by each chain: candidates for a plan
    chain_best_energy: jax.Array  # [C] float32
    temperature: jax.Array  # [] float32, after the last step
    steps: jax.Array  # [] int32, steps made
    accepted: jax.Array  # [] float32, share of steps in which a chain moved, mean over chains
    trace: Trace


class _Loop(NamedTuple):
    step: jax.Array  # [] int32
    current: jax.Array  # [C, D] int32
    energy: jax.Array  # [C] float32
    best: jax.Array  # [C, D] int32, of each chain
    best_energy: jax.Array  # [C] float32
    temperature: jax.Array  # [] float32
    accepted: jax.Array  # [] float32, sum over steps of the share of chains that moved
    trace: Trace


def run(
    key: jax.Array,
    energy: Energy,
    sizes: Sequence[int] | np.ndarray,
    chains: int = 1024,
    steps: int = 500,
    initial: Sequence[int] | np.ndarray | None = None,
    *,
    args: tuple[Any, ...] = (),
    initial_temperature: float | None = None,
    final_temperature: float | None = None,
    cooling: float | None = None,
    uniform: float = 0.5,
    width: float = 0.25,
    resample: int = 20,
    candidates: int = 1,
    heat: float = 1.0,
    compiler_options: Mapping[str, Any] | None = None,
) -> Result:
    """The configuration of least ``energy`` that ``chains`` annealed chains find in ``steps`` moves each.

    ``sizes`` [D] are the numbers of choices; a configuration is int32 [D] with 0 <= x[d] < sizes[d]. ``energy(x, *args)``
    takes int32 [C, D] to float32 [C] and must be traceable. The program is compiled once, and kept, for each energy *object*,
    shapes, ``chains``, ``steps`` and ``candidates``: pass data that varies as arrays in ``args``, not in a fresh closure.
    ``compiler_options`` are what XLA is told of it beside what it is told of any annealing. Same arguments, same result, bit for
    bit.

    Chains 0, 2, 4, ... start at ``initial`` [D] and the rest anywhere; without it all start anywhere. ``initial`` [C, D] says
    where each starts, -1 anywhere: where the chains of an earlier run stood, for an energy that has changed a little. A move
    changes one dimension, to any other choice (with probability ``uniform``) or by a normal step of ``width`` times the
    dimension's size, narrower by the root of the temperature as that falls, and at least 1; both proposals are symmetric, so a
    move is accepted with probability min(1, exp(-(E' - E)/T)). An energy that is NaN or infinite is never accepted over a
    finite one, and never best if a finite one was seen.

    A chain draws ``candidates`` moves a step from where it stands; all are scored in one batch, and looked at in turn until one
    is accepted: moves made ahead in case those before are rejected, as nearly all are when it is cold (Witte, Chamberlain and
    Franklin, IEEE Transactions on Parallel and Distributed Systems 2, 1991).

    The temperature starts at ``initial_temperature`` (None: ``heat`` times the median less the minimum of uniform
    configurations' energies), is multiplied by ``cooling`` after each step, and the run stops at ``final_temperature`` or after
    ``steps``, whichever is first: after no step at all if it starts there. ``cooling=None`` takes the factor that ends at
    ``final_temperature`` (None: 1e-4 of the initial one) after ``steps``; with ``cooling`` alone only ``steps`` stops the run.
    Chains 1, 3, 5, ... are redrawn every ``resample`` steps (0: never); the even ones are the method as it was published.

    Raises ValueError, in one line, for an argument out of range and for an energy of another shape or dtype.
    """
    grid = _check_sizes(sizes)
    _check_key(key)
    if not (callable(energy) and isinstance(energy, Hashable)):
        raise _invalid("energy", energy, "must be a hashable function of choices [C, D]", None)
    chains = _check_integer("chains", chains, 1)
    steps = _check_integer("steps", steps, 0)
    resample = _check_integer("resample", resample, 0)
    candidates = _check_integer("candidates", candidates, 1)
    if not 0 <= uniform <= 1:
        raise _invalid("uniform", uniform, "must be from 0 to 1", 1.0 if uniform > 1 else 0.0)
    for name, value, usual in (("width", width, 0.25), ("heat", heat, 1.0)):
        if not 0 < value < math.inf:
            raise _invalid(name, value, "must be greater than 0 and finite", usual)
    for name, temperature in (("initial_temperature", initial_temperature), ("final_temperature", final_temperature)):
        if temperature is not None and not _TEMPERATURES[0] <= temperature <= _TEMPERATURES[1]:
            nearest = None if math.isnan(temperature) else min(max(temperature, _TEMPERATURES[0]), _TEMPERATURES[1])
            raise _invalid(name, temperature, "must be from {} to {}".format(*_TEMPERATURES), nearest)
    if initial_temperature is not None and final_temperature is not None and final_temperature >= initial_temperature:
        rule = f"must be less than initial_temperature ({initial_temperature})"
        raise _invalid("final_temperature", final_temperature, rule, initial_temperature * _FINAL_RATIO)
    if cooling is not None and not 0 < cooling < 1:
        raise _invalid("cooling", cooling, "must be greater than 0 and less than 1", 0.99)

    # Padded to [D], so that which dimensions have a choice is data and not a shape.
    free = np.flatnonzero(grid > 1)
    padded = np.zeros_like(grid)
    padded[: len(free)] = free
    # What was not given is data too: -1 and NaN.
    start = np.full((chains, grid.size), -1, np.int32)
    if initial is not None:
        given = _check_initial(initial, grid, chains)
        start[:: 2 if given.ndim == 1 else 1] = given
    options = [math.nan if x is None else x for x in (initial_temperature, final_temperature, cooling, uniform, width, heat)]
    return _program(tuple(sorted((compiler_options or {}).items())))(
        key,
        grid,
        padded,
        np.uint32(len(free)),
        start,
        np.array(options, np.float32),
        np.int32(resample),
        tuple(args),
        energy=energy,
        chains=chains,
        steps=steps,
        candidates=candidates,
    )


def propose(
    bits: jax.Array,
    current: jax.Array,
    sizes: jax.Array,
    free: jax.Array,
    num_free: jax.Array,
    uniform: jax.Array,
    width: jax.Array,
) -> jax.Array:
    """``current`` [C, D] int32 with one dimension of each chain changed, by random ``bits`` [2, C] uint32.

    The dimension is one of the first ``num_free`` of ``free`` [D] int32; if there is none nothing changes. Symmetric: the
    uniform move adds an offset modulo the size, and the normal step has one law for all choices and is reflected about the
    middle of the outer edges (-1 becomes 0, -2 becomes 1). Where that would lead back to the same choice, the move goes to
    the mirrored one instead, which differs because a step is shorter than the size.
    """
    dimension = free[((bits[0] >> 16) * num_free >> 16).astype(jnp.int32)]
    here = jnp.arange(current.shape[1])[None, :] == dimension[:, None]
    value = jnp.sum(jnp.where(here, current, 0), axis=1)
    size = sizes[dimension]
    fraction = _fraction(bits[1])

    offset = jnp.minimum((fraction * (size - 1).astype(jnp.float32)).astype(jnp.int32), size - 2) + 1
    other = jnp.where(value + offset >= size, value + offset - size, value + offset)

    # The middle of the fraction's cell: never -1 or 1, where the normal step would be infinite.
    normal = math.sqrt(2.0) * jax.lax.erf_inv(2.0 * fraction - (1.0 - 2.0**-24))
    step = jnp.round(jnp.abs(normal) * width * size.astype(jnp.float32))
    step = jnp.minimum(jnp.maximum(step, 1.0), (size - 1).astype(jnp.float32)).astype(jnp.int32)
    near = value + jnp.where(normal < 0, -step, step)
    near = jnp.where(near < 0, -1 - near, jnp.where(near >= size, 2 * size - 1 - near, near))
    near = jnp.where(near == value, size - 1 - value, near)

    is_uniform = (bits[0] & 0xFFFF).astype(jnp.float32) < uniform * 2.0**16
    return jnp.where(here, jnp.where(is_uniform, other, near)[:, None], current)


def transition_probability(energy: jax.Array, proposed: jax.Array, temperature: jax.Array) -> jax.Array:
    """Metropolis: min(1, exp(-(proposed - energy) / temperature)), [C] float32 each; +inf stands for a failed energy."""
    return jnp.where(proposed <= energy, 1.0, jnp.exp((energy - proposed) / temperature))


def redraw(key: jax.Array, energy: jax.Array, inverse_rise: jax.Array) -> jax.Array:
    """Which state each chain goes on from, [C] int32: even chains from their own.

    Odd ones are drawn systematically with weights exp(-inverse_rise * energy), ``energy`` [C] float32, where
    ``inverse_rise`` is 1/T after cooling less 1/T before. Equal energies leave every chain as it is.
    """
    chains = energy.shape[0]
    chain = jnp.arange(chains, dtype=jnp.int32)
    lowest = jnp.min(energy)
    weight = jnp.where(energy == lowest, 1.0, jnp.exp((lowest - energy) * inverse_rise))
    cumulative = jnp.cumsum(weight)
    point = (chain + jax.random.uniform(key)) / chains * cumulative[-1]
    drawn = jnp.minimum(jnp.searchsorted(cumulative, point, side="right"), chains - 1).astype(jnp.int32)
    return jnp.where(chain % 2 == 1, drawn, chain)


@cache
def _program(options: tuple[tuple[str, Any], ...]) -> Callable[..., Result]:
    static = ("energy", "chains", "steps", "candidates")
    return jax.jit(_anneal, static_argnames=static, compiler_options=OPTIMIZED | dict(options))


def _anneal(
    key: jax.Array,
    sizes: jax.Array,
    free: jax.Array,
    num_free: jax.Array,
    initial: jax.Array,
    options: jax.Array,
    resample: jax.Array,
    args: tuple[Any, ...],
    *,
    energy: Energy,
    chains: int,
    steps: int,
    candidates: int,
) -> Result:
    t_initial, t_final, cooling, uniform, width, heat = options
    key_start, key_move, key_redraw = jax.random.split(key, 3)

    def evaluate(choices: jax.Array) -> jax.Array:
        value = energy(choices, *args)
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape != choices.shape[:1] or dtype != jnp.float32:
            shown = type(value).__name__ if shape is None else f"{dtype} {list(shape)}"
            rule = f"must return float32 [{choices.shape[0]}] for choices int32 {list(choices.shape)}"
            raise _invalid("energy", shown, rule, None)
        return jnp.where(jnp.isfinite(value), value, jnp.inf)

    # The starts, and apart from them, for ``initial`` fills half, what the temperature is estimated from.
    shape = (1 - (-_PROBES // chains), chains, sizes.shape[0])
    batches = _fraction(jax.random.bits(key_start, shape, jnp.uint32)) * sizes.astype(jnp.float32)[None, None, :]
    batches = jnp.minimum(batches.astype(jnp.int32), sizes[None, None, :] - 1)
    batches = batches.at[0].set(jnp.where(initial >= 0, initial, batches[0]))
    energies = jax.lax.map(evaluate, batches)
    t_initial = jnp.where(jnp.isnan(t_initial), jnp.clip(heat * _spread(energies[1:]), *_TEMPERATURES), t_initial)
    t_final = jnp.where(jnp.isnan(t_final), jnp.where(jnp.isnan(cooling), t_initial * _FINAL_RATIO, 0.0), t_final)
    log_cooling = jnp.where(jnp.isnan(cooling), jnp.log(t_final / t_initial) / max(steps, 1), jnp.log(cooling))

    def pick(candidate: jax.Array, *proposed: jax.Array) -> list[jax.Array]:
        """Of each of [K*C, ...] what the chains' candidates [C] are."""
        if candidates == 1:  # nothing is gathered
            return list(proposed)
        return [x[candidate * chains + jnp.arange(chains)] for x in proposed]

    def proceed(loop: _Loop) -> jax.Array:
        return (loop.step < steps) & (loop.temperature > t_final)

    def move(loop: _Loop) -> _Loop:
        # One draw a step: random bits are most of what a step costs, the energy apart.
        bits = jax.random.bits(jax.random.fold_in(key_move, loop.step), (3, candidates * chains), jnp.uint32)
        narrower = width * jnp.sqrt(loop.temperature / t_initial)
        standing = jnp.tile(loop.current, (candidates, 1))
        proposed = propose(bits[:2], standing, sizes, free, num_free, uniform, narrower)
        proposed_energy = evaluate(proposed)
        probability = transition_probability(jnp.tile(loop.energy, candidates), proposed_energy, loop.temperature)
        accept = (_fraction(bits[2]) < probability).reshape(candidates, chains)
        moved = jnp.any(accept, axis=0)
        taken, taken_energy = pick(jnp.argmax(accept, axis=0), proposed, proposed_energy)  # the first that was accepted
        current = jnp.where(moved[:, None], taken, loop.current)
        current_energy = jnp.where(moved, taken_energy, loop.energy)
        lowest = jnp.argmin(proposed_energy.reshape(candidates, chains), axis=0)
        lowest, lowest_energy = pick(lowest, proposed, proposed_energy)
        # Not of the current state, which a redraw may have brought from another chain with a better record.
        better = lowest_energy < loop.best_energy
        best_energy = jnp.where(better, lowest_energy, loop.best_energy)

        step = loop.step + 1
        temperature = t_initial * jnp.exp(step * log_cooling)  # a*T, without the rounding of a running product
        rise = (1.0 - jnp.exp(resample * log_cooling)) / temperature  # of 1/T since the last redraw
        current, current_energy = jax.lax.cond(
            (resample > 0) & (step % jnp.maximum(resample, 1) == 0),
            lambda key, *state: jax.tree.map(lambda x: x[redraw(key, state[1], rise)], state),
            lambda _, *state: state,
            *(jax.random.fold_in(key_redraw, loop.step), current, current_energy),
        )
        row = Trace(jnp.min(best_energy), loop.temperature, jnp.mean(probability))
        return _Loop(
            step=step,
            current=current,
            energy=current_energy,
            best=jnp.where(better[:, None], lowest, loop.best),
            best_energy=best_energy,
            temperature=temperature,
            accepted=loop.accepted + jnp.mean(moved.astype(jnp.float32)),
            trace=jax.tree.map(lambda all_rows, new: all_rows.at[loop.step].set(new), loop.trace, row),
        )

    start, start_energy, never = batches[0], energies[0], jnp.full(steps, jnp.nan, jnp.float32)
    zero = jnp.float32(0.0)
    loop = _Loop(jnp.int32(0), start, start_energy, start, start_energy, t_initial, zero, Trace(never, never, never))
    end = jax.lax.while_loop(proceed, move, loop) if steps else loop
    winner = jnp.argmin(end.best_energy)
    return Result(
        best=end.best[winner],
        energy=end.best_energy[winner],
        current=end.current,
        current_energy=end.energy,
        chain_best=end.best,
        chain_best_energy=end.best_energy,
        temperature=end.temperature,
        steps=end.step,
        accepted=end.accepted / jnp.maximum(end.step, 1),
        trace=end.trace,
    )


def _spread(energies: jax.Array) -> jax.Array:
    """A temperature at which most moves are accepted: median less minimum of the finite energies, always positive.

    Unlike a standard deviation it does not grow with a few terrible configurations.
    """
    finite = jnp.where(jnp.isfinite(energies), energies, jnp.nan)
    lowest = jnp.nanmin(finite)
    spread = jnp.nanmedian(finite) - lowest
    spread = jnp.where(spread > 0, spread, jnp.nanmax(finite) - lowest)  # most are equally good
    spread = jnp.where((spread > 0) & jnp.isfinite(spread), spread, 1.0)
    return jnp.clip(spread, *_TEMPERATURES).astype(jnp.float32)


def _fraction(bits: jax.Array) -> jax.Array:
    """Multiples of 2**-24 in [0, 1), float32, from uint32."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _invalid(name: str, value: object, rule: str, nearest: object) -> ValueError:
    shown = " ".join(repr(value).split())
    shown = shown if len(shown) <= 200 else f"{shown[:100]}...{shown[-100:]}"
    return ValueError(f"{name} = {shown}: {rule}" + ("" if nearest is None else f"; nearest valid: {nearest}"))


def _check_integer(name: str, value: int, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise _invalid(name, value, f"must be an integer of at least {low}", low)
    if value < low:
        raise _invalid(name, int(value), f"must be at least {low}", low)
    return int(value)


def _check_key(key: jax.Array) -> None:
    if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()):
        raise _invalid("key", key, "must be one typed key", "jax.random.key(0)")


def _check_sizes(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    grid = np.asarray(sizes)
    if grid.ndim != 1 or not 0 < grid.size < _LARGEST_COUNT or not np.issubdtype(grid.dtype, np.integer):
        raise _invalid("sizes", sizes, f"must be a list of 1 to {_LARGEST_COUNT - 1} integers", "[1]")
    if grid.min() < 1 or grid.max() > _LARGEST_SIZE:
        raise _invalid("sizes", sizes, f"must be from 1 to {_LARGEST_SIZE} each", np.clip(grid, 1, _LARGEST_SIZE).tolist())
    return grid.astype(np.int32)


def _check_initial(initial: Sequence[int] | np.ndarray, grid: np.ndarray, chains: int) -> np.ndarray:
    start = np.asarray(initial)
    if start.shape not in ((grid.size,), (chains, grid.size)) or not np.issubdtype(start.dtype, np.integer):
        rule = f"must be a list of {grid.size} integers, or one for each of {chains} chains"
        raise _invalid("initial", initial, rule, np.zeros_like(grid).tolist())
    least = 0 if start.ndim == 1 else -1
    if (start < least).any() or (start >= grid).any():
        nearest = np.clip(start, least, grid - 1)
        raise _invalid("initial", initial, f"must be from {least} to sizes - 1 each", nearest.tolist())
    return start.astype(np.int32)
