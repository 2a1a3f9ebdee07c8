"""``report.html``: all that a tuning found, for people, in one file that loads nothing, runs nothing and prints well.

In the order a reader wants it: the result, how to apply it, how it was found, how far the predictor can be believed, what it
says of the knobs and of where the time goes, what the run is given, every trial.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from predictor import Hardware, Measurement, Outcome, Prediction, RuntimePredictor
from tuner import balance
from tuner.bridge import Config, get, write_atomically
from tuner.comparison import MIN_GAIN
from tuner.history import Trial
from tuner.measuring.workload import describe
from tuner.reporting import charts, page
from tuner.reporting.effects import Effect, chosen_trial, effects
from tuner.reporting.markup import Markup, element, joined
from tuner.reporting.page import Cell, Compared
from tuner.reporting.tables import error, machine_rows, median_errors, moved, precision_rows
from tuner.resources import allocation_of, use_of
from tuner.result import TuneResult
from tuner.space import Space

_ROLES = ("baseline", "annealed", "varied", "switched", "random", "shared")  # with a colour of their own
_LEAST_SHARE = 0.01  # of the time, of a stage that is shown
_LEAST_WAITING = 0.01  # threads, of a wait that is shown
_PAIRS = 3  # of trials elsewhere that differ in one knob, written beside it
_WORD = re.compile(r"(?!(?:true|false|none|inf|nan)$)[A-Za-z][\w.:?&/-]*", re.IGNORECASE)  # text that TOML takes for nothing else
GIB = 2**30


class View(NamedTuple):
    """A result, and what the predictor that found it says: everything a report is made from."""

    result: TuneResult
    tuned_trial: Trial | None  # that measured the tuned point; None where none did
    effects: Sequence[Effect]
    before: Prediction  # of the start
    after: Prediction  # of the tuned configuration

    @property
    def measured(self) -> tuple[Measurement, Measurement]:
        """Of the start and of the tuned configuration: in alternation where there was one, else each by itself."""
        result, trial = self.result, self.tuned_trial
        before = result.start_measurement or result.history[0].measurement
        return before, result.measurement or (before if trial is None else trial.measurement)

    @property
    def start_stays(self) -> bool:
        """Whether nothing was clearly faster than the start."""
        trial = self.tuned_trial
        return self.result.speedup == 1.0 if self.result.finished else trial is not None and trial.number == 0


def view(result: TuneResult, predictor: RuntimePredictor, space: Space) -> View:
    """What there is to show; ``predictor`` has learnt from the tuning's own runs, ``space`` is the grid it searched."""
    tuned = {knob.path: get(result.config, knob.path) for knob in space.knobs}
    workload, hardware, trials = describe(result.config), result.hardware, result.history
    found = effects(tuned, workload, trials, space=space, predictor=predictor, hardware=hardware)
    predictions = predictor.predict(space.base, hardware), predictor.predict(workload, hardware)
    return View(result, chosen_trial(tuned, trials), found, *predictions)


def write_report(path: Path, result: TuneResult, predictor: RuntimePredictor, space: Space) -> None:
    """Writes ``report.html``, whole or not at all."""
    write_atomically(path, render(view(result, predictor, space), versions()))


def versions() -> dict[str, str]:
    """What this was measured with."""
    names = "muzerox", "jax", "jaxlib"
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return {"versions": f"{packages}, Python {platform.python_version()}", "written": time.strftime("%Y-%m-%d %H:%M:%S %Z")}


def render(seen: View, about: Mapping[str, str]) -> str:
    """The page; ``about`` says what it was measured with."""
    result = seen.result
    title = f"Tuning of {result.config.env}"
    return page.document(
        title,
        [
            element("h1", title),
            *_headline(seen),
            *_apply(seen),
            _history(seen),
            _accuracy(seen),
            *_knobs(seen),
            _stages(seen),
            *_waits(seen),
            _resources(seen),
            page.section("Precision", page.facts(precision_rows(result))),
            _trials(seen),
            page.section("Machine and versions", page.facts({**machine_rows(result.hardware), **about})),
        ],
    )


# The result ----------------------------------------------------------------------------------------------------------


def paired_ratios(start: Measurement, ours: Measurement) -> list[float]:
    """How many times faster ``ours`` was in each round of an alternation."""
    return [b / a for a, b in zip(ours.repeats, start.repeats, strict=True)]


def machine_name(hardware: Hardware) -> str:
    """A machine in a few words."""
    host = f"{hardware.cores} cores of {hardware.cpu}"
    return host if hardware.on_host else f"{hardware.devices} x {hardware.device} with {host}"


