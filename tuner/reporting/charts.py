"""Charts as SVG inside a page, whose style sheet gives them their colours: sharp at any size, and their text is text.

They are as wide as a phone, so that letters do not shrink there; a page puts two beside each other where it has room.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tuner.reporting.markup import Markup, element, joined

WIDTH, HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 26, 42  # margins, for tick labels and the names of axes
_FEW_TICKS, _MANY_TICKS = 3, 7
# Mantissas of ticks on a log axis, from coarse to fine.
_MANTISSAS: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
)


class Axis(NamedTuple):
    """A range of numbers and the ticks that are written along it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value lies: 0 at ``low``, 1 at ``high``."""
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)


class Dot(NamedTuple):
    """One trial in a chart: where it is, how it looks, what a pointer at it is told."""

    x: float
    y: float
    kind: str  # class of the style sheet
    text: str
    low: float | None = None  # of an interval, or where something else was expected
    high: float | None = None


def linear_axis(values: Sequence[float], most: int = 5, *, whole: bool = False) -> Axis:
    """From 0 to the first tick that is not below any of ``values``; ``whole``: there is no half of what is counted."""
    top = max((value for value in values if value > 0), default=1.0)
    rough = top / most
    size = 10.0 ** math.floor(math.log10(rough))
    steps = (size * m for m in (1, 2, 2.5, 5, 10))
    step = next(step for step in steps if step >= rough * 0.999 and (not whole or (step >= 1.0 and step.is_integer())))
    count = math.ceil(top / step * 0.999)
    return Axis(0.0, count * step, tuple(step * i for i in range(count + 1)))


def log_axis(values: Sequence[float], least: float = 1.25, room: float = 0.06) -> Axis:
    """Over positive ``values`` and some room (a share of the axis), at least a factor of ``least`` wide."""
    low, high = min(values), max(values)
    widen = max(1.0, math.sqrt(least / (high / low)))
    low, high = low / widen, high * widen
    room_each = (high / low) ** room
    low, high = low / room_each, high * room_each
    for mantissas in _MANTISSAS:
        ticks = [
            m * 10.0**e
            for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for m in mantissas
            if low <= m * 10.0**e <= high
        ]
        if len(ticks) >= _FEW_TICKS:
            break
    else:  # a narrow range: round numbers at equal distances
        step = linear_axis([high - low], most=4).ticks[1]
        ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Axis(low, high, tuple(ticks[:: math.ceil(len(ticks) / _MANY_TICKS)]), log=True)


def written(value: float) -> str:
    """A tick's number, no longer than it must be."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}" if abs(value) < 1e-3 else f"{float(f'{value:.4g}'):g}"


def _at(x: Axis, y: Axis) -> Callable[[float, float], tuple[float, float]]:
    def place(across: float, up: float) -> tuple[float, float]:
        return (
            round(_LEFT + x.share(across) * (WIDTH - _LEFT - _RIGHT), 1),
            round(HEIGHT - _BOTTOM - y.share(up) * (HEIGHT - _TOP - _BOTTOM), 1),
        )

    return place


def _line(start: tuple[float, float], end: tuple[float, float], kind: str) -> Markup:
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=kind)


def _dot(centre: tuple[float, float], kind: str, text: str, radius: float = 4.0) -> Markup:
    return element("circle", element("title", text), cx=centre[0], cy=centre[1], r=radius, class_=kind)


