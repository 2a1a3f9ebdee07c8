"""Candidates a second of the annealer, and how often it finds the optimum.

Speed: an energy that costs nothing (the sum of the choices), at several numbers of chains. The floor is that energy alone on
as many batches of the same shape; random bits are shown apart, for they are most of the rest. Peers on such a machine: a
jitted annealer with such an energy made 8 to 17 million candidates a second.

Quality: spaces of about 1e9 configurations whose energy is a sum of random effects, where the optimum is known, with one
dimension's effects a hundredth of the others'; and spaces of 1e6 configurations with many local minima, against
exhaustive search and random search with as many evaluations.

With the real predictor as the energy, with and without its network being heard, over more than 1e9 configurations of threads:
candidates a second next to the energy and to the predictor on batches of the same size, and next to simanneal and scipy's
dual_annealing, which ask for one at a time; and how far the best of 100 times as many random candidates is from what it finds.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import finish, make_parser, need, use_device

STEPS = 500
SEPARABLE = {"9x10": (10, 9), "3x1000": (1000, 3), "30x2": (2, 30)}  # choices, dimensions
BUDGETS = [(128, 200), (1024, 500)]  # chains, steps
REDRAW: dict[str, dict[str, Any]] = {"found": {}, "found_without_redraw": {"resample": 0}}


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
        for name, options in REDRAW.items():
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
        rng = np.random.default_rng(seed)
        table = np.zeros((10,) * 6, np.float32)
        for dim in range(6):
            axes = [dim, *rng.permutation([d for d in range(6) if d != dim])[: order - 1]]
            table += rng.standard_normal([10 if d in axes else 1 for d in range(6)]).astype(np.float32)
        for name, options in REDRAW.items():
            result = anneal.run(jax.random.key(seed), energy, table.shape, chains=chains, steps=steps, args=(table,), **options)
            found[name] += int(table[tuple(np.asarray(result.best))] == table.min())
        drawn = table.ravel()[rng.integers(0, table.size, chains * (steps + 1))]
        found["found_by_random_search"] += int(drawn.min() == table.min())
    return {**found, "seeds": seeds}


def make_problem(heard: bool) -> tuple[Any, tuple[Any, ...]]:
    """A grid of more than 1e9 configurations, and what the tuner's energy takes beside points of it."""
    import dataclasses

    import jax.numpy as jnp
    import numpy as np

    from predictor import RuntimePredictor, hardware_rates
    from tuner.bridge import Config, concrete
    from tuner.measuring.fingerprint import fingerprint
    from tuner.measuring.workload import describe
    from tuner.objective import Limits, excluded
    from tuner.residual import make_residual
    from tuner.space import knobs_up_to, make_space

    hardware = dataclasses.replace(fingerprint(), cores=64)
    base = describe(concrete(Config.preset("gymnasium:CartPole-v1").replace("runtime.kind", "sebulba"), "cpu"))
    knobs = knobs_up_to("learning", "sebulba")
    space = make_space(knobs, {knob.path: knob.choices[0] for knob in knobs}, base, lambda *_: True, 2**20, np.inf)
    params = RuntimePredictor.pretrained().params._replace(shrinkage=np.float32(0.5 if heard else 0.0)).heard()
    limits = Limits(*map(jnp.float32, (2**20, np.inf, 1e-4)))
    residual = make_residual(space, (), ())
    return space, (params, hardware_rates(hardware), base, space.tables(), limits, excluded(space, ()), residual)


