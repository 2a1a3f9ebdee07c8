"""Which precision levels a tuning trusts: real drifts in subprocesses, limits, what is kept and what is never proposed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tuner.levels
import tuner.measuring.drift
from muzerox.drift import Learnt, Numbers, compare, learn_and_draw, make_numbers
from muzerox.types import EnvSpec
from predictor import Hardware, Measurement, Outcome, Workload
from tuner.bridge import Config, UserError, concrete
from tuner.history import Trial, TuneDir
from tuner.levels import Levels
from tuner.measuring.drift import LIMITS, Drift, Figures, make_figures, measure_drift
from tuner.measuring.worker_client import Worker
from tuner.objective import ANY, every_point_with, excluded
from tuner.space import knobs_up_to, make_space

FINE = Figures(
    policy_kl=(1e-4, 2e-4),
    policy_kl_max=0.01,
    value_error=(0.002, 0.004),
    reward_error=(0.001,),
    value_spread=3.0,
    policy_learnt=0.1,
    actions_agree=0.99,
    weights_differ=0.01,
    gradient_error=0.05,
    updates=1000,
    training_seconds=4.0,
    examples=128,
)
ACCEPTED = Drift(level="O2", speedup=1.6, figures=FINE, seconds=12.0)
REFUSED = Drift(level="O1", speedup=1.1, figures=dataclasses.replace(FINE, policy_kl=(0.5, 0.1)), seconds=12.0)


def test_a_level_within_the_limits_is_accepted_and_the_line_has_figures() -> None:
    assert ACCEPTED.accepted
    line = ACCEPTED.explain()
    for part in ("O2: 1.60x as good", "0.0002 nats", "limit 0.001", "0.40% of their spread", "1,000 updates", "accepted"):
        assert part in line, part
    assert "\n" not in line


BEYOND: dict[str, Any] = {
    "policy_kl": (0.0, 1.01 * LIMITS.policy_kl),
    "policy_kl_max": 1.01 * LIMITS.policy_kl_max,
    "value_error": (1.01 * LIMITS.value_error, 0.0),
    "reward_error": (1.01 * LIMITS.reward_error,),
    "weights_differ": 1.01 * LIMITS.weights_differ,
    "policy_learnt": 0.99 * LIMITS.policy_learnt,
    "gradient_error": 1.01 * LIMITS.gradient_error,
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_a_limit_is_refused_and_named(name: str) -> None:
    for value in (BEYOND[name], (math.nan,) if isinstance(BEYOND[name], tuple) else math.nan):
        drift = dataclasses.replace(ACCEPTED, figures=dataclasses.replace(FINE, **{name: value}))
        assert not drift.accepted
        complaint = drift.complaints[-1]
        assert len(drift.complaints) == (2 if name == "policy_learnt" else 1)  # the limit on policies follows it
        assert complaint in drift.explain().partition("refused for")[2]


def test_policies_that_have_learnt_little_may_differ_by_little() -> None:
    figures = dataclasses.replace(FINE, policy_learnt=0.9 * max(FINE.policy_kl) / LIMITS.policy_share)
    assert max(figures.policy_kl) < LIMITS.policy_kl
    assert len(dataclasses.replace(ACCEPTED, figures=figures).complaints) == 1


def test_every_limit_is_tested() -> None:
    assert {*BEYOND, "policy_share"} == set(LIMITS._fields)


def test_a_drift_survives_json() -> None:
    for drift in (ACCEPTED, REFUSED, Drift(level="O1", figures=None, failure="timeout: no answer")):
        assert Drift.from_dict(json.loads(json.dumps(drift.to_dict()))) == drift


@pytest.fixture(scope="module")
def learnt() -> tuple[Config, EnvSpec, Learnt]:
    config = Config.preset("gymnax:CartPole-v1").replace({"replay.min_size": 256, "network.width": 32, "runtime.num_envs": 16})
    config = config.replace({"train.batch_size": 64, "precision.level": "O0", "search.num_simulations": 4})
    return (config, *learn_and_draw(config, seconds=30.0, examples=64))  # by updates: how many a second has is the machine's


Damage = Callable[[np.ndarray], np.ndarray]


def _noisy(x: np.ndarray) -> np.ndarray:
    return x * (1.0 + 0.1 * np.random.default_rng(0).standard_normal(x.shape).astype(np.float32))


def _coarse(x: np.ndarray) -> np.ndarray:
    """Two bits after the leading one, as float8_e5m2 has them."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 8.0) / 8.0, exponent).astype(np.float32)


