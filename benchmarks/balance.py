"""From a wrong allocation to the right one: corrections by the balance of each run, on a simulated machine and on this one.

Simulated: 16 cores, 4 accelerators that act, search or learn (or one, on which the three take turns), and memory. Pipelines are
random ones that the simulator runs; the corrections see what a run used of each resource, what earlier ones took, and the
predictor, which knows the pipeline but not how long its stages really take. They start from every allocation that has a quarter,
as much or four times the cores and the memory that the best one needs, under every division of the accelerators. ``settled`` is
after how many corrections the time was within 5% of the best there is, and stayed so.

``--real``: on this machine from one core to two and back, from too little memory, and whether random configurations, with the
allocation the tuner gives them, run out of memory.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from common import finish, make_console, make_parser, use_device
from rich.table import Table as Lines

CORES, ACCELERATORS, MEMORY = 16, 4, 64.0 * 2**30
NEAR = 1.05
ENOUGH = 0.01  # of the predicted time: the demand is the least that is so near to the best
MATTERS = 2.0  # worst over best: of pipelines that run alike under any allocation there is nothing to correct
KEPT = 0.03  # of the predicted time: a division of accelerators that is so near to the best is left as it is
MOST = 12  # corrections followed
LONGER = 4  # times the simulator's events: what the best is called must not be a pipeline that still fills its queues
MEMORY_ERROR = 0.1  # of predicted memory, in logarithms
PROCESS_BYTES = 1e9
TURNS = (1 / 3, 1 / 3, 1 / 3)  # one accelerator for three roles
console = make_console()


def divisions(accelerators: int) -> list[tuple[float, ...]]:
    """Accelerators that act, search and learn: each role has its own, or all take turns on one."""
    apart = itertools.product(range(1, accelerators), repeat=3)
    return [TURNS, *((float(a), float(s), float(n)) for a, s, n in apart if a + s + n <= accelerators)]


class Case(NamedTuple):
    """A pipeline under each of A allocations: what the simulator ran, and what each of these runs said of all the others."""

    allocations: np.ndarray  # [A, 4] cores, and accelerators that act, search, learn
    seconds: np.ndarray  # [A] an environment step
    believed: np.ndarray  # [A + 1, A] predicted seconds: after a run under the first index; the last row: before any
    memory: float  # bytes it needs
    memory_believed: float  # bytes it is predicted to need


def draw(seed: int, count: int) -> list[Case]:
    """``count`` pipelines of threads on machines of that size, for which the allocation matters."""
    import dataclasses

    import jax

    from predictor import Rates, Workload, resident_bytes
    from predictor.synthetic import draw_pipelines

    drawn = draw_pipelines(seed, 16 * count)
    threads = np.flatnonzero((drawn.workload.sebulba > 0) & (drawn.hardware.on_host == 0))
    rng, cases = np.random.default_rng(seed), []
    for row in threads:
        workload: Workload = jax.tree.map(lambda x, row=row: x[row], drawn.workload)
        if row % 2:  # of what is drawn few need several cores: environments in processes of their own do
            workload = dataclasses.replace(workload, step_in_process=1.0, host_step_seconds=10.0 ** rng.uniform(-5.0, -3.5))
        rates: Rates = jax.tree.map(lambda x, row=row: x[row], drawn.hardware)
        need = float(resident_bytes(workload)) + PROCESS_BYTES
        case = run_everywhere(workload, rates, drawn.coefficients[row], need, need * math.exp(MEMORY_ERROR * rng.normal()))
        if case.seconds.max() >= MATTERS * case.seconds.min() and 4.0 * need < MEMORY:
            cases.append(case)
        if len(cases) == count:
            return cases
    raise SystemExit(f"seed {seed}: only {len(cases)} of {count} pipelines are of such a kind; ask for fewer")


def run_everywhere(workload: Any, rates: Any, coefficients: np.ndarray, memory_believed: float, memory: float) -> Case:
    """A pipeline under every allocation of the machine."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from predictor import stages
    from predictor.simulator import EVENTS, simulate

    table = np.array([(c, *d) for c in range(1, CORES + 1) for d in divisions(ACCELERATORS)], np.float32)
    roles = np.maximum(table[:, 1:], 1.0)
    fields = {f.name: np.full(len(table), getattr(workload, f.name), np.float32) for f in dataclasses.fields(workload)}
    names = ("acting_devices", "searching_devices", "learning_devices")
    fields |= {"cores": table[:, 0], **{name: roles[:, i] for i, name in enumerate(names)}}
    workloads = type(workload)(**fields)
    machines = jax.tree.map(lambda x: np.full(len(table), x, np.float32), rates)
    taking_turns = table[:, 1] < 1.0
    machines = machines._replace(cores=np.full(len(table), CORES, np.float32), devices=np.where(taking_turns, 1.0, ACCELERATORS))
    counted = jax.jit(stages)(workloads, machines)
    ran = simulate(counted * jnp.asarray(coefficients)[None], workloads, machines, events=LONGER * EVENTS)
    return Case(table, np.asarray(ran.seconds_per_env_step), believed(counted, ran, workloads, machines), memory, memory_believed)


