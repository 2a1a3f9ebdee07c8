"""When a phase is over: changes of regime are seen, slow machines are not; and what a switch must earn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tuner.following import phases
from tuner.following.phases import Report, State, pays, steps_left, verdict, watch

STEP = 1e-4  # seconds an environment step
CLOCKS = np.array([4e-4, 2e-3, 1e-2])  # of a row's environments, its search, a batch's targets


def noise(rng: np.random.Generator, count: int, slowest: float = 1.5) -> np.ndarray:
    """Of a machine: how many times slower it is at each report, in stretches of a few seconds to minutes."""
    slow = np.empty(count)
    at = 0
    while at < count:
        length = int(rng.integers(10, 200))
        slow[at : at + length] = np.exp(rng.uniform(0.0, math.log(slowest)))
        at += length
    return slow


def series(seed: int, count: int, *, change: dict[str, Any] | None = None, at: int = 0, own: float = 0.15) -> list[Report]:
    """Reports of half a second. Each clock, and the pace, has noise of its own beside the machine's; from ``at`` on, ``change``.

    ``change``: times longer that ``steps``, each of ``phases.STAGES`` and ``length`` are.
    """
    rng = np.random.default_rng(seed)
    machine = noise(rng, count)
    found = []
    for number in range(count):
        changed = change if change is not None and number >= at else {}
        jitter = np.exp(rng.normal(0.0, own, 4)) * (1.0 + 4.0 * (rng.random() < 0.02))  # now and then all of it takes five times
        factors = np.array([changed.get(stage, 1.0) for stage in phases.STAGES])
        length = 30.0 * changed.get("length", 1.0)
        found.append(
            Report(
                seconds=0.5,
                env_steps=(number + 1) * 5_000,
                progress=(number + 1) / count,
                seconds_per_env_step=float(STEP * machine[number] * jitter[0] * changed.get("steps", 1.0)),
                clocks=tuple(CLOCKS * machine[number] * jitter[1:] * factors),
                episodes=int(rng.poisson(20)),
                mean_return=float(number / count * 100.0 + rng.normal()),
                mean_length=float(length * np.exp(rng.normal(0.0, 0.1))),
                fill=min(1.0, (number + 1) / 100),
                simulations=changed.get("simulations", 16),
                cores_busy=1.5,
            )
        )
    return found


def told(reports: list[Report], state: State | None = None) -> list[tuple[int, phases.Reason]]:
    """Reasons, and the reports they were given at."""
    state = state or State()
    found = []
    for number, report in enumerate(reports):
        state, reason = watch(state, report)
        if reason is not None:
            found.append((number, reason))
    return found


def test_where_nothing_changes_hardly_a_run_in_a_hundred_is_disturbed() -> None:
    """Property: machines that are slower by up to a half for seconds or minutes, and rows that take five times as long."""
    disturbed = sum(bool(told(series(seed, 240))) for seed in range(200))
    assert disturbed <= 2


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"environment": 10.0, "steps": 3.0, "length": 10.0}, "environment", "episodes have"),
        ({"environment": 10.0}, "environment", "a step of the environments takes"),  # hidden behind another stage, so far
        ({"action": 2.5, "targets": 2.5, "steps": 4.0}, "speed", "steps cost"),  # two of three: stages cannot be told apart
        ({"action": 6.0, "steps": 1.5}, "action", "a search of self-play"),
        ({"targets": 5.0}, "targets", "making a batch's targets"),
        ({"environment": 0.1}, "environment", "a step of the environments takes 0."),
        ({"environment": 4.0, "action": 4.0, "targets": 4.0, "steps": 4.0}, "speed", "steps cost"),
    ],
)
def test_a_change_of_regime_is_seen_within_its_window(change: dict[str, float], kind: str, said: str) -> None:
    at = 100
    for seed in range(5):
        found = told(series(seed, 160, change=change, at=at))
        assert found, change
        number, reason = found[0]
        assert at < number <= at + 2.5 * phases.WINDOW_SECONDS / 0.5
        assert reason.kind == kind
        assert said in reason.text
        assert len(found) <= 2  # and once it has been told, what follows is the new phase


def test_costs_that_still_move_are_not_steady() -> None:
    change = {"steps": 5.0, "length": 10.0}
    for seed in range(5):
        for count in (12, 20):
            after, moving = (series(seed, count, change=change, at=at, own=0.05) for at in (0, count // 2))
            assert phases.is_steady(after)
            assert not phases.is_steady(moving)
            assert not phases.is_steady(moving[::-1]), "nor where they become less"


def test_the_pace_of_bursts_is_that_of_all_of_them() -> None:
    quick, slow = (series(0, 1)[0]._replace(seconds=x, seconds_per_env_step=x / 400) for x in (0.1, 1.6))
    found = phases.level([quick, quick, slow, quick])
    assert found.seconds_per_env_step == pytest.approx(1.9 / 1600)
    assert found.typical == pytest.approx(0.1 / 400), "which a few slow reports do not move"


def test_a_few_slow_reports_are_no_change() -> None:
    for seed in range(20):
        reports = series(seed, 150, own=0.05)
        for number in (60, 61, 62, 90, 91):  # 1.5 times for a second or so, and worse
            report = reports[number]
            slow = 1.5 if number < 90 else 6.0
            clocks = tuple(slow * clock for clock in report.clocks)
            reports[number] = report._replace(seconds_per_env_step=slow * report.seconds_per_env_step, clocks=clocks)
        assert told(reports) == []


def test_steps_that_cost_more_than_was_predicted_are_told() -> None:
    ((number, reason), *_) = told(series(0, 60), State(expected=STEP / 3.0))
    assert reason.kind == "prediction"
    assert number < 40
    assert told(series(0, 60), State(expected=STEP)) == []


def test_searches_that_deepen_end_a_phase_once_it_is_seen_what_they_cost() -> None:
    deeper = {"simulations": 32, "action": 1.5, "steps": 1.2}  # too little to be told by its cost
    for at in (100, 12):  # 12: before there is anything to compare with
        for seed in range(5):
            ((number, reason),) = told(series(seed, 160, change=deeper, at=at))
            assert reason.kind == "search"
            assert (reason.before.simulations, reason.now.simulations) == (16, 32)
            assert "a search makes 32 simulations, it made 16" in reason.text
            assert ("times the seconds" in reason.text) == (at == 100)
            assert at + phases.SETTLE_SECONDS / 0.5 < number < at + 2 * (phases.SETTLE_SECONDS + phases.WINDOW_SECONDS) / 0.5


def test_what_was_expected_of_shallow_searches_is_not_of_deep_ones() -> None:
    deeper = series(0, 60, change={"simulations": 32, "steps": 4.0}, at=6)
    assert [reason.kind for _, reason in told(deeper, State(expected=STEP))] == ["search"]


def test_a_program_without_clocks_is_watched_by_its_pace() -> None:
    none = (math.nan,) * 3
    steady = [report._replace(clocks=none) for report in series(3, 160)]
    assert told(steady) == []
    slowed = [report._replace(clocks=none) for report in series(3, 160, change={"steps": 3.0}, at=100)]
    assert [reason.kind for _, reason in told(slowed)][:1] == ["speed"]


def test_a_return_that_has_become_flat_is_told_once() -> None:
    rng = np.random.default_rng(0)
    level = [min(1.0, number / 100) * 50.0 for number in range(400)]
    reports = [report._replace(mean_return=mean + rng.normal()) for report, mean in zip(series(1, 400), level, strict=True)]
    found = told(reports)
    assert [reason.kind for _, reason in found] == ["return"]
    assert 199 <= found[0][0] < 320  # half of the training is the least
    constant = [report._replace(mean_return=-200.0) for report in reports]  # what was never reached costs as much each time
    assert [reason.kind for _, reason in told(constant)] == ["return"]
    nothing_ended = [report._replace(episodes=0, mean_return=math.nan) for report in reports]
    assert told(nothing_ended) == []
    rising = [report._replace(mean_return=float(number)) for number, report in enumerate(reports)]
    assert told(rising) == []


def test_rows_become_reports() -> None:
    row = {"updates": 30, "train_seconds": 3.0, "env_steps": 2_000, "episodes": 2, "mean_return": 1.5, "mean_length": 9.0}
    row |= {"num_simulations": 8, "wait_environment_seconds": 0.4, "wait_environment_count": 100}
    row |= {"cpu_process_seconds": 2.5, "cpu_simulators_seconds": 0.5}
    before = {"updates": 10, "train_seconds": 1.0}
    report = phases.read(row, before, steps_an_update=16.0, capacity=1_000, last=8_000)
    assert report is not None
    assert report.seconds_per_env_step == pytest.approx(2.0 / (20 * 16))
    assert report.clocks[0] == pytest.approx(4e-3)
    assert all(math.isnan(clock) for clock in report.clocks[1:])
    assert (report.fill, report.progress, report.simulations, report.cores_busy) == (1.0, 0.25, 8, 1.5)
    first = {"updates": 10}  # of the dispatch that compiled
    assert phases.read(row, first, steps_an_update=16.0, capacity=1_000, last=8_000) is None


def test_a_switch_must_earn_twice_what_it_costs() -> None:
    assert pays(1.5, 60.0, 5.0)
    assert not pays(1.5, 25.0, 5.0)  # 8 s to be won, 10 to be feared
    assert not pays(1.01, 1e9, 5.0)  # not even measurable
    assert not pays(0.5, 1e9, 5.0)
    assert verdict(1.2, 60.0, 5.0) == "kept"
    assert verdict(1.01, 60.0, 5.0) == "left"
    assert verdict(0.99, 60.0, 5.0) == "left"  # going back would win 0.6 s and take 5
    assert verdict(0.9, 60.0, 5.0) == "undone"
    assert verdict(0.99, 60.0, 0.0) == "undone"  # while it runs, it costs nothing


def test_what_a_return_ends_is_expected_to_take_as_many_steps_again() -> None:
    assert steps_left(100, 300, None) == 200
    assert steps_left(100, 300, 475.0) == 100  # at whatever steps cost by now
    assert steps_left(250, 300, 475.0) == 50
    assert steps_left(310, 300, None) == 0
