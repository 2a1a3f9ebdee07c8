"""What is proposed after what was measured, on a grid whose seconds are known everywhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from predictor import Hardware, Measurement, Outcome, RuntimePredictor, Workload
from tuner import proposer as proposer_module
from tuner.objective import ANY, every_point_with
from tuner.proposer import (
    COLDEST,
    COOLING,
    NOTHING,
    RANDOM_EVERY,
    SWITCHED_EVERY,
    SWITCHED_FIRST,
    VARIED_FIRST,
    Point,
    Proposer,
    _starts,
    temperature_of,
)
from tuner.residual import evaluate
from tuner.space import Space, knobs_up_to, make_space, workloads

AXES = {
    "runtime.num_envs": (8, 32, 128),
    "runtime.loop_count": (1, 4, 16, 64),
    "search.engine": ("mctx", "fused"),
    "replay.placement": ("device", "host"),
}
Measure = Callable[[Point], Measurement]


@pytest.fixture
def space(workload: Workload) -> Space:
    knobs = [knob for knob in knobs_up_to("neutral", "anakin") if knob.path in AXES]
    knobs = [dataclasses.replace(knob, choices=AXES[knob.path]) for knob in knobs]
    return make_space(knobs, {knob.path: knob.choices[0] for knob in knobs}, workload, lambda *_: True, 4096, math.inf)


@pytest.fixture
def measured(space: Space, machine: Hardware) -> Measure:
    """Twice as slow as typical, and twice again with our engine, which no predictor can know before."""

    def measure(point: Point) -> Measurement:
        fields = workloads(space.base, space.tables(), jnp.array([point]))
        workload = Workload(**{field.name: float(getattr(fields, field.name)[0]) for field in dataclasses.fields(Workload)})
        seconds = 2.0 * math.exp(float(RuntimePredictor().log_seconds(workload, machine))) * (1.0 + workload.search_engine)
        return Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, seconds_per_env_step=seconds)

    return measure


def make(space: Space, machine: Hardware, seed: int = 0) -> Proposer:
    return Proposer(space, machine, RuntimePredictor(), jax.random.key(seed), 0.0)


def search(proposer: Proposer, start: Point, measured: Measure, count: int) -> list[list[Point]]:
    """What every process, ``count`` at most, was asked for: its point, and with other loop counts as a tuning has them timed."""
    processes: list[list[Point]] = []
    point: Point | None = start
    axis = [knob.path for knob in proposer.space.knobs].index("runtime.loop_count")
    options = proposer.space.choices[axis]
    while point is not None and len(processes) < count:
        further = [options.index(loops) for loops in proposer.further_loop_counts(point)]
        processes.append([point, *((*point[:axis], index, *point[axis + 1 :]) for index in further)])
        proposer.learn([(asked, measured(asked)) for process in processes for asked in process])
        point = proposer.propose(len(processes))
    return processes


def _live(space: Space) -> list[bool]:
    return [knob.cost == "live" for knob in space.knobs]


def test_it_comes_near_the_best_and_asks_nothing_twice(space: Space, machine: Hardware, measured: Measure) -> None:
    everywhere = [tuple(int(x) for x in point) for point in np.ndindex(*space.sizes)]
    seconds = {point: measured(point).seconds_per_env_step or math.inf for point in everywhere}
    slowest = max(everywhere, key=lambda point: seconds[point])
    processes = search(make(space, machine), slowest, measured, 8)
    found = [point for process in processes for point in process]
    assert len({tuple(np.where(_live(space), ANY, process[0])) for process in processes}) == 8
    assert len(set(found)) == len(found)
    assert min(seconds[point] for point in found) <= 1.02 * min(seconds.values())
    assert processes == search(make(space, machine), slowest, measured, 8)  # by the key alone


def test_it_ends_when_every_process_was_measured_or_covered(space: Space, machine: Hardware, measured: Measure) -> None:
    assert len(search(make(space, machine), space.start, measured, 99)) <= 12  # of 3 x 2 x 2 processes
    proposer = make(space, machine)
    proposer.learn([(space.start, measured(space.start))])
    for point in np.ndindex(*space.sizes):
        proposer.cover(point)
    assert proposer.propose(1) is None


def test_one_in_so_many_is_drawn_at_random(space: Space, machine: Hardware, measured: Measure) -> None:
    proposer = make(space, machine)
    proposer.learn([(space.start, measured(space.start))])
    roles = [proposer.role_of(number) for number in range(1, 1 + RANDOM_EVERY)]
    assert roles.count("random") == 1
    learnt = []
    for seed in range(6):
        learnt.append(make(space, machine, seed))
        learnt[-1].learn([(space.start, measured(space.start))])
    drawn, annealed = ({proposer.propose(number) for proposer in learnt} for number in (RANDOM_EVERY, 1))
    assert len(drawn) > len(annealed)


def test_where_chance_finds_nothing_it_is_annealed(
    space: Space, machine: Hardware, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(point: Point) -> object:
        return space.program(space.decode(point))

    monkeypatch.setattr(proposer_module, "_DRAWN", 1)
    missed = 0
    for seed in range(6):
        proposer = make(space, machine, seed)
        proposer.learn([(space.start, measured(space.start))])
        *others, left = [point for point in np.ndindex(*space.sizes) if program(point) != program(space.start)]
        for point in others:
            if program(point) != program(left):
                proposer.cover(point)
        found = proposer.propose(RANDOM_EVERY)
        assert found is not None
        assert program(found) == program(left)
        key = jax.random.fold_in(jax.random.key(seed), RANDOM_EVERY)
        drawn = np.asarray(jax.random.uniform(key, (1, len(space.sizes))) * space.sizes[None, :], np.int32)
        missed += not np.isfinite(proposer.energies(drawn))[0]
    assert missed > 0, "chance found it whenever it was asked"


def _moved(space: Space, knobs: list[int]) -> Point:
    """The start, with the next choice of each of ``knobs``."""
    choices = zip(space.start, space.sizes, strict=True)
    return tuple((choice + (knob in knobs)) % int(size) for knob, (choice, size) in enumerate(choices))


def test_a_knob_that_was_never_moved_is_moved(space: Space, machine: Hardware, measured: Measure) -> None:
    """Of least energy of those that move it; once every knob was moved such trials are like others."""
    coarse = [i for i, knob in enumerate(space.knobs) if knob.cost != "live" and not knob.fine]
    assert len(coarse) > 1
    stays, moves = coarse[0], coarse[1:]

    proposer = make(space, machine)
    known = [space.start, _moved(space, moves)]
    proposer.learn([(point, measured(point)) for point in known])
    assert proposer.role_of(VARIED_FIRST) == "varied"
    point = proposer.propose(VARIED_FIRST)
    assert point is not None
    assert point[stays] != space.start[stays]
    everywhere = np.array([p for p in np.ndindex(*space.sizes) if p[stays] != space.start[stays]])
    assert proposer.energies(np.array([point]))[0] == pytest.approx(proposer.energies(everywhere).min(), abs=1e-5)
    proposer.learn([(p, measured(p)) for p in (*known, point)])
    assert proposer.role_of(VARIED_FIRST) == "annealed"
    assert proposer.propose(VARIED_FIRST) is not None


def test_a_choice_of_the_best_is_changed_alone(space: Space, machine: Hardware, measured: Measure) -> None:
    """Of the knobs without an order, by least energy, while there is one that was not measured; early ones are annealed."""
    named = [i for i, knob in enumerate(space.knobs) if knob.scale == "name" and knob.cost != "live"]
    assert len(named) == 2
    proposer = make(space, machine)
    known = [space.start, _moved(space, list(range(len(space.sizes))))]
    proposer.learn([(point, measured(point)) for point in known])
    assert proposer.role_of(SWITCHED_FIRST - SWITCHED_EVERY) == "annealed"
    best = min(known, key=lambda point: measured(point).seconds_per_env_step or math.inf)
    single = [tuple(1 - choice if axis == i else choice for axis, choice in enumerate(best)) for i in named]  # of two each
    for number in (SWITCHED_FIRST, SWITCHED_FIRST + SWITCHED_EVERY):
        assert proposer.role_of(number) == "switched"
        proposed = proposer.propose(number)
        assert proposed is not None
        point = tuple(best[i] if live else choice for i, (live, choice) in enumerate(zip(_live(space), proposed, strict=True)))
        assert point in single
        energies = proposer.energies(np.array(single))
        assert proposer.energies(np.array([point]))[0] == pytest.approx(energies.min(), abs=1e-6)
        proposer.cover(point)
    assert proposer.role_of(SWITCHED_FIRST) == "annealed"


def test_of_what_was_never_moved_cores_go_first(space: Space, machine: Hardware, measured: Measure) -> None:
    """However good the predictor thinks the others."""
    (cores,) = (
        dataclasses.replace(knob, choices=(1, 2)) for knob in knobs_up_to("neutral", "anakin") if knob.path == "allocation.cores"
    )
    knobs = [*space.knobs, cores]
    start = {knob.path: knob.choices[-1] for knob in knobs}
    wider = make_space(knobs, start, space.base, lambda *_: True, 4096, math.inf)
    proposer = make(wider, machine)
    proposer.learn([(wider.start, measured(wider.start[:-1]))])
    point = proposer.propose(VARIED_FIRST)
    assert point is not None
    assert point[-1] != wider.start[-1]
    for other in np.ndindex(*wider.sizes):
        if other[-1] != wider.start[-1]:
            proposer.cover(other)
    point = proposer.propose(VARIED_FIRST)
    assert point is not None, "where another number cannot be, other knobs are moved"
    assert point[-1] == wider.start[-1]
    assert any(point[i] != wider.start[i] for i, knob in enumerate(knobs) if knob.cost != "live")
    moved = _moved(wider, [len(knobs) - 1])
    proposer.learn([(p, measured(p[:-1])) for p in (wider.start, moved)])
    assert proposer.role_of(VARIED_FIRST) == "varied", "others have not moved yet"


def test_where_what_was_never_moved_cannot_be_it_is_annealed(space: Space, machine: Hardware, measured: Measure) -> None:
    proposer = make(space, machine)
    stays = next(i for i, knob in enumerate(space.knobs) if knob.cost != "live" and not knob.fine)
    others = [i for i in range(len(space.sizes)) if i != stays]
    known = [space.start, _moved(space, others)]
    proposer.learn([(point, measured(point)) for point in known])
    for point in np.ndindex(*space.sizes):
        if point[stays] != space.start[stays]:
            proposer.cover(point)
    point = proposer.propose(VARIED_FIRST)
    assert point is not None
    assert point[stays] == space.start[stays]


def test_what_failed_is_never_the_best(space: Space, machine: Hardware, measured: Measure) -> None:
    proposer = make(space, machine)
    fine = measured(space.start)
    failed = dataclasses.replace(fine, outcome=Outcome.CRASHED, seconds_per_env_step=None)
    assert proposer.cost(failed) == math.inf
    assert proposer.cost(fine) == pytest.approx(math.log(fine.seconds_per_env_step or 0.0) + proposer.price(fine))
    assert 0.0 < proposer.price(fine) < 0.02
    proposer.learn([(space.start, failed)])
    assert proposer.expected_gain((1, 0, 0, 0)) == math.inf, "whatever runs is better"


def test_a_process_times_the_loop_counts_that_may_matter(space: Space, machine: Hardware, measured: Measure) -> None:
    proposer = make(space, machine)
    assert proposer.further_loop_counts(space.start) == [64]  # of the start the best, however little it gains
    proposer.learn([(space.start, measured(space.start))])
    other, slow = space.decode(space.start), space.decode(space.start)
    other |= {"runtime.loop_count": 64, "search.engine": "fused"}
    slow |= {"runtime.loop_count": 1, "search.engine": "fused"}
    assert proposer.further_loop_counts(space.encode(other)) == []  # later on only what is expected to be better
    assert proposer.further_loop_counts(space.encode(slow)) == [64]
    # Updates that take so long that dispatching them is nothing.
    heavy = dataclasses.replace(space, base=dataclasses.replace(space.base, batch_size=1e6, capacity=1e8))
    assert make(heavy, machine).further_loop_counts(heavy.start) == []
    threads = dataclasses.replace(space, knobs=tuple(dataclasses.replace(knob, cost="rebuild") for knob in space.knobs))
    assert make(threads, machine).further_loop_counts(threads.start) == []


def test_what_is_proposed_has_the_loop_count_that_is_predicted_to_be_best(
    space: Space, machine: Hardware, measured: Measure
) -> None:
    """Whatever luck has shown of others: of a program that is measured once, nothing tells a percent of dispatching."""
    proposer = make(space, machine)
    lucky = dataclasses.replace(measured(space.start), seconds_per_env_step=1e-6)
    proposer.learn([(space.start, lucky)])
    axis = [knob.path for knob in space.knobs].index("runtime.loop_count")
    assert space.choices[axis][space.start[axis]] != 64, "or it is no test"
    for number in (1, 4, 8, 20):  # annealed, varied, switched and random
        point = proposer.propose(number)
        assert point is not None
        assert space.choices[axis][point[axis]] == 64
    threads = dataclasses.replace(space, knobs=tuple(dataclasses.replace(knob, cost="rebuild") for knob in space.knobs))
    proposer = make(threads, machine)
    proposer.learn([(space.start, lucky)])
    chosen = [space.choices[axis][(proposer.propose(number) or space.start)[axis]] for number in (1, 20)]
    assert set(chosen) != {64}, "where it is a program of its own it is chosen like others"


def test_chains_go_on_from_where_they_stood(space: Space, machine: Hardware, measured: Measure) -> None:
    proposer = make(space, machine)
    proposer.learn([(space.start, measured(space.start))])
    first = proposer.propose(1)
    assert first is not None
    stood = proposer._chains
    assert stood is not None
    starts = _starts(first, stood)
    np.testing.assert_array_equal(starts[1::2], stood[1::2])
    assert (starts[::2] == np.array(first)).all()


def test_curiosity_tries_what_least_is_known_of(space: Space, machine: Hardware, measured: Measure) -> None:
    """Of two choices that are expected to be alike, the one that was not measured yet."""
    axis = [knob.path for knob in space.knobs].index("replay.placement")
    curious = Proposer(space, machine, RuntimePredictor(), jax.random.key(0), 0.0, curiosity=3.0)
    point = list(space.start)
    curious.learn([(tuple(point), measured(tuple(point)))])
    one, other = np.array([point, point])
    one[0] = other[0] = 1
    other[axis] = 1 - other[axis]
    plain = Proposer(space, machine, RuntimePredictor(), jax.random.key(0), 0.0, curiosity=0.0)
    plain.learn([(tuple(point), measured(tuple(point)))])
    gap, without = (float(np.subtract(*p.energies(np.stack([one, other])))) for p in (curious, plain))
    assert gap > without + 0.01


def test_the_expected_gain_is_what_a_trial_gains_on_average(space: Space, machine: Hardware, measured: Measure) -> None:
    proposer = make(space, machine)
    everywhere = [tuple(int(x) for x in point) for point in np.ndindex(*space.sizes)]
    known = [(point, measured(point)) for point in everywhere[::7][:4]]
    proposer.learn(known)
    at = np.array([point for point, _ in known])
    best = min(proposer.log_seconds(at) + [proposer.price(measurement) for _, measurement in known])
    rng, gains = np.random.default_rng(0), []
    for point in everywhere:
        if not np.isfinite(proposer.energies(np.array([point]))[0]):
            assert proposer.expected_gain(point) == 0.0  # measured, or timed beside what was
            continue
        _, deviation = evaluate(proposer._residual, jnp.array([point]))
        expected = proposer.log_seconds(np.array([point]))[0] + proposer.price(measured(point))
        drawn = expected + float(deviation[0]) * rng.standard_normal(200_000)
        gains.append(float(np.mean(np.maximum(best - drawn, 0.0))))
        assert proposer.expected_gain(point) == pytest.approx(gains[-1], rel=0.05, abs=2e-4)
    assert max(gains) > NOTHING > min(gains)  # some are worth a trial, and some are not


def test_a_gain_is_expected_over_what_was_not_lucky(space: Space, machine: Hardware, measured: Measure) -> None:
    """A single measurement far below those around it says less than it measured."""
    proposer = make(space, machine)
    points = [(envs, count, 0, 0) for envs in range(3) for count in (0, 2, 3)]
    known = [(point, measured(point)) for point in points]
    proposer.learn(known)
    index = int(np.argmin([proposer.cost(measurement) for _, measurement in known]))
    point, best = known[index]
    assert best.seconds_per_env_step is not None
    lucky = dataclasses.replace(best, seconds_per_env_step=0.85 * best.seconds_per_env_step)
    proposer.learn([*known[:index], (point, lucky), *known[index + 1 :]])
    open_ = [(envs, 1, engine, 0) for envs in range(3) for engine in (0, 1)]
    gains = [proposer.expected_gain(p) for p in open_]
    proposer._least_expected = lambda: proposer.cost(lucky)  # type: ignore[method-assign]
    over_luck = [proposer.expected_gain(p) for p in open_]
    assert max(gains) > max(over_luck) + 0.003


def test_a_gain_is_expected_over_what_may_be_chosen(space: Space, machine: Hardware, measured: Measure) -> None:
    """What was refused since it was measured is nothing that must be beaten."""
    proposer = make(space, machine)
    fast, slow = ((0, 3, engine, 0) for engine in (0, 1))
    assert (measured(fast).seconds_per_env_step or 0.0) < (measured(slow).seconds_per_env_step or 0.0)
    proposer.learn([(fast, measured(fast)), (slow, measured(slow))])
    other = (1, 3, 1, 0)
    before = proposer.expected_gain(other)
    proposer.cover(every_point_with(space, "search.engine", "mctx"))
    assert proposer.expected_gain(other) > before + 0.1


def test_the_outer_temperature_falls_and_stays() -> None:
    found = [temperature_of(number) for number in range(1, 40)]
    np.testing.assert_allclose(found[:14], COOLING ** np.arange(14))
    assert found[14:] == [COLDEST] * 25