def _frame(x: Axis, y: Axis, names: tuple[str, str], body: Sequence[Markup], label: str, x_texts: Sequence[str] = ()) -> Markup:
    """Axes with ``names`` around ``body``; ``label`` says what it is to those who cannot see it."""
    place = _at(x, y)
    texts = x_texts or [written(tick) for tick in x.ticks]
    parts: list[Markup] = []
    for tick in y.ticks:
        left, right = place(x.low, tick), place(x.high, tick)
        parts += [_line(left, right, "grid"), element("text", written(tick), x=_LEFT - 6, y=left[1] + 4, class_="end")]
    for tick, text in zip(x.ticks, texts, strict=True):
        foot = place(tick, y.low)
        if not x_texts:
            parts.append(_line(foot, place(tick, y.high), "grid"))
        parts.append(element("text", text, x=foot[0], y=HEIGHT - _BOTTOM + 16, class_="middle"))
    parts.append(_line(place(x.low, y.low), place(x.high, y.low), "axis"))
    parts.append(element("text", names[0], x=WIDTH - _RIGHT, y=HEIGHT - 6, class_="end name"))
    parts.append(element("text", names[1], x=4, y=14, class_="name"))
    return element("svg", joined(parts), joined(body), viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def history(dots: Sequence[Dot], failed: Sequence[tuple[float, str]], names: tuple[str, str], label: str) -> Markup:
    """Measured values along trials or time, a thin line to what was expected of each (``low``), the fastest so far, failures.

    Args:
      dots: in order of ``x``.
      failed: where along x, and what to tell of it.
    """
    last = max([dot.x for dot in dots] + [x for x, _ in failed])
    x = linear_axis([max(last, 1.0)], whole=all(float(dot.x).is_integer() for dot in dots))
    y = linear_axis([dot.y for dot in dots] + [dot.low for dot in dots if dot.low is not None])
    place = _at(x, y)
    body: list[Markup] = []
    best, path = 0.0, ""
    for dot in dots:
        if dot.low is not None:
            body += [_line(place(dot.x, dot.low), place(dot.x, dot.y), "reach"), _cross(place(dot.x, dot.low))]
        if dot.y > best:
            across, up = place(dot.x, dot.y)
            path += f"H{across}V{up}" if path else f"M{across} {up}"
            best = dot.y
    if path:
        body.append(element("path", d=f"{path}H{place(last, 0.0)[0]}", class_="best"))
    body += [_dot(place(dot.x, dot.y), dot.kind, dot.text) for dot in dots]
    for across, text in failed:
        centre = place(across, 0.0)
        body.append(element("g", element("title", text), _cross((centre[0], centre[1] - 8), "failed", 5.0)))
    return _frame(x, y, names, body, label)


def _cross(centre: tuple[float, float], kind: str = "expected", size: float = 3.0) -> Markup:
    (x, y), s = centre, size
    return element("path", d=f"M{x - s:g} {y - s:g}L{x + s:g} {y + s:g}M{x - s:g} {y + s:g}L{x + s:g} {y - s:g}", class_=kind)


def scatter(dots: Sequence[Dot], names: tuple[str, str], label: str) -> Markup:
    """Positive values on log axes of the same range, with the diagonal; ``low`` and ``high`` are an interval along y."""
    values = [v for dot in dots for v in (dot.x, dot.y, dot.low, dot.high) if v is not None]
    axis = log_axis(values, least=1.5)
    place = _at(axis, axis)
    body = [_line(place(axis.low, axis.low), place(axis.high, axis.high), "diagonal")]
    for dot in dots:
        if dot.low is not None and dot.high is not None:
            body.append(_line(place(dot.x, dot.low), place(dot.x, dot.high), f"{dot.kind} interval"))
        body.append(_dot(place(dot.x, dot.y), dot.kind, dot.text))
    return _frame(axis, axis, names, body, label)


def choices(
    options: Sequence[str],
    predicted: Sequence[float],
    measured: Sequence[tuple[int, float, str]],
    *,
    chosen: int | None,
    ordered: bool,
    label: str,
) -> Markup:
    """Factors over the tuned configuration along the choices of a knob, on a log axis.

    Args:
      predicted: by option.
      measured: index of an option, factor, what to tell of it.
      chosen: index of the tuned option.
      ordered: whether the options have an order, and a line between them a meaning.
    """
    y = log_axis([1.0, *predicted, *(v for _, v, _ in measured)])
    x = Axis(-0.6, len(options) - 0.4, tuple(range(len(options))))
    place = _at(x, y)
    body = [_line(place(x.low, 1.0), place(x.high, 1.0), "one")]
    if ordered:
        points = " ".join("{},{}".format(*place(index, value)) for index, value in enumerate(predicted))
        body.append(element("polyline", points=points, class_="curve"))
    for index, value in enumerate(predicted):
        text = f"{options[index]}: predicted {value:.2f}x the seconds"
        kind, radius = ("chosen", 5.5) if index == chosen else ("predicted", 4.0)
        body.append(_dot(place(index, value), kind, text, radius))
    for index, value, text in measured:
        across, up = place(index, value)
        square = element("rect", element("title", text), x=across + 3, y=round(up - 4.0, 1), width=8, height=8, class_="measured")
        body.append(square)
    return _frame(x, y, ("", "times the tuned seconds"), body, label, options)


def strip(values: Sequence[float], middle: float, label: str) -> Markup:
    """Ratios of paired rounds on a line, with 1 and the median marked."""
    height, line = 74, 34
    axis = log_axis([1.0, *values], least=1.1)

    def across(value: float) -> float:
        return round(12 + axis.share(value) * (WIDTH - 24), 1)

    parts = [_line((12, line), (WIDTH - 12, line), "axis")]
    for tick in axis.ticks:
        parts.append(element("text", f"{written(tick)}x", x=across(tick), y=line + 28, class_="middle"))
        parts.append(_line((across(tick), line), (across(tick), line + 6), "axis"))
    parts.append(_line((across(1.0), 8), (across(1.0), line + 12), "one"))
    parts.append(_line((across(middle), 8), (across(middle), line + 12), "median"))
    for index, value in enumerate(values):
        up = line - 7 - 8 * (index % 3)  # rounds that came out alike do not hide one another
        parts.append(_dot((across(value), up), "round", f"round {index + 1}: {value:.3f}x", 3.5))
    return element("svg", joined(parts), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label)