def measure_with_the_predictor(heard: bool, chains: int, steps: int, repeats: int) -> dict[str, float]:
    """Candidates a second by what scores them, and how much better than random candidates the optimum is predicted to be."""
    import jax
    import jax.numpy as jnp

    from predictor import log_seconds
    from tuner import anneal
    from tuner.objective import energy
    from tuner.space import workloads

    space, arguments = make_problem(heard)
    params, rates, base, tables, *_ = arguments
    sizes = jnp.asarray(space.sizes)

    def in_turn(score: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """Batches that depend on the energies before, or the compiler would lift the work out of the loop."""

        def loop(points: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, steps, lambda _, x: (x + (score(x)[:, None] > 0.0)) % sizes, points)

        return jax.jit(loop, compiler_options=params.compiler_options)

    @jax.jit
    def drawn(key: jax.Array) -> jax.Array:
        points = (jax.random.uniform(key, (chains, len(space.sizes))) * sizes).astype(jnp.int32)
        return jnp.min(energy(points, *arguments))

    def annealed() -> anneal.Result:
        options: dict[str, Any] = {"chains": chains, "steps": steps, "compiler_options": params.compiler_options}
        return anneal.run(key, energy, space.sizes, args=arguments, **options)

    key = jax.random.key(0)
    points = (jax.random.uniform(key, (chains, len(space.sizes))) * sizes).astype(jnp.int32)
    alone = in_turn(lambda x: energy(x, *arguments))
    predictor = in_turn(lambda x: log_seconds(params, workloads(base, tables, x), rates))
    calls: list[Callable[[], Any]] = [
        annealed,
        lambda: alone(points),
        lambda: predictor(points),
    ]
    for call in calls:
        jax.block_until_ready(call())
    taken: list[list[float]] = []
    for _ in range(repeats):  # in alternation
        taken.append([])
        for call in calls:
            start = time.perf_counter()
            jax.block_until_ready(call())
            taken[-1].append(time.perf_counter() - start)
    ours, energies, predictions = (statistics.median(column) for column in zip(*taken, strict=True))
    found = float(annealed().energy)
    best_drawn = min(float(drawn(jax.random.fold_in(key, i))) for i in range(100 * steps))
    return {
        "configurations": float(space.size),
        "candidates_per_second": chains * steps / ours,
        "ratio_to_energy": statistics.median(row[1] / row[0] for row in taken),
        "ratio_to_predictor": statistics.median(row[2] / row[0] for row in taken),
        "energy_per_second": chains * steps / energies,
        "predictor_per_second": chains * steps / predictions,
        "predicted_over_best_of_100_times_as_many_random": math.exp(found - best_drawn),
        **{f"{name}_per_second": rate for name, rate in one_at_a_time(space, arguments).items()},
    }


def one_at_a_time(space: Any, arguments: tuple[Any, ...], seconds: float = 3.0) -> dict[str, float]:
    """Candidates a second of annealers that ask the same compiled energy for one after the other."""
    import jax
    import numpy as np
    from scipy.optimize import dual_annealing
    from simanneal import Annealer

    from tuner.objective import energy

    compiled = jax.jit(energy)
    asked = 0

    def score(point: Any) -> float:
        nonlocal asked
        asked += 1
        return float(compiled(np.asarray(point, np.int32)[None], *arguments)[0])

    class Problem(Annealer):
        def move(self) -> None:
            knob = random.randrange(len(self.state))
            self.state[knob] = random.randrange(int(space.sizes[knob]))

        def energy(self) -> float:
            return score(self.state)

    score([0] * len(space.sizes))
    rates = {}
    problem = Problem([0] * len(space.sizes))
    problem.copy_strategy, problem.updates, problem.steps = "slice", 0, 1000
    begin, asked = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        problem.anneal()
    rates["simanneal"] = asked / (time.perf_counter() - begin)
    upper = space.sizes.astype(float)
    begin, asked = time.perf_counter(), 0

    def objective(x: np.ndarray) -> float:
        value = score(np.minimum(x, upper - 1e-6).astype(int))
        return value if np.isfinite(value) else 1e3

    def late(*_: Any) -> bool:
        return time.perf_counter() - begin > seconds

    dual_annealing(objective, [(0.0, size) for size in upper], seed=0, no_local_search=True, maxiter=10**6, callback=late)
    rates["dual_annealing"] = asked / (time.perf_counter() - begin)
    return rates


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=10)
    args = parser.parse_args()
    need("simanneal")
    use_device(args.device)
    row: dict[str, Any]
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
    for heard, (chains, steps) in {False: (1024, 500), True: (1024, 200)}.items():
        name = "predictor, network heard" if heard else "predictor"
        figures[name] = row = measure_with_the_predictor(heard, chains, steps, args.repeats)
        print(f"{name}: {row}", file=sys.stderr, flush=True)
    finish("anneal", figures, record=args.record)


if __name__ == "__main__":
    main()
