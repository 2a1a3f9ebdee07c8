"""The report of a tuning: what a browser and a reader find in it, for every way a tuning can end."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muzerox.config_io import parse_assignment
from predictor import Hardware, Measurement, Outcome, RuntimePredictor
from tuner.bridge import Config, concrete, get
from tuner.history import Trial
from tuner.loop import space_around
from tuner.measuring.measure import paired_ratio
from tuner.measuring.workload import describe
from tuner.reporting.charts import linear_axis
from tuner.reporting.effects import chosen_trial, effects
from tuner.reporting.html_report import View, assignment, changed, covered, paired_ratios, render, versions, view, write_report
from tuner.resources import use_of
from tuner.result import TuneResult
from tuner.space import Space

HOSTILE = "<script>alert('1')</script> \"quoted\" & <b>bold</b> \x1b[31m\x00 \udcff"
VOID = {"meta"}


class Page(HTMLParser):
    """Tags that are open, ids and addresses, numbers and text of a page; fails on a tag that closes another."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.rows: list[list[float]] = []  # values of data elements, by table row
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag == "data":
            self.rows[-1].append(float(dict(attrs)["value"] or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def count(self, tag: str, kind: str) -> int:
        return sum(name == tag and kind in attributes.get("class", "").split() for name, attributes in self.tags)


class Made:
    """Tunings on a machine whose seconds are known: those predicted, and some noise."""

    def __init__(self, config: Config, machine: Hardware):
        self.machine, self.start = machine, concrete(config, "cpu")
        self.space: Space = space_around(self.start, "neutral", "cpu")
        self.predictor = RuntimePredictor()
        self.first = {knob.path: get(self.start, knob.path) for knob in self.space.knobs}

    def measurement(self, changes: dict[str, Any], noise: float, error: str | None = None, rounds: int = 5) -> Measurement:
        fields = [(knob, changes[knob.path]) for knob in self.space.knobs]
        workload = dataclasses.replace(self.space.base, **{k: v for knob, x in fields for k, v in knob.fields(x).items()})
        prediction = self.predictor.predict(workload, self.machine)
        if error is not None:
            return Measurement(hardware=self.machine, workload=workload, outcome=Outcome.CRASHED, error=error, wall_seconds=3.0)
        seconds = prediction.seconds_per_env_step * noise
        waits = {"batch_get": 0.61 * noise, "search_put": 0.2} if workload.sebulba else {}
        return Measurement(
            hardware=self.machine,
            workload=workload,
            outcome=Outcome.OK,
            seconds_per_env_step=seconds,
            env_steps_per_second=1.0 / seconds,
            updates_per_second=1.0,
            peak_bytes=prediction.peak_bytes * 1.1,
            cpu_use=1.5,
            repeats=tuple(seconds * (1.0 + 0.02 * (index % 3 - 1) * noise) for index in range(rounds)),
            waits=waits,
            wall_seconds=10.0,
        )

    def trial(
        self, number: int, moves: dict[str, Any], noise: float = 1.0, error: str | None = None, role: str = "annealed"
    ) -> Trial:
        changes = self.first | moves
        measured = self.measurement(changes, noise, error)
        prediction = self.predictor.predict(measured.workload, self.machine)
        expected = prediction.seconds_per_env_step
        return Trial(
            number=number,
            role=role if number else "baseline",
            changes=changes,
            config=self.start.replace(changes).to_dict(),
            measurement=measured,
            predicted_uncalibrated=expected * 1.3,
            predicted_base=expected * 1.1,
            predicted=expected,
            predicted_use=tuple(float(x) for x in use_of(prediction)),
            predicted_interval=prediction.interval,
            temperature=1.0,
            elapsed=11.0 * (number + 1),
            balance=None if error else 1.1,
        )

    def result(self, trials: Sequence[Trial], best: int, *, finished: bool = True, out: str = "runs/t") -> TuneResult:
        chosen = trials[best]
        config = Config.from_dict(chosen.config).replace("allocation.memory_gib", 1.25)
        start = self.measurement(dict(trials[0].changes), 1.01, rounds=9) if finished else None
        ours = (start if best == 0 else self.measurement(dict(chosen.changes), 0.99, rounds=9)) if finished else None
        speedup = (1.0 if best == 0 else paired_ratio(ours, start)) if ours and start else None
        return TuneResult(
            out=out,
            finished=finished,
            start=self.start,
            config=config,
            speedup=speedup,
            start_measurement=start,
            measurement=ours,
            predicted=self.predictor.predict(describe(config), self.machine).to_dict(),
            balance=1.4,
            verdict="over-allocated",
            seconds=99.0,
            hardware=self.machine,
            history=tuple(trials),
        )

    def view(self, result: TuneResult) -> View:
        return view(result, self.predictor, self.space)

    def page(self, result: TuneResult) -> Page:
        text = render(self.view(result), versions())
        assert "http://" not in text
        assert "https://" not in text
        return Page(text)


@pytest.fixture
def made(tiny: Config, machine: Hardware) -> Made:
    return Made(tiny, machine)


@pytest.fixture
def threads(tiny_threads: Config, machine: Hardware) -> Made:
    return Made(tiny_threads, machine)


def some_trials(made: Made) -> list[Trial]:
    """Neighbours of the start, of each other, one drawn at random, one that failed; the fourth is the fastest by far."""
    live = {"runtime.loop_count": 16}
    moves = [{}, live, {"runtime.num_envs": 32}, {"runtime.num_envs": 32} | live, {"precision.level": "O1"} | live]
    trials = [made.trial(number, move, 1.0 - 0.01 * number) for number, move in enumerate(moves)]
    trials[3] = made.trial(3, moves[3], 0.1, role="shared")
    failed = made.trial(len(trials), {"runtime.num_envs": 64}, error=HOSTILE, role="random")
    return [*trials, failed]


@pytest.fixture(params=["made", "threads"])
def either(request: pytest.FixtureRequest) -> Made:
    return request.getfixturevalue(request.param)


def test_its_figures_are_those_of_the_records(either: Made) -> None:
    trials = some_trials(either)
    result = either.result(trials, best=3)
    page = either.page(result)
    rows = [row for row in page.rows if row]
    assert len(rows) == len(trials)
    for row, trial in zip(rows, trials, strict=True):
        if trial.seconds is None:
            assert row == [trial.number, 1 / trial.predicted, trial.elapsed]
            continue
        off = abs(trial.predicted / trial.seconds - 1.0)
        ratio = (trials[0].seconds or 0.0) / trial.seconds
        peak = trial.measurement.peak_bytes
        assert row == [trial.number, 1 / trial.predicted, 1 / trial.seconds, off, ratio, peak, trial.elapsed]
    text = " ".join(page.text)
    assert f"{result.speedup:.2f}x as fast" in text
    start, ours = result.start_measurement, result.measurement
    assert start is not None
    assert ours is not None
    assert result.interval is not None
    assert "nine times in ten {:.2f}x to {:.2f}x in other processes".format(*result.interval) in text
    low, high = np.percentile(paired_ratios(start, ours), [25, 75])
    assert f"half of the 9 paired rounds lie between {low:.2f}x and {high:.2f}x" in text
    assert page.count("circle", "round") == 9
    assert page.count("tr", "tuned") == 1
    inside, count = covered(trials)
    assert count == 4  # neither the first, nor what failed
    assert inside == 3  # one was ten times as fast as expected
    assert f"{inside} of {count}" in text
    for effect in either.view(result).effects:
        assert effect.knob.path in text
        assert f"worth up to {effect.range:.2f}x" in text
    waits = bool(trials[0].measurement.waits)
    assert ("Waits of the pipeline" in text) == waits
    if waits:
        assert f"{start.waits['batch_get']:.2f}" in text
    assert "muzerox train --config runs/t/tuned.toml" in text


def test_every_part_of_time_before_and_after_is_the_predictions(made: Made) -> None:
    result = made.result(some_trials(made), best=3)
    seen, page = made.view(result), made.page(result)
    text = " ".join(page.text)
    assert seen.after.to_dict() == result.predicted
    assert seen.before == made.predictor.predict(made.space.base, made.machine)
    for prediction in (seen.before, seen.after):
        for share in (share for share in prediction.shares.values() if share >= 0.01):
            assert f"{share * prediction.seconds_per_env_step * 1e6:,.1f} \N{MICRO SIGN}s ({share:.0%})" in text


def test_what_others_wrote_is_text_and_never_markup(made: Made, tmp_path: Path) -> None:
    trials = some_trials(made)
    result = made.result(trials, best=3, out='runs/"><img src=x onerror=alert(1)>')
    page = made.page(result)
    assert {"script", "img", "b"}.isdisjoint(tag for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    text = "".join(page.text)
    assert "<script>alert('1')</script> \"quoted\" & <b>bold</b> \ufffd[31m\ufffd \ufffd" in text
    command = next(part for part in page.text if part.startswith("muzerox train"))
    assert shlex.split(command) == ["muzerox", "train", "--config", f"{result.out}/tuned.toml"]
    write_report(tmp_path / "report.html", result, made.predictor, made.space)  # surrogates cannot be encoded
    assert Page((tmp_path / "report.html").read_text("utf-8")).tags == page.tags
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_it_loads_and_runs_nothing(either: Made) -> None:
    page = either.page(either.result(some_trials(either), best=3))
    loading = {"src", "href", "srcset", "data", "action", "background", "poster", "xlink:href"}
    assert all(loading.isdisjoint(attributes) for _, attributes in page.tags)
    assert {"script", "link", "iframe", "object", "embed", "base"}.isdisjoint(tag for tag, _ in page.tags)
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    style = render(either.view(either.result(some_trials(either), best=0)), versions()).split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("failures", [0, 3])
def test_a_baseline_alone_or_followed_by_failures(made: Made, failures: int, finished: bool) -> None:
    trials = [made.trial(0, {})]
    trials += [made.trial(n, {"runtime.num_envs": 8 << n}, error=f"failed for the {n}th time") for n in range(1, failures + 1)]
    page = made.page(made.result(trials, best=0, finished=finished))
    text = " ".join(page.text)
    assert ("the start stays" if finished else "nothing was faster than the start so far") in text
    assert ("stopped before the comparison" in text) != finished
    assert all(f"failed for the {n}th time" in text for n in range(1, failures + 1))
    assert page.count("path", "failed") == (2 * failures + 1 if failures else 0)  # in two charts, and in their key


def test_an_interrupted_tuning_shows_the_best_so_far(made: Made) -> None:
    trials = some_trials(made)
    text = " ".join(made.page(made.result(trials, best=3, finished=False)).text)
    ratio = (trials[0].seconds or 0.0) / (trials[3].seconds or 1.0)
    assert f"stopped before the comparison with the start; the best so far was measured {ratio:.2f}x as fast" in text


def test_the_options_it_names_make_the_tuned_configuration(either: Made) -> None:
    trials = some_trials(either)
    result = either.result(trials, best=4)
    changes = changed(result.start, result.config)
    assert {"precision.level", "runtime.loop_count", "allocation.memory_gib"} == set(changes)
    words = [shlex.split(assignment(path, value)) for path, value in changes.items()]
    assert {option for option, _ in words} == {"--set"}
    assert result.start.replace(dict(parse_assignment(text) for _, text in words)) == result.config


VALUES = [None, True, False, 3, -1, 0.1, 1e-7, 1e20, "O1", "gymnax:CartPole-v1?a=1&b=2", "true", "3", 'a "b" c', "NaN", ""]


@pytest.mark.parametrize("value", VALUES)
def test_options_are_read_as_they_were_meant(value: Any) -> None:
    option, text = shlex.split(assignment("some.key", value))
    assert (option, *parse_assignment(text)) == ("--set", "some.key", value)


def test_effects_are_the_predictors_and_neighbours_the_measured_ones(made: Made) -> None:
    trials = some_trials(made)
    result = made.result(trials, best=3)
    tuned = dict(trials[3].changes)
    workload = describe(result.config)
    found = effects(tuned, workload, trials, space=made.space, predictor=made.predictor, hardware=made.machine)
    assert [effect.range for effect in found] == sorted((effect.range for effect in found), reverse=True)
    assert {effect.knob.path for effect in found} == {knob.path for knob in made.space.knobs}
    assert chosen_trial(tuned, trials) == trials[3]
    by_path = {effect.knob.path: effect for effect in found}
    seconds = made.predictor.predict(workload, made.machine).seconds_per_env_step
    for effect in found:
        option, factor = next((o, f) for o, f in zip(effect.options, effect.predicted, strict=True) if f and o != effect.chosen)
        other = made.predictor.predict(describe(result.config.replace(effect.knob.path, option)), made.machine)
        assert factor == pytest.approx(other.seconds_per_env_step / seconds, rel=1e-4)
    loops = by_path["runtime.loop_count"]
    assert loops.predicted[loops.options.index(loops.chosen)] == pytest.approx(1.0)
    (neighbour,) = loops.neighbours
    assert neighbour.number == 2
    assert neighbour.factor == pytest.approx((trials[2].seconds or 0.0) / (trials[3].seconds or 1.0))
    (pair,) = loops.pairs  # 0 and 1: 1 to 16, both with other num_envs than the tuned
    assert (pair.numbers, pair.options) == ((0, 1), (made.first["runtime.loop_count"], 16))
    assert pair.factor == pytest.approx((trials[1].seconds or 0.0) / (trials[0].seconds or 1.0))
    crowded = dataclasses.replace(made.space, max_num_envs=32)
    found = effects(tuned, workload, trials, space=crowded, predictor=made.predictor, hardware=made.machine)
    num_envs = next(effect for effect in found if effect.knob.path == "runtime.num_envs")
    assert [option for option, factor in zip(num_envs.options, num_envs.predicted, strict=True) if factor is None] == [
        option for option in num_envs.options if option > 32
    ]
    assert max(num_envs.options) > 32


def test_what_is_counted_has_whole_ticks() -> None:
    for trials in range(1, 200):
        axis = linear_axis([trials], whole=True)
        assert all(tick == round(tick) for tick in axis.ticks)
        assert axis.ticks[-1] == axis.high >= trials
        assert 2 <= len(axis.ticks) <= 6
    assert linear_axis([12]).ticks == (0.0, 2.5, 5.0, 7.5, 10.0, 12.5)


def test_trials_kept_by_an_earlier_version_have_no_interval(made: Made) -> None:
    tree = made.trial(1, {}).to_dict()
    assert Trial.from_dict(tree).predicted_interval == tuple(tree["predicted_interval"])
    del tree["predicted_interval"]
    old = Trial.from_dict(tree)
    assert old.predicted_interval == ()
    assert old.foreseen == old.predicted, "nor does it tell what was expected by all that was known"
    assert Trial.from_dict(tree | {"expected": 2e-4}).foreseen == 2e-4
    trials = [made.trial(0, {}), old]
    assert covered(trials) == (0, 0)
    assert "90% interval" not in " ".join(made.page(made.result(trials, best=0)).text)
