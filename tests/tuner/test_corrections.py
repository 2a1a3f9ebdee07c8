"""Corrections, one move at a time: against numbers worked out by hand, on a simulated machine, and by measurements."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import muzerox.allocation
from predictor import Hardware, Measurement, Outcome, RuntimePredictor, Workload
from tuner import allocate, balance, corrections, resources
from tuner.allocate import Limits
from tuner.balance import NOTHING, Seen, correct
from tuner.bridge import Config, UserError, concrete, get
from tuner.history import Trial
from tuner.measuring.workload import describe
from tuner.neighbourhood import space_around

ROOM = Limits(np.zeros(3), np.full(3, 100.0))
ZERO = np.zeros(3)


def seen(wanted: list[float], seconds: float = 1.0, **fields: Any) -> Seen:
    """What a run says; as if nothing limited, and the predictor had no opinion."""
    return Seen(**{"seconds": seconds, "wanted": np.array(wanted), "limits": ROOM, "gain": ZERO, "loss": ZERO, **fields})


def moves(allocated: list[float], wanted: list[float], **fields: Any) -> tuple[list[float], int]:
    """The allocation after one correction, and the resource that moved."""
    state = correct(balance.start(allocated), seen(wanted, **fields))
    return list(state.allocated), state.moved


@pytest.mark.parametrize(
    ("allocated", "wanted", "expected"),
    [
        # B = (4 + 3 + 1) / 3: the one of CPU and memory that is farthest over.
        ([4.0, 3.0, 1.0], [1.0, 1.0, 1.0], [1.0, 3.0, 1.0]),
        ([3.0, 4.0, 1.0], [1.0, 1.0, 1.0], [3.0, 1.0, 1.0]),
        # The accelerator is farther over, and comes after both; not to be touched within d of its demand.
        ([2.0, 1.0, 9.0], [1.0, 1.0, 1.0], [1.0, 1.0, 9.0]),
        ([1.2, 1.0, 9.0], [1.0, 1.0, 1.0], [1.2, 1.0, 1.0]),
        # B = (0.2 + 0.5 + 0.5) / 3: the accelerator first, although it lacks least; then the bottleneck.
        ([0.2, 1.0, 0.5], [1.0, 2.0, 1.0], [0.2, 1.0, 1.0]),
        ([0.2, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.0, 1.0]),
        ([1.0, 1.0, 0.0], [2.0, 4.0, 0.0], [1.0, 4.0, 0.0]),  # there is no accelerator
        # Inside the dead band: of the mean, and of each.
        ([1.2, 0.8, 1.0], [1.0, 1.0, 1.0], [1.2, 0.8, 1.0]),
        ([1.7, 1.0, 1.0], [1.0, 1.0, 1.0], [1.7, 1.0, 1.0]),  # B = 1.23
        # B = (0.25 + 1.5 + 1.25) / 3 = 1: the mean hides that cores are short.
        ([0.25, 1.5, 1.25], [1.0, 1.0, 1.0], [1.0, 1.5, 1.25]),
    ],
)
def test_one_resource_moves_in_the_order_of_the_method(
    allocated: list[float], wanted: list[float], expected: list[float]
) -> None:
    found, moved = moves(allocated, wanted)
    assert found == expected
    assert (moved == NOTHING) == (allocated == expected)


def test_it_moves_no_farther_than_the_limits() -> None:
    limits = Limits(np.array([2.0, 1.0, 0.0]), np.array([3.0, 9.0, 9.0]))
    assert moves([8.0, 1.0, 1.0], [1.0, 1.0, 1.0], limits=limits) == ([2.0, 1.0, 1.0], balance.CORES)
    assert moves([1.0, 1.0, 0.0], [6.0, 1.0, 0.0], limits=limits) == ([3.0, 1.0, 0.0], balance.CORES)
    assert moves([3.0, 1.0, 0.0], [6.0, 1.0, 0.0], limits=limits) == ([3.0, 1.0, 0.0], NOTHING)  # starved, and nothing to be had


def test_ties_go_by_what_the_predictor_says_a_unit_is_worth() -> None:
    # Both at 4.0 and 3.9 times their demand: less than 5% apart, so the one whose loss costs less is reduced.
    over = {"allocated": [4.0, 3.9, 1.0], "wanted": [1.0, 1.0, 1.0]}
    assert moves(**over, loss=np.array([0.3, 0.1, 0.0]))[1] == balance.MEMORY
    assert moves(**over, loss=np.array([0.1, 0.3, 0.0]))[1] == balance.CORES
    short = {"allocated": [1.0, 1.02, 1.0], "wanted": [4.0, 4.0, 1.0]}
    assert moves(**short, gain=np.array([0.1, 0.3, 0.0]))[1] == balance.MEMORY
    assert moves(**short, gain=np.array([0.3, 0.1, 0.0]))[1] == balance.CORES
    clear = {"allocated": [1.0, 1.2, 1.0], "wanted": [4.0, 4.0, 1.0]}
    assert moves(**clear, gain=np.array([0.1, 0.3, 0.0]))[1] == balance.CORES  # 0.25 and 0.30 are no tie


def test_a_move_that_costs_more_than_two_percent_is_undone_until_demand_changes() -> None:
    state = correct(balance.start([4.0, 1.0, 1.0]), seen([1.0, 1.0, 1.0], 1.0))
    assert list(state.allocated) == [1.0, 1.0, 1.0]
    kept = correct(state, seen([1.0, 1.0, 1.0], 1.019))
    assert list(kept.allocated) == [1.0, 1.0, 1.0]
    undone = correct(state, seen([1.0, 1.0, 1.0], 1.021))
    assert list(undone.allocated) == [4.0, 1.0, 1.0]
    assert (undone.moved, undone.seconds) == (NOTHING, 1.0)
    again = correct(undone, seen([1.0, 1.0, 1.0], 1.0))
    assert list(again.allocated) == [4.0, 1.0, 1.0]  # it is not tried twice
    nearly = correct(again, seen([1.2, 1.0, 1.0], 1.0))
    assert list(nearly.allocated) == [4.0, 1.0, 1.0]
    other = correct(nearly, seen([1.3, 1.0, 1.0], 1.0))
    assert list(other.allocated) == [1.3, 1.0, 1.0]  # another demand


def test_what_was_undone_keeps_no_other_resource_from_moving() -> None:
    state = correct(balance.start([4.0, 3.0, 1.0]), seen([1.0, 1.0, 1.0], 1.0))
    other = correct(state, seen([1.0, 1.0, 1.0], 2.0))
    # What it goes back to was measured: the other one moves from there at once, and is judged by that.
    assert list(other.allocated) == [4.0, 1.0, 1.0]
    assert (other.moved, other.seconds, list(other.before)) == (balance.MEMORY, 1.0, [4.0, 3.0, 1.0])
    assert list(correct(other, seen([1.0, 1.0, 1.0], 1.0)).allocated) == [4.0, 1.0, 1.0]
    assert list(correct(other, seen([1.0, 1.0, 1.0], 1.1)).allocated) == [4.0, 3.0, 1.0]


def test_a_resource_goes_elsewhere_where_the_run_that_did_not_pay_says_so() -> None:
    groups = (balance.CORES, balance.MEMORY, *[balance.ACCELERATOR] * 3)
    wide = Limits(np.zeros(5), np.full(5, 100.0))

    def told(seconds: float, *division: float) -> Seen:
        return Seen(seconds, np.array([4.0, 8.0, *division]), wide, np.zeros(5), np.zeros(5))

    state = correct(balance.start([4.0, 8.0, 2.0, 1.0, 1.0]), told(1.0, 1.0, 1.0, 2.0), groups)
    assert list(state.allocated[2:]) == [1.0, 1.0, 2.0]
    again = correct(state, told(1.5, 1.0, 1.0, 2.0), groups)
    assert list(again.allocated[2:]) == [2.0, 1.0, 1.0]
    elsewhere = correct(state, told(1.5, 1.0, 2.0, 1.0), groups)
    assert list(elsewhere.allocated[2:]) == [1.0, 2.0, 1.0]
    assert elsewhere.seconds == 1.0
    assert list(correct(elsewhere, told(1.03, 1.0, 2.0, 1.0), groups).allocated[2:]) == [2.0, 1.0, 1.0]


def test_what_was_undone_is_tried_again_once_another_move_has_paid() -> None:
    state = correct(balance.start([1.0, 1.0, 1.0]), seen([4.0, 1.0, 2.0], 1.0))
    assert state.moved == balance.ACCELERATOR
    cores = correct(state, seen([4.0, 1.0, 2.0], 1.05))  # cores are what is short
    assert list(cores.allocated) == [4.0, 1.0, 1.0]
    for seconds, accelerators in ((0.99, 1.0), (0.5, 2.0)):  # by less than 2% nothing has paid
        assert list(correct(cores, seen([4.0, 1.0, 2.0], seconds)).allocated) == [4.0, 1.0, accelerators]


def test_a_move_that_ran_out_of_memory_is_undone_and_nothing_else() -> None:
    state = correct(balance.start([4.0, 3.0, 1.0]), seen([4.0, 1.0, 1.0], 1.0))
    assert list(state.allocated) == [4.0, 1.0, 1.0]
    undone = correct(state, seen([1.0, 2.0, 1.0], math.inf))
    assert list(undone.allocated) == [4.0, 3.0, 1.0]
    assert undone.moved == NOTHING


def test_a_move_that_was_rounded_is_not_tried_again() -> None:
    state = correct(balance.start([4.0, 1.0, 1.0]), seen([1.4, 1.0, 1.0], 1.0))
    undone = correct(state._replace(allocated=np.array([1.0, 1.0, 1.0])), seen([1.4, 1.0, 1.0], 1.5))
    assert list(undone.allocated) == [4.0, 1.0, 1.0]
    assert list(correct(undone, seen([1.4, 1.0, 1.0], 1.0)).allocated) == [4.0, 1.0, 1.0]


def test_a_time_that_is_not_to_be_compared_undoes_nothing() -> None:
    state = correct(balance.start([4.0, 1.0, 1.0]), seen([1.0, 1.0, 1.0], math.nan))
    assert list(correct(state, seen([1.0, 1.0, 1.0], 9.0)).allocated) == [1.0, 1.0, 1.0]
    state = correct(balance.start([4.0, 1.0, 1.0]), seen([1.0, 1.0, 1.0], 1.0))
    assert list(correct(state, seen([1.0, 1.0, 1.0], math.nan)).allocated) == [1.0, 1.0, 1.0]


def test_what_ran_out_of_memory_gets_memory_first() -> None:
    found = moves([16.0, 1.0, 0.1], [1.0, 4.0, 1.0], seconds=math.inf)
    assert found == ([16.0, 4.0, 0.1], balance.MEMORY)
    assert moves([16.0, 1.0, 0.1], [1.0, 4.0, 1.0])[1] == balance.CORES  # had it run


def test_columns_of_one_resource_move_together() -> None:
    groups = (balance.CORES, balance.MEMORY, *[balance.ACCELERATOR] * 3)
    wide = Limits(np.zeros(5), np.full(5, 100.0))
    told = Seen(1.0, np.array([4.0, 8.0, 1.0, 1.0, 2.0]), wide, np.zeros(5), np.zeros(5))
    state = correct(balance.start([4.0, 8.0, 2.0, 1.0, 1.0]), told, groups)
    assert list(state.allocated) == [4.0, 8.0, 1.0, 1.0, 2.0]  # an acting one learns now
    assert state.moved == balance.ACCELERATOR


@pytest.fixture(scope="module")
def simulated(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("balance")


@pytest.mark.slow(40)
def test_three_corrections_settle_a_simulated_machine(simulated: ModuleType) -> None:
    """Of three pipelines, from a quarter to four times the cores and memory, under every division of the accelerators."""
    for case in simulated.draw(seed=6, count=3):
        machine = simulated.Machine(case)
        starts = machine.starts()
        assert len(starts) > 20
        found = [machine.follow(start) for start in starts]
        assert max(ratios[0] for ratios in found) > 2.0  # there was something to correct
        for start, ratios in zip(starts, found, strict=True):
            assert simulated.settled(ratios) <= 3, (start, ratios)


# This machine's --------------------------------------------------------------------------------------------------------


def ran(machine: Hardware, workload: Workload, **figures: Any) -> Measurement:
    fields = {"outcome": Outcome.OK, "seconds_per_env_step": 1e-4, "peak_bytes": 1.5 * 2**30, **figures}
    return Measurement(hardware=machine, workload=workload, **fields)


@pytest.fixture
def given() -> Config:
    """A configuration that has a core and 2 GiB."""
    return Config().replace({"allocation.cores": 1, "allocation.memory_gib": 2.0})


def test_a_run_that_kept_its_core_busy_gets_more_where_that_is_predicted_to_pay(
    machine: Hardware, workload: Workload, given: Config
) -> None:
    predictor = RuntimePredictor()
    heavy = dataclasses.replace(workload, cores=1.0, dynamics_flops=1e7, represent_flops=1e7)
    busy, idle = (ran(machine, heavy, cpu_use=use) for use in (0.99, 0.6))
    assert corrections.corrected([(given, busy)], predictor, machine).allocation.cores == 2  # 0.99 x 4 ^ 0.5, and headroom
    assert corrections.corrected([(given, idle)], predictor, machine) == given
    gain, loss = corrections.marginal(predictor, heavy, machine)
    assert gain[balance.CORES] > 0.1
    assert loss[balance.CORES] == 0.0  # there is no core less
    assert not gain[1:].any()


def test_cores_that_only_wait_are_given_up(machine: Hardware, workload: Workload, given: Config) -> None:
    predictor, two = RuntimePredictor(), given.replace("allocation.cores", 2)
    light = dataclasses.replace(workload, cores=2.0, dynamics_flops=1.0, represent_flops=1.0, predict_flops=1.0)
    heavy = dataclasses.replace(light, dynamics_flops=1e7, represent_flops=1e7)
    for work, cores in ((light, 1), (heavy, 2)):
        measured = ran(machine, work, cpu_use=1.5, peak_bytes=1.2 * 2**30)
        loss = corrections.marginal(predictor, work, machine)[1][balance.CORES]
        assert (loss < 0.02) == (cores == 1)
        assert corrections.corrected([(two, measured)], predictor, machine).allocation.cores == cores


def test_a_correction_is_undone_by_the_run_that_follows(machine: Hardware, workload: Workload, given: Config) -> None:
    predictor = RuntimePredictor()
    four = given.replace("allocation.cores", 4)
    wide = dataclasses.replace(workload, cores=4.0)
    first = ran(machine, wide, cpu_use=1.0)
    less = corrections.corrected([(four, first)], predictor, machine)
    assert less == four.replace("allocation.cores", 1)  # 1.25 wanted
    slower = ran(machine, dataclasses.replace(wide, cores=1.0), cpu_use=1.0, seconds_per_env_step=1.03e-4)
    after = corrections.corrected([(four, first), (less, slower)], predictor, machine)
    assert after == four
    assert corrections.corrected([(four, first), (less, slower), (four, first)], predictor, machine) == four
    same = ran(machine, dataclasses.replace(wide, cores=1.0), cpu_use=0.8, seconds_per_env_step=1.01e-4)
    assert corrections.corrected([(four, first), (less, same)], predictor, machine) == less


@pytest.mark.parametrize("cores", [8, 16])
def test_cores_are_corrected_to_a_choice_of_the_grid(
    cores: int, machine: Hardware, workload: Workload, tiny_threads: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muzerox.allocation, "available_cores", lambda: list(range(cores)))
    wide = dataclasses.replace(machine, cores=cores)
    start = concrete(tiny_threads.replace({"allocation.cores": cores, "allocation.memory_gib": 2.0}), "cpu")
    space = space_around(start, "neutral", "cpu")
    choices = space.options("allocation.cores")
    heavy = dataclasses.replace(workload, dynamics_flops=1e8, represent_flops=1e8)
    found = set()
    for given, use, threads in itertools.product(choices, np.linspace(0.1, cores, 4 * cores), (0, 2)):
        if use > given or threads > given:
            continue
        config = start.replace({"allocation.cores": given, "runtime.role_threads": threads})
        measured = ran(wide, dataclasses.replace(heavy, cores=float(given)), cpu_use=float(use))
        after = corrections.corrected([(config, measured)], RuntimePredictor(), wide, cores=choices)
        space.encode({knob.path: get(after, knob.path) for knob in space.knobs})  # ValueError where it is none
        assert after.allocation.cores >= threads
        found.add(after.allocation.cores)
    assert len(found) > 4
    for wanted, least in itertools.product(np.arange(0.0, cores + 1.0, 0.25), (1, 4)):
        nearest = corrections._nearest_cores(float(wanted), least, choices)
        assert nearest >= least
        assert abs(nearest - wanted) == min(abs(n - wanted) for n in choices if n >= least)


def test_from_too_little_memory(machine: Hardware, workload: Workload) -> None:
    predictor = RuntimePredictor()
    config = Config().replace({"allocation.cores": 2, "allocation.memory_gib": 0.25})
    failed = ran(machine, workload, outcome=Outcome.OUT_OF_MEMORY, seconds_per_env_step=None, peak_bytes=None)
    after = corrections.corrected([(config, failed)], predictor, machine)
    expected = predictor.predict(workload, machine).peak_bytes
    assert after.allocation.memory_gib * 2**30 >= expected * (1.0 + allocate.HEADROOM)
    assert after.allocation.cores == 2
    more = corrections.corrected([(after, failed)], predictor, machine)
    assert more.allocation.memory_gib >= 2.0 * after.allocation.memory_gib


def test_a_running_training_is_given_more_memory_for_a_change_that_needs_it(machine: Hardware, tiny: Config) -> None:
    predictor = RuntimePredictor()
    little = concrete(tiny, "cpu").replace("allocation.memory_gib", 1.0)
    more = corrections.more_memory(little, {"replay.capacity": 4_000_000}, predictor, machine)
    expected = predictor.predict(describe(little.replace("replay.capacity", 4_000_000)), machine).peak_bytes
    assert expected < more["allocation.memory_gib"] * 2**30 < expected + allocate.SAFETY_BYTES["cpu"] + 2**28
    assert corrections.more_memory(little, {"replay.capacity": 2_000_000_000}, predictor, machine) == {
        "allocation.memory_gib": machine.memory_bytes / 2**30
    }, "no more than there is"
    assert corrections.more_memory(tiny, {"replay.capacity": 4_000_000}, predictor, machine) == {}, "it may take what it likes"
    plenty = little.replace("allocation.memory_gib", machine.memory_bytes / 2**30)
    assert corrections.more_memory(plenty, {"replay.capacity": 4_000_000}, predictor, machine) == {}
    assert corrections.more_memory(little, {"runtime.loop_count": 1}, predictor, machine) == {}
    bound = corrections.more_memory(little, {"replay.capacity": 4_000_000}, predictor, machine, 1.1)
    assert bound == {"allocation.memory_gib": 1.1}, "no more than was asked for"
    assert corrections.more_memory(little, {"replay.capacity": 4_000_000}, predictor, machine, 1.0) == {}


@pytest.mark.parametrize(
    ("capacity", "gib", "nearest"), [(40_000_000, 1.0, "valid: "), (8192, 0.001, "valid: allocation.memory_gib")]
)
def test_memory_that_cannot_hold_the_replay_is_refused_with_what_would_fit(
    workload: Workload, capacity: int, gib: float, nearest: str
) -> None:
    config = Config().replace({"replay.capacity": capacity, "allocation.memory_gib": gib})
    roomy = dataclasses.replace(workload, capacity=float(capacity), observation_bytes=128.0)
    with pytest.raises(UserError, match=nearest) as caught:
        corrections.check_memory(config, roomy)
    assert "\n" not in str(caught.value)
    if capacity > 10**6:
        fits = int(caught.value.nearest)
        assert 10**6 < fits < capacity
        smaller = dataclasses.replace(roomy, capacity=float(fits))
        corrections.check_memory(config.replace("replay.capacity", fits), smaller)


def test_the_best_of_a_tuning_is_measured_again_under_the_allocation_its_runs_say(machine: Hardware, tiny: Config) -> None:
    predictor, most = RuntimePredictor(), np.array([4.0, 8 * 2**30, 0.0], np.float32)
    four = concrete(tiny.replace({"allocation.cores": 4, "allocation.memory_gib": 2.0}), "cpu")
    one, other = four.replace("allocation.cores", 1), four.replace("runtime.num_envs", 16)

    def trial(config: Config, role: str, seconds: float) -> Trial:
        measured = ran(machine, describe(config), cpu_use=1.0, seconds_per_env_step=seconds, peak_bytes=1.5 * 2**30)
        costs = dict.fromkeys(("predicted_uncalibrated", "predicted_base", "predicted"), seconds)
        places = {"changes": {}, "config": config.to_dict(), "predicted_use": (1.0, 1e9, 0.0), "temperature": 0.1}
        return Trial(number=0, role=role, measurement=measured, elapsed=1.0, **places, **costs)

    def next_of(*trials: Trial) -> Config:
        return corrections.rebalanced(trials, trials[0], predictor, machine, most, (1, 2, 3, 4))[0]

    best = trial(four, "annealed", 1.0)
    assert next_of(best) == one
    assert next_of(best, trial(other, "random", 0.5)) == one  # another's runs say nothing of it
    assert next_of(best, trial(one, corrections.ROLE, 1.01)) == one
    assert next_of(best, trial(other, "random", 2.0), trial(one, corrections.ROLE, 1.03)) == four  # undone
    often = [trial(c, corrections.ROLE, 1.01) for c in (one, four, one)]
    assert next_of(best, *often) == one  # no more corrections


def test_memory_to_be_corrected_keeps_cores_from_nothing(machine: Hardware, tiny: Config) -> None:
    """A start that asked for no memory has all there is: more than it needs, by more than its cores are."""
    predictor, most = RuntimePredictor(), np.array([4.0, machine.memory_bytes, 0.0], np.float32)
    start = concrete(tiny.replace("allocation.cores", 4), "cpu")
    used = ran(machine, describe(start), cpu_use=0.9, seconds_per_env_step=1e-4, peak_bytes=0.5 * 2**30)
    costs = dict.fromkeys(("predicted_uncalibrated", "predicted_base", "predicted"), 1e-4)
    places = {"changes": {}, "config": start.to_dict(), "predicted_use": (1.0, 1e9, 0.0), "temperature": 0.1}
    trial = Trial(number=0, role="baseline", measurement=used, elapsed=1.0, **places, **costs)
    config, _, beside = corrections.rebalanced([trial], trial, predictor, machine, most, (1, 2, 3, 4))
    assert config.allocation.cores is not None
    assert config.allocation.cores < 4
    assert (config.allocation.memory_gib or math.inf) < machine.memory_bytes / 2**30
    assert beside == (start, used), "it is measured beside what ran"


def test_a_training_is_given_memory_for_its_deepest_searches(machine: Hardware, tiny: Config) -> None:
    shallow = concrete(tiny.replace({"runtime.num_envs": 2048, "network.width": 256, "replay.capacity": 262_144}), "cpu")
    deepening = shallow.replace("search.final_simulations", 512)
    predictor, most = RuntimePredictor(), np.array([2.0, machine.memory_bytes, 0.0], np.float32)
    used = ran(machine, describe(shallow), cpu_use=1.0, seconds_per_env_step=1e-4, peak_bytes=1.0 * 2**30)
    least, given = (
        corrections.for_training(config, used, predictor, machine, most).allocation.memory_gib or math.nan
        for config in (shallow, deepening)
    )
    counts = tiny.search.num_simulations, 512
    first, last = (predictor.predict(describe(deepening.searching(count)), machine).peak_bytes / 2**30 for count in counts)
    assert last > first + 0.5
    assert given >= least + last - first - 0.25  # both in whole quarters


def test_the_cores_of_the_start_are_not_the_most_there_may_be(machine: Hardware, given: Config) -> None:
    """They are a knob; the memory that a start asks for is a bound."""
    most, state = corrections.begin(given, (), machine)
    np.testing.assert_array_equal(most, [4.0, 2 * 2**30, 0.0])
    np.testing.assert_array_equal(state.allocated, [1.0, 2 * 2**30, 0.0])
    _, next_one = resources.next_allocation(state, np.array([3.0, 2**30, 0.0], np.float32), 0.0, machine, most)
    assert next_one[0] > 3.0  # what uses three cores is given more than one
    assert corrections.begin(given, (), machine, max_cores=2)[0][0] == 2.0
    assert corrections.begin(given.replace("allocation.memory_gib", None), (), machine)[0][1] == machine.memory_bytes
