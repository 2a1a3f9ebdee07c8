"""Candidates a second of the annealer, and how often it finds the optimum.

Speed: an energy that costs nothing (the sum of the choices), at several numbers of chains. The floor is that energy alone on
as many batches of the same shape; random bits are shown apart, for they are most of the rest. Peers on such a machine: a
jitted annealer with such an energy made 8 to 17 million candidates a second.

Quality: spaces of about 1e9 configurations whose energy is a sum of random effects, where the optimum is known, with one
dimension's effects a hundredth of the others'; and spaces of 1e6 configurations with many local minima, against
exhaustive search and random search with as many evaluations.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import finish, make_parser, use_device

STEPS = 500
SEPARABLE = {"9x10": (10, 9), "3x1000": (1000, 3), "30x2": (2, 30)}  # choices, dimensions
BUDGETS = [(128, 200), (1024, 500)]  # chains, steps


def seconds(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Of the first call, which compiles, and the median of ``repeats`` more."""
    import jax

    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return taken[0], statistics.median(taken[1:])


def measure_speed(chains: int, repeats: int) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    from tuner import anneal

    dims = 9
    key = jax.random.key(0)

    def null(choices: jax.Array) -> jax.Array:
        return jnp.sum(choices.astype(jnp.float32), axis=1)

    @jax.jit
    def floor(choices: jax.Array) -> jax.Array:
        """Each batch depends on the last one's energies, or the compiler would lift the work out of the loop."""
        return jax.lax.fori_loop(0, STEPS, lambda _, x: x.at[:, 0].set(null(x).astype(jnp.int32) & 7), choices)

    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        shape = (3, chains)
        zero = jnp.zeros(shape, jnp.uint32)
        return jax.lax.fori_loop(0, STEPS, lambda i, x: x ^ jax.random.bits(jax.random.fold_in(key, i), shape, jnp.uint32), zero)

    choices = jnp.zeros((chains, dims), jnp.int32)
    first, run = seconds(lambda: anneal.run(key, null, [10] * dims, chains=chains, steps=STEPS), repeats)
    _, energy = seconds(lambda: floor(choices), repeats)
    _, bits = seconds(lambda: draw(key), repeats)
    return {
        "compile_seconds": first - run,
        "candidates_per_second": chains * STEPS / run,
        "floor_candidates_per_second": chains * STEPS / energy,
        "ratio_to_floor": energy / run,
        "microseconds_per_step": run / STEPS * 1e6,
        "random_bits_microseconds_per_step": bits / STEPS * 1e6,
    }


def measure_separable(size: int, dims: int, seeds: int) -> dict[str, int]:
    """Seeds whose optimum was found with default arguments, and with chains on their own."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tuner import anneal

    def energy(choices: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.sum(jnp.take_along_axis(table, choices, axis=0), axis=1)

    found = {"found": 0, "found_without_redraw": 0}
    for seed in range(seeds):
        table = np.random.default_rng(seed).standard_normal((size, dims)).astype(np.float32)
        table[:, 0] *= 0.01
        for name, options in (("found", {}), ("found_without_redraw", {"resample": 0})):
            best = anneal.run(jax.random.key(seed), energy, [size] * dims, args=(table,), **options).best
            found[name] += int(np.array_equal(best, table.argmin(axis=0)))
    return {**found, "seeds": seeds}


def measure_rugged(order: int, chains: int, steps: int, seeds: int) -> dict[str, int]:
    """Six dimensions of ten choices and six random tables of ``order`` dimensions each (Kauffman's NK landscapes)."""
    import jax
    import numpy as np

    from tuner import anneal

    def energy(choices: jax.Array, table: jax.Array) -> jax.Array:
        return table[tuple(choices.T)]

    found = {"found": 0, "found_without_redraw": 0, "found_by_random_search": 0}
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        table = np.zeros((10,) * 6, np.float32)
        for dim in range(6):
            axes = [dim, *random.permutation([d for d in range(6) if d != dim])[: order - 1]]
            table += random.standard_normal([10 if d in axes else 1 for d in range(6)]).astype(np.float32)
        for name, options in (("found", {}), ("found_without_redraw", {"resample": 0})):
            result = anneal.run(jax.random.key(seed), energy, table.shape, chains=chains, steps=steps, args=(table,), **options)
            found[name] += int(table[tuple(np.asarray(result.best))] == table.min())
        drawn = table.ravel()[random.integers(0, table.size, chains * (steps + 1))]
        found["found_by_random_search"] += int(drawn.min() == table.min())
    return {**found, "seeds": seeds}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    use_device(args.device)
    figures: dict[str, Any] = {"steps": STEPS, "speed": {}, "separable": {}, "rugged": {}}
    for chains in (128, 1024, 8192):
        figures["speed"][str(chains)] = row = measure_speed(chains, args.repeats)
        print(f"{chains} chains: {row['candidates_per_second']:,.0f} candidates/s", file=sys.stderr, flush=True)
    for name, (size, dims) in SEPARABLE.items():
        figures["separable"][name] = row = measure_separable(size, dims, args.seeds)
        print(f"{name}: {row}", file=sys.stderr, flush=True)
    for order, (chains, steps) in itertools.product((2, 3, 4), BUDGETS):
        figures["rugged"][f"order {order}, {chains} chains, {steps} steps"] = row = measure_rugged(
            order, chains, steps, args.seeds
        )
        print(f"order {order}, {chains} x {steps}: {row}", file=sys.stderr, flush=True)
    finish("anneal", figures, record=args.record)


if __name__ == "__main__":
    main()