def figures_of(base: Numbers, other: Numbers, learnt: Learnt) -> Figures:
    found = compare(base, other, learnt.replayed)
    return make_figures(found | {"updates": learnt.updates, "training_seconds": learnt.seconds, "examples": 64})


@pytest.mark.slow
def test_damaged_parameters_are_refused(learnt: tuple[Config, EnvSpec, Learnt]) -> None:
    config, spec, found = learnt
    numbers, key = make_numbers(config, spec), jax.random.key(0)
    base = numbers(key, found.params, found.replayed)
    same = Drift(level="O0", figures=figures_of(base, numbers(key, found.params, found.replayed), found))
    assert same.accepted, same.explain()
    for damage in (_noisy, _coarse):
        damaged = numbers(key, jax.tree.map(damage, found.params), found.replayed)
        drift = Drift(level="O0", figures=figures_of(base, damaged, found))
        assert not drift.accepted, drift.explain()


@pytest.mark.slow(70)
@pytest.mark.usefixtures("compiling_as_users_do")
@pytest.mark.parametrize(
    "env",
    [
        "gymnax:CartPole-v1",
        "gymnasium:CartPole-v1",
        pytest.param("pgx:tic_tac_toe", marks=pytest.mark.thorough),
        pytest.param("gymnax:Breakout-MinAtar", marks=pytest.mark.thorough),
    ],
)
def test_the_levels_that_ship_are_accepted(env: str, machine: Hardware) -> None:
    config = Config.preset(env).replace("precision.level", "O0")
    levels = ["O0", "O1", "O1_float16", "O2"]
    found = measure_drift(config, levels, hardware=machine, timeout=600.0)
    assert set(found) == set(levels)
    for level, drift in found.items():
        assert drift.accepted, drift.explain()
        assert drift.figures is not None
        assert (max(drift.figures.policy_kl) == 0.0) == (level == "O0")
        assert (max(drift.figures.value_error) == 0.0) == (level == "O0")
        assert level == "O0" or drift.figures.gradient_error > 0.0
        assert drift.figures.updates >= 64


def test_a_subprocess_measures_it(tiny: Config, machine: Hardware) -> None:
    found = measure_drift(tiny, ["O2"], hardware=machine, seconds=0.2, examples=16)
    narrow = found["O2"].figures
    assert narrow is not None
    assert 0.0 < max(narrow.policy_kl) < 0.1
    assert narrow.examples == 16
    assert found["O2"].seconds > narrow.training_seconds


@pytest.fixture
def trials(tiny: Config, machine: Hardware, workload: Workload) -> list[Trial]:
    """The start, and a trial of O1 and of O2 that are 1.5 and 1.01 times as fast."""
    start = concrete(tiny.replace("precision.level", "O0"), "cpu")

    def trial(number: int, level: str, seconds: float) -> Trial:
        measured = Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, seconds_per_env_step=seconds)
        config = start.replace({"precision.level": level, "precision.loss_scale": "none"}).to_dict()
        expected = dict.fromkeys(("predicted_uncalibrated", "predicted_base", "predicted"), seconds)
        what = {"role": "annealed", "changes": {"precision.level": level}, "config": config, "measurement": measured}
        return Trial(number=number, predicted_use=(1.0, 1.0, 0.0), temperature=1.0, elapsed=1.0, **what, **expected)

    return [trial(0, "O0", 3e-5), trial(1, "O1", 2e-5), trial(2, "O2", 2.97e-5)]


def seconds_of(trial: Trial) -> float:
    """What is minimised."""
    return trial.seconds or math.inf