def believed(counted: Any, ran: Any, workloads: Any, machines: Any) -> np.ndarray:
    """Predicted seconds of all allocations [A + 1, A], after a run under each, and before any.

    The predictor's base, its coefficients corrected by what each kind of thread used of each resource, [A, K, R]: seconds of a
    resource an environment step are its use by the pace, whatever else was short (the utilisation law: Denning and Buzen, 1978).
    """
    import jax
    import jax.numpy as jnp

    from predictor import STAGES
    from predictor.overlap import ROLES, total
    from predictor.runtime_predictor import prior_params
    from predictor.simulator import KINDS, RESOURCES

    seconds, used = np.asarray(ran.seconds_per_env_step), np.asarray(ran.use)

    def of(kind: str, resource: str) -> np.ndarray:
        return used[:, KINDS.index(kind), RESOURCES.index(resource)] * seconds

    python = ("host_rows", "host_steps", "contexts", "ready", "dispatch")
    programs = {role: [name for name in stages if name not in python] for role, stages in ROLES.items()}
    measured = [
        (programs["selfplay"], of("selfplay", "acting")),
        (programs["search"], of("search", "searching")),
        (programs["learner"], of("update", "learning")),
        (["contexts"], of("context", "lock")),
        (["ready"], of("search", "lock")),
        (["dispatch"], of("learner", "lock")),
    ]
    if float(np.asarray(workloads.step_in_process)[0]) > 0.0:
        stepping = of("selfplay", "cores") - of("selfplay", "lock")
        measured += [(["host_rows"], of("selfplay", "lock")), (["host_steps"], stepping)]
    else:  # environments hold the lock, too
        measured.append((["host_rows", "host_steps"], of("selfplay", "lock")))
    prior = np.asarray(prior_params().coefficients)
    counts = np.asarray(counted) * prior
    factors = np.ones((len(seconds) + 1, len(STAGES)), np.float32)
    for names, found in measured:
        columns = [STAGES.index(name) for name in names]
        sums = counts[:, columns].sum(1)
        factors[:-1, columns] = np.where((sums > 0.0) & (found > 0.0), found / np.where(sums > 0.0, sums, 1.0), 1.0)[:, None]

    def everywhere(row: jax.Array) -> jax.Array:
        return total(row[None] * counted, workloads, machines)

    expected = jax.jit(jax.vmap(everywhere))(jnp.asarray(factors * prior))
    return np.asarray(expected)