def _headline(seen: View) -> Iterator[Markup]:
    result, (start, ours) = seen.result, seen.measured
    where = f"{result.config.env} on {machine_name(result.hardware)}"
    first = result.history[0]
    if not result.finished:
        trial = seen.tuned_trial
        ratio = first.seconds / trial.seconds if trial and trial.seconds and first.seconds else 1.0
        best = f"the best so far was measured {ratio:.2f}x as fast"
        best = "nothing was faster than the start so far" if seen.start_stays else best
        text = f"{where}: stopped before the comparison with the start; {best}. The same command continues."
        yield page.paragraph(text, "lead")
        return
    if seen.start_stays:
        why = f"nothing that was measured beat it clearly, by {MIN_GAIN:.2f}x or more, in alternation"
        why = why if result.compared else "nothing was compared with it"
        text = f"{where}: the start stays; {why if len(result.history) > 1 else 'there was no time to measure another'}"
        text += f" ({1 / (start.seconds_per_env_step or 1.0):,.0f} environment steps/s)." if start.seconds_per_env_step else "."
        yield page.paragraph(text, "lead")
        return
    ratios = paired_ratios(start, ours)
    low, high = np.percentile(ratios, [25, 75])
    speeds = [m.env_steps_per_second or 0.0 for m in (ours, start)]
    others = (
        "" if result.interval is None else ", nine times in ten {:.2f}x to {:.2f}x in other processes".format(*result.interval)
    )
    yield page.paragraph(
        f"{where}: tuned, it trains {result.speedup:.2f}x as fast as from the start{others}: {speeds[0]:,.0f} against "
        f"{speeds[1]:,.0f} environment steps/s, measured in alternation; half of the {len(ratios)} paired rounds lie between "
        f"{low:.2f}x and {high:.2f}x.",
        "lead",
    )
    wins = sum(ratio > 1.0 for ratio in ratios)
    caption = f"Each dot a round: both timed one after the other. Tuned was faster in {wins} of {len(ratios)}."
    yield page.charts((charts.strip(ratios, result.speedup or 1.0, "speedup by round"), caption))


# How to apply it -----------------------------------------------------------------------------------------------------


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def changed(start: Config, tuned: Config) -> dict[str, Any]:
    """The keys whose values differ, with those of ``tuned``."""
    before = _flat(start.to_dict())
    return {path: value for path, value in _flat(tuned.to_dict()).items() if before.get(path) != value}


def assignment(path: str, value: Any) -> str:
    """A key and its value as the command's ``--set`` takes them, quoted for a shell."""
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    if isinstance(value, str):
        text = value if _WORD.fullmatch(value) else json.dumps(value)
    return f"--set {shlex.quote(f'{path}={text}')}"


def _apply(seen: View) -> Iterator[Markup]:
    result = seen.result
    changes = changed(result.start, result.config)
    content = [page.code([f"muzerox train --config {shlex.quote(f'{result.out}/tuned.toml')}"])]
    if changes:
        content.append(page.paragraph("That file is complete. As options, added to those that the tuning was started with:"))
        content.append(page.code([assignment(path, value) for path, value in changes.items()]))
    yield page.section("How to apply it", *content)


# How it was found ----------------------------------------------------------------------------------------------------


def _kind(trial: Trial) -> str:
    return trial.role if trial.role in _ROLES else "other"


def _told(trial: Trial, first: Trial) -> str:
    speed = f"{1 / trial.seconds:,.0f} steps/s, expected {1 / trial.foreseen:,.0f}" if trial.seconds else _failure(trial)
    return f"trial {trial.number} ({trial.role}): {speed}; {moved(trial, first) or 'the start'}"


def _failure(trial: Trial) -> str:
    return f"{trial.measurement.outcome}: {trial.measurement.error or 'no figure'}"


def _history(seen: View) -> Markup:
    trials = seen.result.history
    ran = [trial for trial in trials if trial.seconds]
    drawn = []
    for name, at in (("trial", lambda t: float(t.number)), ("seconds of tuning", lambda t: t.elapsed)):
        dots = [charts.Dot(at(t), 1 / t.seconds, _kind(t), _told(t, trials[0]), low=1 / t.foreseen) for t in ran if t.seconds]
        failed = [(at(t), _told(t, trials[0])) for t in trials if not t.seconds]
        drawn.append((charts.history(dots, failed, (name, "environment steps/s"), f"speed by {name}"), ""))
    entries = [(page.mark(role), role) for role in _ROLES if any(t.role == role for t in ran)]
    entries += [(page.mark("other"), "otherwise chosen")] if any(_kind(t) == "other" for t in ran) else []
    entries += [(page.mark("expected", "cross"), "expected before it ran"), (page.mark("best", "line"), "best so far")]
    entries += [(page.mark("failed", "cross"), "failed")] if len(ran) < len(trials) else []
    failures = f", {len(trials) - len(ran)} failed" if len(ran) < len(trials) else ""
    said = f"{len(trials)} trials{failures}, in {seen.result.seconds:.0f} s. Shared: timed in the process of the trial before it."
    return page.section("How it was found", page.paragraph(said), page.key(entries), page.charts(*drawn))