class DyingWorker(Worker):
    """A real one, killed as soon as it has been asked."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.kill(signal.SIGSEGV)


def test_a_worker_that_dies_is_one_line_and_the_level_is_out_also_after_a_resume(
    trials: list[Trial], machine: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, folder, said = Config.from_dict(trials[0].config), TuneDir(tmp_path), []
    monkeypatch.setattr(tuner.measuring.drift, "Worker", DyingWorker)
    levels = Levels(start, machine, folder, said.append)
    assert levels.trusted(trials) == trials[:1]  # nothing is known of the others
    assert levels.newly_refused(trials, seconds_of) == ["O1"]  # O2 does not beat the start by enough to be worth examining
    assert levels.newly_refused(trials, seconds_of) == []
    assert levels.trusted(trials) == trials[:1]
    assert len(said) == 2
    assert "O1: 1.50x as good as the start; could not be compared with O0 (crashed: killed by SIGSEGV" in said[1]
    assert "\n" not in said[1]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was measured before")

    monkeypatch.setattr(tuner.levels, "measure_drift", never)
    again = Levels(start, machine, TuneDir(tmp_path), said.append)
    assert again.newly_refused(trials, seconds_of) == ["O1"]
    assert again.trusted(trials) == trials[:1]
    assert again.drifts == levels.drifts
    assert len(said) == 2


def test_a_level_that_hangs_is_not_trusted(trials: list[Trial], machine: Hardware, tmp_path: Path) -> None:
    said: list[str] = []
    levels = Levels(Config.from_dict(trials[0].config), machine, TuneDir(tmp_path), said.append, timeout=0.2)
    assert levels.newly_refused(trials, seconds_of) == ["O1"]
    assert "timeout: no answer within 0.2 s" in said[-1]


def test_a_level_is_not_examined_beyond_the_budget(trials: list[Trial], machine: Hardware, tmp_path: Path) -> None:
    said: list[str] = []
    levels = Levels(Config.from_dict(trials[0].config), machine, TuneDir(tmp_path), said.append, timeout=0.2)
    for _ in range(2):
        assert levels.newly_refused(trials, seconds_of, 30.0) == []
        assert (levels.trusted(trials), levels.drifts) == (trials[:1], ())
    (line,) = said
    assert "no time is left" in line
    assert levels.newly_refused(trials, seconds_of, 300.0) == ["O1"], "of a larger budget"


def test_a_level_is_examined_where_it_is_better_in_what_is_minimised(
    trials: list[Trial], machine: Hardware, tmp_path: Path
) -> None:
    """O1, which is faster, costs more, and O2 less."""
    price = {"O0": 1.0, "O1": 1.2, "O2": 0.5}
    levels = Levels(Config.from_dict(trials[0].config), machine, TuneDir(tmp_path), lambda _: None, timeout=0.2)
    assert levels.newly_refused(trials, lambda trial: price[trial.changes["precision.level"]]) == ["O2"]


def test_levels_are_examined_together_and_told_apart(
    trials: list[Trial], machine: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def quickly(config: Config, levels: list[str], **how: Any) -> dict[str, Drift]:
        asked.append(levels)
        return measure_drift(config, levels, seconds=0.2, examples=16, **how)

    monkeypatch.setattr(tuner.levels, "measure_drift", quickly)
    start, said, choices = Config.from_dict(trials[0].config), [], ("O0", "O1", "O2")
    levels = Levels(start, machine, TuneDir(tmp_path), said.append, choices=choices)
    levels.newly_refused(trials, seconds_of)
    assert asked == [["O1", "O2"]], "O1 is faster, and O2 is looked at while it is"
    assert [(drift.level, drift.speedup, drift.failure) for drift in levels.drifts] == [("O1", 1.5, None), ("O2", None, None)]
    assert [line.split()[1].rstrip(":") for line in said] == ["O1", "O1", "O2"]
    trials[2] = dataclasses.replace(trials[2], measurement=dataclasses.replace(trials[2].measurement, seconds_per_env_step=1e-5))
    levels.newly_refused(trials, seconds_of)
    assert len(asked) == 1
    assert TuneDir(tmp_path).drifts() == list(levels.drifts)


def test_one_that_failed_beside_the_one_that_was_asked_for_is_examined_again(
    trials: list[Trial], machine: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner.measuring.drift, "Worker", DyingWorker)
    levels = Levels(Config.from_dict(trials[0].config), machine, TuneDir(tmp_path), lambda _: None, choices=("O0", "O1", "O2"))
    assert levels.newly_refused(trials, seconds_of) == ["O1"]
    assert [drift.level for drift in levels.drifts] == ["O1"]
    trials[2] = dataclasses.replace(trials[2], measurement=dataclasses.replace(trials[2].measurement, seconds_per_env_step=1e-5))
    assert levels.newly_refused(trials, seconds_of) == ["O2"]


def test_an_accepted_level_is_trusted_and_the_users_own_is_not_examined(
    trials: list[Trial], machine: Hardware, tmp_path: Path
) -> None:
    folder = TuneDir(tmp_path)
    folder.save_drifts([dataclasses.replace(ACCEPTED, level="O1")])
    levels = Levels(Config.from_dict(trials[0].config), machine, folder, pytest.fail)
    assert levels.newly_refused(trials, seconds_of) == []
    assert levels.trusted(trials) == trials[:2]
    other = TuneDir(tmp_path / "other")
    users = Levels(Config.from_dict(trials[1].config), machine, other, pytest.fail)
    backwards = [dataclasses.replace(trials[1], number=0), dataclasses.replace(trials[0], number=1)]
    assert users.newly_refused(backwards, seconds_of) == []
    assert users.trusted(backwards) == backwards
    assert not other.drift_file.exists()


@pytest.mark.parametrize("text", ["{", "3", "[3]", '[{"level": "O1"}]', '[{"level": "O1", "figures": {"policy_kl": [0.1]}}]'])
def test_a_damaged_file_is_one_line(text: str, tmp_path: Path) -> None:
    folder = TuneDir(tmp_path)
    folder.drift_file.write_text(text)
    with pytest.raises(UserError, match=r"drift\.json.*delete it") as caught:
        folder.drifts()
    assert "\n" not in str(caught.value)


def test_a_refused_level_is_excluded_and_nothing_else(workload: Workload) -> None:
    axes = {"precision.level": ("O0", "O1", "O2"), "search.engine": ("mctx", "fused"), "runtime.num_envs": (8, 16)}
    knobs = [dataclasses.replace(k, choices=axes[k.path]) for k in knobs_up_to("neutral", "anakin") if k.path in axes]
    space = make_space(knobs, {k.path: k.choices[0] for k in knobs}, workload, lambda *_: True, 4096, math.inf)
    rows = np.asarray(excluded(space, [space.start, every_point_with(space, "precision.level", "O1")]))
    points = np.array(list(itertools.product(*(range(n) for n in space.sizes))))
    out = np.any(np.all((points[:, None] == rows) | (rows == ANY), axis=-1), axis=-1)
    levels = np.array([space.decode(point)["precision.level"] for point in points])
    assert len(points) == 12
    np.testing.assert_array_equal(out, (levels == "O1") | np.all(points == space.start, axis=-1))


@pytest.mark.slow(150)
def test_a_whole_tuning_keeps_to_what_was_found_before(tiny: Config, tmp_path: Path) -> None:
    start, out = tiny.replace("precision.level", "O0"), tmp_path / "t"
    first = tuner.tune(start, budget="10m", max_trials=1, out=out, burst=0.05, quiet=True)
    refused = [dataclasses.replace(REFUSED, level=level) for level in ("O1", "O2")]
    TuneDir(out).save_drifts(refused)
    again = tuner.tune(start, budget="10m", max_trials=4, out=out, burst=0.05, quiet=True)
    assert len(again.history) > len(first.history)
    assert {trial.config["precision"]["level"] for trial in again.history} == {"O0"}
    assert again.drifts == tuple(refused)
    told = json.loads((out / "result.json").read_text())
    assert [(row["level"], row["accepted"]) for row in told["drifts"]] == [("O1", False), ("O2", False)]
