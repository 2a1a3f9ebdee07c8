"""The table of knobs, and grids of configurations made from it.

To add a knob, add a row to ``KNOBS``. A grid point is an int32 vector of choices, one a knob; :class:`Space` turns points
into configuration changes, and batches of points into a batched :class:`predictor.Workload`, in jnp, for the annealer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from predictor import Workload, staleness

Tables = tuple[dict[str, jax.Array], ...]  # by knob, what each choice sets in a Workload: float32 [choices] by field
EFFECTS = ("exact", "neutral", "learning")
_ENGINES = ("mctx", "fused")  # in the order of muzerox's registry
_BITS = {"O0": (32, 32), "O1": (16, 32), "O1_float16": (16, 32), "O2": (16, 16)}


def _powers(low: int, high: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(low, high + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knob:
    """One dimension of the grid."""

    path: str  # key of the configuration
    choices: tuple[Any, ...]  # in order, where there is one; what the configuration or the machine cannot is left out
    scale: str  # log2, or name where choices have no order
    feeds: str  # type of node or edge of the predictor's graph whose features it changes
    cost: str  # of a change: live (an argument of the compiled program), rebuild (compiles again), restart (a new process)
    # exact: the same numbers (under sebulba, where threads interleave as they will: the same of each item's numbers); neutral:
    # the same algorithm, statistically the same learning; learning: neither.
    effect: str
    fields: Callable[[Any], dict[str, float]]  # what a choice sets in a Workload
    runtime: str = ""  # under which it exists; empty: under each
    fine: bool = False  # moves seconds by little: points that differ in nothing else are not all worth measuring


def _field(name: str) -> Callable[[Any], dict[str, float]]:
    return lambda value: {name: float(value)}


KNOBS = (
    Knob(
        path="runtime.num_envs",
        choices=_powers(3, 13),
        scale="log2",
        feeds="selfplay_worker",
        cost="rebuild",
        effect="neutral",
        fields=_field("num_envs"),
    ),
    Knob(
        path="runtime.loop_count",
        choices=_powers(0, 9),
        scale="log2",
        feeds="training_loop",
        cost="live",
        effect="exact",
        fields=_field("loop_count"),
        runtime="anakin",
    ),
    Knob(
        path="runtime.loop_count",
        choices=_powers(0, 9),
        scale="log2",
        feeds="training_loop",
        cost="rebuild",
        effect="neutral",  # parameters are published once a dispatch: how old they get is bounded, and has a price
        fields=_field("loop_count"),
        runtime="sebulba",
    ),
    Knob(
        path="runtime.selfplay_workers",
        choices=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
        scale="log2",
        feeds="selfplay_worker",
        cost="rebuild",
        effect="neutral",
        fields=_field("selfplay_workers"),
        runtime="sebulba",
    ),
    Knob(
        path="runtime.cpu_actors",
        choices=(1, 2, 3, 4, 6, 8, 12, 16),
        scale="log2",
        feeds="context_worker",
        cost="rebuild",
        effect="neutral",  # each has a context in hand, which ages
        fields=_field("cpu_actors"),
        runtime="sebulba",
        fine=True,
    ),
    Knob(
        path="runtime.search_queue_size",
        choices=_powers(0, 6),
        scale="log2",
        feeds="context_queue",
        cost="rebuild",
        effect="neutral",  # what waits ages
        fields=_field("search_queue_size"),
        runtime="sebulba",
        fine=True,
    ),
    Knob(
        path="runtime.batch_queue_size",
        choices=_powers(0, 6),
        scale="log2",
        feeds="batch_queue",
        cost="rebuild",
        effect="neutral",  # what waits ages
        fields=_field("batch_queue_size"),
        runtime="sebulba",
        fine=True,
    ),
    Knob(
        path="runtime.role_threads",
        choices=(0, 1, 2, 4, 8),
        scale="name",
        feeds="hardware",
        cost="rebuild",
        effect="neutral",  # sums in another order
        fields=_field("role_threads"),
        runtime="sebulba",
    ),
    Knob(
        path="runtime.step_in",
        choices=("thread", "process"),
        scale="name",
        feeds="environment",
        cost="rebuild",
        effect="exact",
        fields=lambda where: {"step_in_process": float(where == "process")},
        runtime="sebulba",
    ),
    Knob(
        path="precision.level",
        choices=("O0", "O1", "O2"),
        scale="name",
        feeds="network",
        cost="rebuild",
        effect="neutral",
        fields=lambda level: {"compute_bits": float(_BITS[level][0]), "embedding_bits": float(_BITS[level][1])},
    ),
    Knob(
        path="search.engine",
        choices=_ENGINES,
        scale="name",
        feeds="selfplay_worker",
        cost="rebuild",
        effect="neutral",  # sums in another order
        fields=lambda engine: {"search_engine": float(_ENGINES.index(engine))},
    ),
    Knob(
        path="search.split",
        choices=_powers(0, 4),
        scale="log2",
        feeds="selfplay_worker",
        cost="rebuild",
        effect="neutral",
        fields=_field("search_split"),
    ),
    Knob(
        path="replay.placement",
        choices=("device", "host"),
        scale="name",
        feeds="replay_buffer",
        cost="rebuild",
        effect="exact",
        fields=lambda where: {"replay_on_host": float(where == "host")},
    ),
    Knob(
        path="allocation.cores",
        choices=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
        scale="log2",
        feeds="hardware",
        cost="restart",
        effect="exact",
        fields=_field("cores"),
    ),
    Knob(
        path="search.num_simulations",
        choices=(2, 4, 8, 16, 32, 64, 128),
        scale="log2",
        feeds="selfplay_worker",
        cost="rebuild",
        effect="learning",
        fields=_field("num_simulations"),
    ),
    Knob(
        path="train.batch_size",
        choices=_powers(5, 12),
        scale="log2",
        feeds="training_loop",
        cost="rebuild",
        effect="learning",
        fields=_field("batch_size"),
    ),
)


def knobs_up_to(effect: str, runtime: str) -> tuple[Knob, ...]:
    """The rows of a runtime whose effect is at most ``effect``: exact, then neutral, then learning."""
    there = (knob for knob in KNOBS if knob.runtime in ("", runtime))
    return tuple(knob for knob in there if EFFECTS.index(knob.effect) <= EFFECTS.index(effect))


@dataclasses.dataclass(frozen=True)
class Space:
    """A grid around a starting configuration: its knobs, each with the choices that can be made here."""

    knobs: tuple[Knob, ...]
    choices: tuple[tuple[Any, ...], ...]  # by knob
    start: tuple[int, ...]  # the starting configuration's point
    base: Workload  # of the starting configuration
    max_num_envs: int  # of all workers; more would spend too much of the training on collecting the first sequences
    max_staleness: float = 0.0  # updates; more would learn from what is too old

    @property
    def sizes(self) -> np.ndarray:
        """[D] int32, number of choices by knob."""
        return np.array([len(options) for options in self.choices], np.int32)

    @property
    def size(self) -> int:
        """Points of the grid."""
        return int(np.prod(self.sizes, dtype=object))

    def options(self, path: str) -> tuple[Any, ...]:
        """The choices at a path; none when it is no dimension."""
        return next((c for knob, c in zip(self.knobs, self.choices, strict=True) if knob.path == path), ())

    def decode(self, point: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """A point [D] as changes to the starting configuration."""
        pairs = zip(self.knobs, self.choices, point, strict=True)
        return {knob.path: options[int(index)] for knob, options, index in pairs}

    def encode(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """The point of a configuration given by path. Raises ValueError when it is not on the grid."""
        return tuple(options.index(values[knob.path]) for knob, options in zip(self.knobs, self.choices, strict=True))

    def program(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What of a configuration given by path needs a process of its own: all but arguments of the compiled program."""
        return tuple(values[knob.path] for knob in self.knobs if knob.cost != "live")

    def tables(self) -> Tables:
        """What each choice sets in a Workload, as arrays to be passed to jit."""
        rows = []
        for knob, options in zip(self.knobs, self.choices, strict=True):
            sets = [knob.fields(option) for option in options]
            rows.append({name: jnp.array([s[name] for s in sets], jnp.float32) for name in sets[0]})
        return tuple(rows)