def covered(trials: Sequence[Trial]) -> tuple[int, int]:
    """Of the trials after the first that ran, how many lay in their 90% interval, and how many had one."""
    rows = [t for t in trials if t.seconds and t.number > 0 and t.predicted_interval]
    return sum(t.predicted_interval[0] <= (t.seconds or 0.0) <= t.predicted_interval[1] for t in rows), len(rows)


def _accuracy(seen: View) -> Markup:
    trials = seen.result.history
    dots = [
        charts.Dot(t.seconds * 1e6, t.predicted * 1e6, _kind(t), _told(t, trials[0]), *(x * 1e6 for x in t.predicted_interval))
        for t in trials
        if t.seconds
    ]
    names = "measured, microseconds", "predicted, microseconds an environment step"
    chart = charts.scatter(dots, names, "predicted against measured seconds an environment step")
    rows = {f"median error, {name}": f"{value:.0%}" for name, value in median_errors(trials).items() if value is not None}
    inside, count = covered(trials)
    if count:
        rows["measured inside the 90% interval"] = f"{inside} of {count} ({inside / count:.0%})"
    return page.section(
        "Predicted against measured",
        page.paragraph("Each prediction was made before its trial ran, from those before it. The first is in no median.", "soft"),
        element("div", element("figure", chart), element("div", page.facts(rows)), class_="charts"),
    )


# What the predictor says ---------------------------------------------------------------------------------------------


def _knobs(seen: View) -> Iterator[Markup]:
    if not seen.effects:
        return
    said = (
        "The predictor's view: seconds along each knob's choices, everything else as it was tuned, over those of the tuned "
        "configuration; above 1 is slower. The knobs that matter most come first. "
        "Squares were measured: trials that differ from the tuned one in this knob alone."
    )
    entries = [(page.mark("chosen"), "tuned"), (page.mark("predicted"), "predicted")]
    entries.append((page.mark("measured", "square"), "measured"))
    yield page.section(
        "Which knob matters",
        page.paragraph(said, "soft"),
        page.key(entries),
        element("div", joined(map(_knob, seen.effects)), class_="charts"),
    )


def _knob(effect: Effect) -> Markup:
    there = {option: factor for option, factor in zip(effect.options, effect.predicted, strict=True) if factor is not None}
    places = {option: index for index, option in enumerate(there)}
    chart = charts.choices(
        [str(option) for option in there],
        list(there.values()),
        [
            (places[n.option], n.factor, f"trial {n.number}: measured {n.factor:.2f}x the seconds")
            for n in effect.neighbours
            if n.option in places
        ],
        chosen=places.get(effect.chosen),
        ordered=effect.knob.scale == "log2",
        label=f"predicted seconds by {effect.knob.path}",
    )
    said = [f"{p.options[0]} to {p.options[1]} {p.factor:.2f}x (trials {p.numbers[0]}, {p.numbers[1]})" for p in effect.pairs]
    more = f", and {len(said) - _PAIRS} more" if len(said) > _PAIRS else ""
    measured = f"Measured elsewhere, nothing else differing: seconds from {', '.join(said[:_PAIRS])}{more}. " if said else ""
    forbidden = ", ".join(str(option) for option in effect.options if option not in there)
    head = element("h3", element("code", effect.knob.path), f" = {effect.chosen}: worth up to {effect.range:.2f}x")
    caption = measured + (f"Not possible here: {forbidden}." if forbidden else "")
    return element("figure", head, chart, element("figcaption", caption))


_SIDES = [(page.mark("before", "swatch"), "start"), (page.mark("blue", "swatch"), "tuned")]


