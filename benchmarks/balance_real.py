"""What ``balance.py --real`` runs here: corrections from one core to two, back, and from too little memory; random starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import make_console
from rich.table import Table as Lines

NEAR = 1.05
MOST = 3
BURST = 0.3
# A training that two cores help, and one that they do not.
WIDE = {"network.width": 256, "train.batch_size": 256, "runtime.num_envs": 64, "search.num_simulations": 16}
NARROW = {
    "network.width": 8,
    "train.batch_size": 16,
    "train.td_steps": 4,
    "replay.min_size": 64,
    "replay.capacity": 8192,
    "runtime.num_envs": 8,
    "search.num_simulations": 2,
}
ROOMY = {"replay.capacity": 2_000_000}  # a replay that takes a tenth of a GiB and a copy of it
RANDOM_ENVS = ("gymnax:CartPole-v1", "gymnasium:CartPole-v1", "pgx:tic_tac_toe")
CAPACITIES = (2**13, 2**17, 2**20, 2**22)
console = make_console()


class Laboratory:
    """Measures configurations here, and predicts from what was measured."""

    def __init__(self) -> None:
        from predictor import RuntimePredictor
        from tuner.bridge import enable_cache
        from tuner.measuring.fingerprint import fingerprint

        enable_cache()
        self.hardware = fingerprint(say=console.print)
        self.predictor = RuntimePredictor.pretrained()
        self.measured: list[Any] = []

    def configuration(self, env: str, changes: dict[str, Any]) -> Any:
        """A configuration with everything decided."""
        from tuner.bridge import Config, concrete

        return concrete(Config.preset(env).replace(changes), self.hardware.platform)

    def run(self, config: Any, repeats: int = 5, seconds: float = BURST) -> Any:
        """A measurement, which the predictor learns from."""
        from tuner.measuring.measure import measure_config

        (measurement,) = measure_config(config, hardware=self.hardware, repeats=repeats, seconds=seconds)
        return self._learn(measurement)

    def _learn(self, measurement: Any) -> Any:
        from predictor import RuntimePredictor

        self.measured.append(measurement)
        self.predictor = RuntimePredictor.pretrained().fit(self.measured)
        return measurement

    def follow(self, config: Any) -> list[tuple[Any, Any]]:
        """Runs of a configuration under allocations that are corrected until nothing is to be, or so often as is allowed."""
        from tuner.corrections import corrected
        from tuner.measuring.measure import measure_beside

        runs = [(config, self.run(config))]
        while len(runs) <= MOST:
            after = corrected(runs, self.predictor, self.hardware)
            if after == runs[-1][0]:
                break
            runs.append((after, self._learn(measure_beside(after, *runs[-1], hardware=self.hardware, seconds=BURST))))
        return runs


def _leg(lab: Laboratory, name: str, config: Any, others: list[Any]) -> dict[str, Any]:
    """One series of corrections, and the seconds of where it ends over the best of ``others`` and its own, in alternation."""
    from tuner.measuring.measure import measure_in_alternation, paired_ratio

    begin = time.perf_counter()
    runs = lab.follow(config)
    final = runs[-1][0]
    over = 1.0
    if rivals := [other for other in others if other.allocation.cores != final.allocation.cores]:
        ours, *theirs = measure_in_alternation([final, *rivals], hardware=lab.hardware, rounds=9, seconds=BURST)
        over = max([1.0, *(paired_ratio(rival, ours) for rival in theirs if rival.repeats)])
    steps = [
        {
            "cores": c.allocation.cores,
            "memory_gib": c.allocation.memory_gib,
            "outcome": str(m.outcome),
            "steps_per_second": m.env_steps_per_second,
            "cores_busy": m.cpu_use,
        }
        for c, m in runs
    ]
    return {
        "name": name,
        "runs": steps,
        "corrections": len(runs) - 1,
        "seconds_over_best": over,
        "reached": runs[-1][1].outcome == "ok" and over <= NEAR,
        "wall_seconds": round(time.perf_counter() - begin, 1),
    }


def feasible_point(space: Any, rng: np.random.Generator) -> np.ndarray:
    """A random point of a grid that a configuration allows."""
    from tuner.space import feasible, workloads

    points = (rng.random((1024, len(space.sizes))) * space.sizes).astype(np.int32)
    allowed = feasible(workloads(space.base, space.tables(), points), space.max_num_envs, space.max_staleness)
    return points[int(np.argmax(np.asarray(allowed)))]


def random_starts(lab: Laboratory, seed: int, count: int) -> dict[str, Any]:
    """Random configurations of the space around several starts, each with the allocation that the tuner gives it."""
    from predictor import Outcome
    from tuner import balance, resources
    from tuner.loop import space_around
    from tuner.measuring.workload import describe

    rng, outcomes, margins = np.random.default_rng(seed), [], []
    spaces: dict[tuple[str, int], tuple[Any, Any]] = {}
    begin = time.perf_counter()
    for number in range(count):
        env, capacity = str(rng.choice(RANDOM_ENVS)), int(rng.choice(CAPACITIES))
        if (env, capacity) not in spaces:
            narrow = {**NARROW, "replay.capacity": capacity, "train.max_env_steps": 400_000}
            start = lab.configuration(env, narrow)
            spaces[env, capacity] = start, space_around(start, "neutral", lab.hardware.platform)
        start, space = spaces[env, capacity]
        config = start.replace(space.decode(feasible_point(space, rng)))
        use = resources.use_of(lab.predictor.predict(describe(config), lab.hardware))
        # As the tuner's first rounds have it: the least that corrections may come down to.
        everything = np.asarray(resources.limits(lab.hardware).maximum)
        wrong = everything / rng.choice([1.0, 4.0, 16.0], 3)
        _, given = resources.next_allocation(balance.start(wrong), use, float(rng.random()), lab.hardware)
        config = resources.with_allocation(config, given, lab.hardware, space.options("allocation.cores"))
        gib = config.allocation.memory_gib
        assert gib is not None
        measurement = lab.run(config, repeats=1, seconds=0.05)
        outcomes.append(str(measurement.outcome))
        if measurement.peak_bytes:
            margins.append(gib * 2**30 / measurement.peak_bytes)
        said = "" if measurement.outcome == Outcome.OK else f": {measurement.error}"
        console.print(f"start {number}: {env}, {capacity} transitions, {gib:g} GiB: {outcomes[-1]}{said}")
    return {
        "starts": count,
        "out_of_memory": outcomes.count(Outcome.OUT_OF_MEMORY),
        "ok": outcomes.count(Outcome.OK),
        "memory_over_used_least": float(min(margins)) if margins else None,
        "memory_over_used_median": float(np.median(margins)) if margins else None,
        "wall_seconds": round(time.perf_counter() - begin, 1),
    }


def measure_real(seed: int, starts: int) -> dict[str, Any]:
    """Everything on this machine. Raises SystemExit where there is but one core."""
    lab = Laboratory()
    if lab.hardware.cores < 2:
        raise SystemExit("this machine has one core: there is nothing to go to and back")

    def given(env: str, changes: dict[str, Any]) -> Callable[[int, float], Any]:
        base = lab.configuration(env, changes)
        return lambda cores, gib: base.replace({"allocation.cores": cores, "allocation.memory_gib": gib})

    wide, narrow = given("gymnax:CartPole-v1", WIDE), given("gymnax:CartPole-v1", NARROW)
    roomy = given("gymnax:CartPole-v1", {**NARROW, **ROOMY})
    legs = [
        _leg(lab, "from one core to two", wide(1, 2.0), [wide(2, 2.0)]),
        _leg(lab, "and back", narrow(2, 2.0), [narrow(1, 2.0)]),
        _leg(lab, "from too little memory", roomy(2, 0.3), []),
    ]
    lines = Lines(title="corrections on this machine")
    for name in ("", "runs: cores, GiB: steps/s (cores busy)", "corrections", "time over the best"):
        lines.add_column(name)
    for leg in legs:
        steps = [
            f"{r['cores']}, {r['memory_gib']:g}: "
            + (f"{r['steps_per_second']:,.0f} ({r['cores_busy']:.2f})" if r["steps_per_second"] else r["outcome"])
            for r in leg["runs"]
        ]
        lines.add_row(leg["name"], "; ".join(steps), str(leg["corrections"]), f"{leg['seconds_over_best']:.3f}")
    console.print(lines)
    found = {"legs": legs, "random": random_starts(lab, seed, starts)}
    console.print(found["random"])
    return found
