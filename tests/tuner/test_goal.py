"""What is minimised: seconds, money, energy, mixes; bounds, and budgets."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muzerox import UserError
from predictor import Hardware, Measurement, Outcome, RuntimePredictor, Workload, hardware_rates, resident_bytes
from predictor.memory import saved_bytes
from tuner.bridge import Config
from tuner.goal import Goal
from tuner.objective import cost, energy, excluded, limits_of, log_rent, price
from tuner.proposer import Proposer
from tuner.residual import make_residual
from tuner.result import parse_budget
from tuner.space import Space, knobs_up_to, make_space


@pytest.fixture
def space(workload: Workload) -> Space:
    knobs = [knob for knob in knobs_up_to("neutral", "anakin") if knob.path in ("runtime.num_envs", "allocation.cores")]
    choices = {"runtime.num_envs": (8, 64), "allocation.cores": (1, 2, 4)}
    knobs = [dataclasses.replace(knob, choices=choices[knob.path]) for knob in knobs]
    return make_space(knobs, {knob.path: knob.choices[0] for knob in knobs}, workload, lambda *_: True, 4096, math.inf)


def measured(machine: Hardware, workload: Workload, cores: float, seconds: float, watts: float | None = None) -> Measurement:
    return Measurement(
        hardware=machine,
        workload=dataclasses.replace(workload, cores=cores),
        outcome=Outcome.OK,
        seconds_per_env_step=seconds,
        joules_per_env_step=watts * seconds if watts else None,
    )


def test_goals_are_spelled() -> None:
    assert Goal.parse() == Goal()
    assert Goal.parse("cost").money == 1.0
    assert Goal.parse("time=0.6,cost=0.2").money == pytest.approx(0.25)
    assert Goal.parse("energy").energy == 1.0
    mixed = Goal.parse("time=1,energy=3")
    assert (mixed.money, mixed.energy) == (0.0, 0.75)
    assert [Goal.parse(text).name for text in ("time", "cost", "energy", "time=1,energy=3", "cost=1,energy=1")] == [
        "time",
        "cost",
        "energy",
        "time=0.25,energy=0.75",
        "cost=0.5,energy=0.5",
    ]
    assert Goal.parse("cost", "core=1, device=3").core == 1.0
    assert Goal.parse("cost", "core=1, device=3").device == 3.0
    Goal.parse("cost", "core=0,gib=0,device=1").check("gpu")
    with pytest.raises(UserError, match="prices = 'core=0,gib=0,device=1': a machine without an accelerator"):
        Goal.parse("cost", "core=0,gib=0,device=1").check("cpu")
    for arguments in (("fast",), ("time=x",), ("time=nan",), ("cost", "core"), ("time", "", 0), ("time", "", None, 0.1)):
        with pytest.raises(UserError) as caught:
            Goal.parse(*arguments)
        assert "\n" not in str(caught.value)


def test_money_is_the_price_of_an_hour_times_the_seconds(machine: Hardware, workload: Workload, space: Space) -> None:
    goal = Goal(money=1.0, core=0.3, gib=0.7, device=5.0)
    on_cpu, on_gpu = (limits_of(goal, dataclasses.replace(machine, platform=name), space, 0.0) for name in ("cpu", "gpu"))
    hour, rates = 0.3 * workload.cores + 0.7 * float(resident_bytes(workload)) / 2**30, hardware_rates(machine)
    assert float(log_rent(workload, rates, on_cpu)) == pytest.approx(math.log(hour), rel=1e-5)
    assert float(log_rent(workload, rates, on_gpu)) == pytest.approx(math.log(hour + 5.0 * workload.num_devices), rel=1e-5)
    assert float(log_rent(workload, rates, limits_of(Goal(), machine, space, 0.0))) == 0.0


@pytest.mark.parametrize(("devices", "held"), [(8, 5), (4, 4), (3, 2), (2, 2)])
def test_roles_pay_for_the_accelerators_that_they_hold(
    devices: int, held: int, machine: Hardware, threaded: Workload, space: Space
) -> None:
    roles = dataclasses.replace(threaded, acting_devices=2.0, searching_devices=1.0, learning_devices=2.0)
    gpus = dataclasses.replace(machine, platform="gpu", devices=devices)
    limits = limits_of(Goal(money=1.0, core=0.0, gib=0.0, device=3.0), gpus, space, 0.0)
    assert math.exp(float(log_rent(roles, hardware_rates(gpus), limits))) == pytest.approx(3.0 * held)


def test_four_cores_that_are_twice_as_fast_are_worth_their_time_but_not_their_price(
    machine: Hardware, workload: Workload, space: Space
) -> None:
    fast, cheap = measured(machine, workload, 4.0, 1.0), measured(machine, workload, 1.0, 2.0)

    def better(goal: Goal) -> str:
        limits = limits_of(goal, machine, space, 0.0)
        return "fast" if cost(fast, machine, limits) < cost(cheap, machine, limits) else "cheap"

    assert better(Goal()) == "fast"
    assert better(Goal(money=1.0, gib=0.0)) == "cheap"
    assert better(Goal(money=0.4, gib=0.0)) == "fast"  # log 2 of time for 0.4 log 4
    assert better(Goal(money=0.6, gib=0.0)) == "cheap"


def test_energy_is_what_was_measured_of_it(machine: Hardware, workload: Workload, space: Space) -> None:
    fast, slow = measured(machine, workload, 4.0, 1.0, watts=90.0), measured(machine, workload, 1.0, 2.0, watts=30.0)
    limits = limits_of(Goal(energy=1.0), machine, space, 0.0)
    paid = [cost(m, machine, limits) - float(price(m.workload, hardware_rates(machine), 0.0)) for m in (fast, slow)]
    np.testing.assert_allclose(paid, np.log([90.0, 60.0]), rtol=1e-5)
    assert cost(measured(machine, workload, 1.0, 2.0), machine, limits) == math.inf, "nobody measured it"
    assert math.isfinite(cost(measured(machine, workload, 1.0, 2.0), machine, limits_of(Goal(), machine, space, 0.0)))


def test_what_is_proposed_is_cheap_where_money_counts(machine: Hardware, workload: Workload, space: Space) -> None:
    """Measured: four cores are 1.5 times as fast as one."""
    cores = [knob.path for knob in space.knobs].index("allocation.cores")

    def proposed(goal: Goal) -> int:
        proposer = Proposer(space, machine, RuntimePredictor(), jax.random.key(0), 0.0, goal)
        known = []
        for point, seconds in (((0, 0), 3.0), ((0, 1), 2.5), ((0, 2), 2.0)):
            changed = dataclasses.replace(workload, num_envs=8.0)
            known.append((point, measured(machine, changed, space.choices[cores][point[cores]], seconds * 1e-4)))
        proposer.learn(known)
        point = proposer.propose(1)
        assert point is not None
        return int(space.choices[cores][point[cores]])

    assert proposed(Goal(money=1.0, gib=0.0)) == 1
    assert proposed(Goal()) > 1


@pytest.mark.parametrize(("watts_a_core", "best"), [(40.0, 1), (1.0, 4)])
def test_what_is_proposed_takes_the_energy_that_was_measured(
    machine: Hardware, workload: Workload, space: Space, watts_a_core: float, best: int
) -> None:
    """Four cores are 1.5 times as fast as one. Whether they take less energy is not for what is expected of a core to say."""
    cores = [knob.path for knob in space.knobs].index("allocation.cores")
    proposer = Proposer(space, machine, RuntimePredictor(), jax.random.key(0), 0.0, Goal(energy=1.0))
    known = []
    for point, seconds in (((0, 0), 3.0), ((0, 1), 2.5), ((0, 2), 2.0)):
        count = float(space.choices[cores][point[cores]])
        small = dataclasses.replace(workload, num_envs=8.0)
        known.append((point, measured(machine, small, count, seconds * 1e-4, watts=10.0 + watts_a_core * count)))
    proposer.learn(known)
    point = proposer.propose(1)
    assert point is not None
    assert space.choices[cores][point[cores]] == best


def test_more_memory_than_allowed_is_not_proposed(machine: Hardware, workload: Workload, space: Space) -> None:
    points = np.array([[0, 0], [1, 0]], np.int32)
    params, fitted = RuntimePredictor().params, (hardware_rates(machine), space.base, space.tables())
    sizes = [dataclasses.replace(workload, num_envs=n) for n in (8.0, 64.0)]
    # The process itself counts, and the copy that saving takes.
    held = [float(params.offsets.process_bytes + saved_bytes(size) + resident_bytes(size)) for size in sizes]
    between = sum(held) / 2 / 2**30
    assert held[0] < between * 2**30 < held[1]
    limits = limits_of(Goal(max_memory_gib=between), machine, space, 0.0)
    found = energy(jnp.asarray(points), params, *fitted, limits, excluded(space, ()), make_residual(space, (), ()))
    np.testing.assert_array_equal(np.isfinite(np.asarray(found)), [True, False])


def test_the_start_is_kept_to_the_bounds(tiny: Config, machine: Hardware) -> None:
    start = tiny.replace({"allocation.cores": 2})
    bounded = Goal(max_cores=1, max_memory_gib=2.0).bounded(start, machine)
    assert bounded.allocation.cores == 1
    assert bounded.allocation.memory_gib == 2.0
    assert Goal().bounded(start, machine) == start
    assert Goal(max_cores=4).bounded(start, machine).allocation.cores == 2
    assert Goal(max_memory_gib=64.0).bounded(start, machine) == start, "the machine has 8 GiB"


def test_no_other_is_given_more_memory_than_the_start_asks_for(tiny: Config, machine: Hardware, space: Space) -> None:
    def most(goal: Goal, asked: float | None) -> float:
        start = goal.bounded(tiny.replace("allocation.memory_gib", asked), machine)
        return float(limits_of(goal.kept_to(start), machine, space, 0.0).max_bytes) / 2**30

    assert most(Goal(), None) == 8.0
    assert most(Goal(), 3.0) == most(Goal(max_memory_gib=4.0), 3.0) == most(Goal(max_memory_gib=3.0), None) == 3.0


def test_what_is_predicted_to_run_out_of_memory_is_not_proposed(machine: Hardware, workload: Workload, space: Space) -> None:
    """On an accelerator by its own memory, and nowhere by more than has been seen to fail."""
    points, params = jnp.asarray([[0, 0], [1, 0]], jnp.int32), RuntimePredictor().params
    small, large = (float(resident_bytes(dataclasses.replace(workload, num_envs=n))) for n in (8.0, 64.0))
    saved = float(params.offsets.process_bytes + saved_bytes(workload))
    none = excluded(space, ()), make_residual(space, (), ())

    def possible(hardware: Hardware, feasible_bytes: float, on_device: float = math.inf) -> list[bool]:
        offsets = params.offsets._replace(
            feasible_bytes=jnp.float32(feasible_bytes), feasible_device_bytes=jnp.float32(on_device)
        )
        seen = params._replace(offsets=offsets)
        limits = limits_of(Goal(), hardware, space, 0.0)
        found = energy(points, seen, hardware_rates(hardware), space.base, space.tables(), limits, *none)
        return np.isfinite(np.asarray(found)).tolist()

    gpu = dataclasses.replace(machine, platform="gpu", device_memory_bytes=int((small + large) / 2))
    assert possible(gpu, math.inf) == [True, False]
    roomy = dataclasses.replace(gpu, device_memory_bytes=int(2 * large))
    assert possible(roomy, math.inf) == [True, True]
    assert possible(roomy, math.inf, on_device=(small + large) / 2) == [True, False]
    assert possible(machine, math.inf) == [True, True]
    assert possible(machine, saved + (small + large) / 2) == [True, False]


# Budgets


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("4m", 240.0), ("1.5h", 5400.0), (45, 45.0), (" 2M ", 120.0)])
def test_budgets(text: str | float, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 minutes", "-4m", "0", "nan", "inf", "3s", "9d", "1e9h", None])
def test_budgets_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="budget") as caught:
        parse_budget(text)
    assert "nearest valid" in str(caught.value)
    assert "\n" not in str(caught.value)