class Machine:
    """A case as corrections see it: columns cores, memory, accelerators that act, search and learn."""

    def __init__(self, case: Case):
        from tuner import balance
        from tuner.allocate import Limits

        self.case = case
        self.groups = (balance.CORES, balance.MEMORY, *[balance.ACCELERATOR] * 3)
        self.index = {tuple(np.round(row, 3)): i for i, row in enumerate(case.allocations)}
        maximum = np.array([CORES, MEMORY, *[ACCELERATORS] * 3])
        self.limits = Limits(np.array([1.0, 0.0, *TURNS]), maximum)
        self.price = case.allocations[:, 0] / CORES + case.allocations[:, 1:].sum(1) / ACCELERATORS
        self.best = float(case.seconds.min())
        self.least = self.cheapest(case.seconds)

    def cheapest(self, seconds: np.ndarray, here: int | None = None) -> int:
        """The allocation that takes the least of the machine among those whose time is next to the best.

        With the division of accelerators that allocation ``here`` has, where the best with it is nearly as good as any.
        """
        near = seconds <= (1.0 + ENOUGH) * seconds.min()
        if here is not None:
            same = (self.case.allocations[:, 1:] == self.case.allocations[here, 1:]).all(1)
            if (best := seconds[same].min()) <= (1.0 + KEPT) * seconds.min():
                near = same & (seconds <= (1.0 + ENOUGH) * best)
        return int(np.argmin(np.where(near, self.price, np.inf)))

    def at(self, allocated: np.ndarray) -> int:
        """Number of the allocation."""
        return self.index[tuple(np.round(allocated[[0, 2, 3, 4]].astype(np.float32), 3))]

    def seconds(self, allocated: np.ndarray) -> float:
        """What a run takes; infinite where it runs out of memory."""
        return float(self.case.seconds[self.at(allocated)]) if allocated[1] >= self.case.memory else math.inf

    def seen(self, runs: Sequence[np.ndarray]) -> Any:
        """What the last of the runs says, and those before it: where one ran out of memory no more than that it did."""
        from tuner import allocate, balance

        allocated = runs[-1]
        here, seconds = self.at(allocated), self.seconds(allocated)
        failed = math.isinf(seconds)
        told = self.expected(runs)
        wanted = self.case.allocations[self.cheapest(told, here)]
        cores = min(math.ceil(wanted[0] * (1.0 + allocate.HEADROOM)), CORES)
        memory = self.case.memory_believed if failed else self.case.memory
        memory = max(memory * (1.0 + allocate.HEADROOM), 2.0 * allocated[1] if failed else 0.0)
        gain, loss = self.marginal(told, here)
        return balance.Seen(seconds, np.array([cores, memory, *wanted[1:]]), self.limits, gain, loss)

    def expected(self, runs: Sequence[np.ndarray]) -> np.ndarray:
        """[A] seconds: as the last run that ran lets them be predicted, corrected by what that misses of all runs.

        What it misses belongs to a division of the accelerators; one that was not tried yet is taken to be missed by as much
        as the others on average.
        """
        ran = [self.at(allocated) for allocated in runs if math.isfinite(self.seconds(allocated))]
        told = self.case.believed[ran[-1] if ran else -1].copy()
        division = self.case.allocations[:, 1:]
        missed = {tuple(division[index]): float(np.log(self.case.seconds[index] / told[index])) for index in ran}
        if not missed:
            return told
        otherwise = float(np.mean(list(missed.values())))
        return told * np.exp([missed.get(tuple(row), otherwise) for row in division])

    def marginal(self, told: np.ndarray, here: int) -> tuple[np.ndarray, np.ndarray]:
        """Log seconds that a core or an accelerator more wins, and one less costs, over its share of the machine."""
        cores, *division = self.case.allocations[here]

        def log_seconds(cores: float, accelerators: float) -> float:
            same = (self.case.allocations[:, 0] == cores) & (self.case.allocations[:, 1:].sum(1).round() == accelerators)
            return float(np.log(told[same].min())) if same.any() else log_now

        log_now, count = float(np.log(told[here])), round(sum(division))
        more = [log_seconds(min(cores + 1, CORES), count), log_seconds(cores, min(count + 1, ACCELERATORS))]
        less = [log_seconds(max(cores - 1, 1), count), log_seconds(cores, max(count - 1, 1))]
        shares = (CORES, ACCELERATORS)
        gain = [(log_now - x) * share for x, share in zip(more, shares, strict=True)]
        loss = [(x - log_now) * share for x, share in zip(less, shares, strict=True)]
        return np.array([gain[0], 0.0, *[gain[1]] * 3]), np.array([loss[0], 0.0, *[loss[1]] * 3])

    def starts(self) -> list[np.ndarray]:
        """A quarter, as much and four times what the best needs, within the machine, under each division of accelerators."""
        cores, *division = self.case.allocations[self.least]
        some = sorted({float(np.clip(round(cores * f), 1, CORES)) for f in (0.25, 1.0, 4.0)})
        memory = [self.case.memory * 1.1 * f for f in (0.25, 1.0, 4.0)]
        every = itertools.product(some, memory, divisions(ACCELERATORS))

        def rounded(division: Iterable[float]) -> list[float]:
            return [round(float(np.float32(share)), 3) for share in division]

        right = (float(cores), memory[1], rounded(division))
        return [np.array([c, m, *d]) for c, m, d in every if (c, m, rounded(d)) != right]

    def follow(self, start: np.ndarray) -> list[float]:
        """Seconds over the best's after each correction, the first before any; to the end of ``MOST`` or of corrections."""
        from tuner import balance

        state, runs, ratios = balance.start(start), [], [self.seconds(start) / self.best]
        for _ in range(MOST):
            runs.append(state.allocated)
            after = balance.correct(state, self.seen(runs), self.groups)
            if np.array_equal(after.allocated, state.allocated):
                break
            state = after
            ratios.append(self.seconds(state.allocated) / self.best)
        return ratios