def _stages(seen: View) -> Markup:
    before, after = seen.before, seen.after
    rows = [
        Compared(
            stage.replace("_", " "),
            (first := share * before.seconds_per_env_step * 1e6),
            (then := after.shares[stage] * after.seconds_per_env_step * 1e6),
            (f"{first:,.1f} \N{MICRO SIGN}s ({share:.0%})", f"{then:,.1f} \N{MICRO SIGN}s ({after.shares[stage]:.0%})"),
        )
        for stage, share in before.shares.items()
        if max(share, after.shares[stage]) >= _LEAST_SHARE
    ]
    said = (
        f"Seconds an environment step by stage, as the predictor sees them: "
        f"{before.seconds_per_env_step * 1e6:,.1f} microseconds at the start, {after.seconds_per_env_step * 1e6:,.1f} tuned. "
        "What is hidden behind another stage has none."
    )
    ordered = sorted(rows, key=lambda row: -max(row.before, row.after))
    return page.section("Where the time goes", page.paragraph(said, "soft"), page.key(_SIDES), page.bars(ordered))


def _waits(seen: View) -> Iterator[Markup]:
    before, after = seen.measured
    names = {**before.waits, **after.waits}
    rows = [
        Compared(name.replace("_", " "), first, then, (f"{first:.2f}", f"{then:.2f}"))
        for name in names
        if max(first := before.waits.get(name, 0.0), then := after.waits.get(name, 0.0)) >= _LEAST_WAITING
    ]
    if rows:
        ordered = sorted(rows, key=lambda row: -max(row.before, row.after))
        said = "Threads that wait, on average, by what they wait for, as measured. Who waits for the slowest stage waits most."
        yield page.section("Waits of the pipeline", page.paragraph(said, "soft"), page.key(_SIDES), page.bars(ordered))


# What it is given ----------------------------------------------------------------------------------------------------


def _resources(seen: View) -> Markup:
    result = seen.result
    columns = []
    for config, predicted, measured in zip((result.start, result.config), (seen.before, seen.after), seen.measured, strict=True):
        columns.append((allocation_of(config, result.hardware), use_of(predicted), use_of(measured)))
    kinds = [("cores", 1.0), ("memory, GiB", GIB)]
    kinds += [] if result.hardware.on_host else [("accelerator memory, GiB", GIB)]
    rows = []
    for index, (name, unit) in enumerate(kinds):
        cells = [Cell(name)]
        for column in columns:
            cells += [Cell("" if np.isnan(v[index]) else f"{v[index] / unit:.2f}", kind="number") for v in column]
        rows.append((None, cells))
    head = ("", *(f"{side}, {what}" for side in ("start", "tuned") for what in ("given", "predicted use", "used")))
    told = {}
    for name, factor in (("start", result.history[0].balance), ("tuned", result.balance)):
        if factor is not None:
            told[f"balance factor, {name}"] = f"{factor:.2f} ({balance.verdict(factor)})"
    said = "The balance factor is the mean over resources of what is given over what is wanted: use, and headroom for its bursts."
    return page.section("Allocation and balance", page.table(head, rows), page.facts(told), page.paragraph(said, "soft"))


# Every trial ---------------------------------------------------------------------------------------------------------


def _trials(seen: View) -> Markup:
    trials = seen.result.history
    first = trials[0]
    rows = []
    for trial in trials:
        m, off = trial.measurement, error(trial.foreseen, trial)
        tuned = seen.tuned_trial is not None and trial.number == seen.tuned_trial.number
        speed, ratio = (1 / trial.seconds, (first.seconds or 0.0) / trial.seconds) if trial.seconds else (None, None)
        failed = m.outcome != Outcome.OK
        outcome = _failure(trial) if failed else "ok, tuned" if tuned else "ok"
        cells = [
            Cell(trial.number, float(trial.number), "number"),
            Cell(trial.role),
            Cell(moved(trial, first) or "the start", kind="moved"),
            Cell(f"{1 / trial.foreseen:,.0f}", 1 / trial.foreseen, "number"),
            Cell("" if speed is None else f"{speed:,.0f}", speed, "number"),
            Cell("" if off is None else f"{off:.0%}", off, "number"),
            Cell("" if ratio is None else f"{ratio:.2f}x", ratio, "number"),
            Cell("" if m.peak_bytes is None else f"{m.peak_bytes / GIB:.2f}", m.peak_bytes, "number"),
            Cell(f"{trial.elapsed:,.0f}", trial.elapsed, "number"),
            Cell(outcome, kind="outcome bad" if failed else "outcome"),
        ]
        rows.append(("tuned" if tuned else None, cells))
    head = ("", "chosen", "moved from the start", "expected", "measured", "off", "to the start", "peak GiB", "after s", "outcome")
    said = "Environment steps a second, expected before the trial ran and measured; each timed by itself, not in alternation."
    return page.section("All trials", page.paragraph(said, "soft"), page.table(head, rows))