def select(table: jax.Array, points: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """What ``table`` [F, sum of sizes] says of each knob's choice, added up over knobs: int32 [C, D] -> float32 [F, C].

    A product with ones where a choice is made, for gathering a number at a time is slow; exact where all but one are zeros.
    """
    chosen = [points.T[knob][None, :] == jnp.arange(size, dtype=jnp.int32)[:, None] for knob, size in enumerate(sizes)]
    return jnp.matmul(table, jnp.concatenate(chosen).astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


@jax.jit
def workloads(base: Workload, tables: Tables, points: jax.Array) -> Workload:
    """The batched Workload of int32 points [C, D]: ``base`` with what each choice sets. Leaves float32 [C]."""
    sizes = [len(next(iter(table.values()))) for table in tables]
    first = np.cumsum([0, *sizes])
    rows = {}
    for knob, table in enumerate(tables):
        for name, options in table.items():
            rows[name] = jnp.zeros(first[-1], jnp.float32).at[first[knob] : first[knob + 1]].set(options)
    values = {f.name: jnp.full(points.shape[0], getattr(base, f.name), jnp.float32) for f in dataclasses.fields(Workload)}
    values |= dict(zip(rows, select(jnp.stack(list(rows.values())), points, sizes), strict=True))
    return Workload(**values)  # type: ignore[arg-type]  # fields [C]


def feasible(workload: Workload, max_num_envs: Any, max_staleness: Any = np.inf) -> jax.Array:
    """Which candidates a configuration allows: bool [C]. The rules are those of muzerox.Config, and bounds on warm-up and age."""
    w = workload
    num_envs = w.num_envs * w.selfplay_workers
    whole = w.num_envs % (w.search_split * w.num_devices) == 0
    shared = w.batch_size % jnp.maximum(jnp.asarray(w.num_devices), w.learning_devices) == 0
    rows = w.capacity >= (w.unroll_steps + w.td_steps + 2) * num_envs
    fits = w.batch_size <= w.capacity
    threads = w.role_threads <= w.cores
    return whole & shared & rows & fits & threads & (num_envs <= max_num_envs) & (staleness(w) <= max_staleness)


def make_space(
    knobs: Sequence[Knob],
    start: Mapping[str, Any],
    base: Workload,
    valid: Callable[[str, Any], bool],
    max_num_envs: int,
    max_staleness: float = 0.0,
) -> Space:
    """The grid of ``knobs`` around a starting configuration.

    Args:
      start: values of the starting configuration by path; each is a choice of the grid.
      valid: ``valid(path, value)``, whether the starting configuration may take the value on this machine.
    """
    kept, choices, point = [], [], []
    for knob in knobs:
        here = start[knob.path]
        options = [option for option in knob.choices if option == here or valid(knob.path, option)]
        if here not in options:
            options = sorted([*options, here]) if knob.scale == "log2" else [*options, here]
        if len(options) > 1:
            kept.append(knob)
            choices.append(tuple(options))
            point.append(options.index(here))
    return Space(tuple(kept), tuple(choices), tuple(point), base, max_num_envs, max_staleness)