def settled(ratios: list[float]) -> float:
    """Corrections after which the time was near the best and stayed so; infinite where it did not."""
    far = [i for i, ratio in enumerate(ratios) if ratio > NEAR]
    after = far[-1] + 1 if far else 0
    return float(after) if after < len(ratios) else math.inf


def measure_simulated(seed: int, count: int) -> dict[str, Any]:
    """Corrections needed from every wrong start of every pipeline."""
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(draw(seed, count)):
        machine = Machine(case)
        found = [machine.follow(start) for start in machine.starts()]
        need = [settled(ratios) for ratios in found]
        cores, *division = case.allocations[machine.least]
        rows.append(
            {
                "pipeline": number,
                "cores": float(cores),
                "accelerators": [round(float(x), 2) for x in division],
                "spread": float(case.seconds.max() / case.seconds.min()),
                "starts": len(need),
                "worst_start": float(max(ratios[0] for ratios in found if math.isfinite(ratios[0]))),
                "median": _finite(float(np.median(need))),
                "worst": _finite(max(need)),
                "reached_within_3": float(np.mean([any(r <= NEAR for r in ratios[:4]) for ratios in found])),
                "settled_within_3": float(np.mean([n <= 3 for n in need])),
                "end_worst": max(ratios[-1] for ratios in found),
            }
        )
    weights = [row["starts"] for row in rows]
    return {
        "pipelines": rows,
        "starts": sum(weights),
        "median": _finite(float(np.median([math.inf if row["median"] is None else row["median"] for row in rows]))),
        "worst": None if any(row["worst"] is None for row in rows) else max(row["worst"] for row in rows),
        "reached_within_3": float(np.average([row["reached_within_3"] for row in rows], weights=weights)),
        "settled_within_3": float(np.average([row["settled_within_3"] for row in rows], weights=weights)),
    }


def _finite(corrections: float) -> float | None:
    """As JSON has it: None where it never settled."""
    return corrections if math.isfinite(corrections) else None


def _count(corrections: float | None) -> str:
    return "never" if corrections is None else f"{corrections:.0f}"


def show(figures: dict[str, Any]) -> None:
    lines = Lines(title=f"corrections on {CORES} cores and {ACCELERATORS} accelerators, {figures['starts']} wrong starts")
    for name in ("best", "all/best", "starts", "worst start", "median", "worst", "settled in 3", "ends at most"):
        lines.add_column(name, justify="right")
    for row in figures["pipelines"]:
        division = "1 in turns" if row["accelerators"][0] < 1 else "+".join(f"{x:.0f}" for x in row["accelerators"])
        best = f"{row['cores']:.0f}, {division}"
        shares = (f"{row['worst_start']:.2f}", _count(row["median"]), _count(row["worst"]), f"{row['settled_within_3']:.0%}")
        lines.add_row(best, f"{row['spread']:.1f}", str(row["starts"]), *shares, f"{row['end_worst']:.3f}")
    console.print(lines)
    console.print(
        f"median {_count(figures['median'])}, worst {_count(figures['worst'])}; "
        f"settled within 3: {figures['settled_within_3']:.1%}, reached within 3: {figures['reached_within_3']:.1%}"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pipelines", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="on this machine, instead of a simulated one; some minutes")
    parser.add_argument("--starts", type=int, default=50, help="of --real: random configurations")
    args = parser.parse_args()
    if args.pipelines < 1 or args.starts < 0 or args.seed < 0:
        parser.error("--pipelines must be at least 1, --starts and --seed at least 0")
    use_device(args.device)
    begin = time.perf_counter()
    if args.real:
        from balance_real import measure_real

        figures = measure_real(args.seed, args.starts)
    else:
        figures = measure_simulated(args.seed, args.pipelines)
        show(figures)
    figures["wall_seconds"] = round(time.perf_counter() - begin, 1)
    finish("balance", {"real": args.real, "seed": args.seed, **figures}, record=args.record)


if __name__ == "__main__":
    main()
