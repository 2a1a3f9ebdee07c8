"""The style of a report and the parts that its sections are made of: tables, paired bars, code. It loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tuner.reporting.markup import Markup, element, joined

# What a page may load: nothing. Even a string that escaped its escaping could not run or fetch anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = Markup("""
:root { color-scheme: light dark; --back: #fff; --panel: #f5f6f8; --text: #1c1e21; --soft: #5d6470; --line: #d9dce1;
  --blue: #2466b0; --orange: #bf4a00; --teal: #0b7f7f; --green: #2a7d3b; --red: #c0262d; --before: #9aa3af; --pink: #a83a86; }
@media (prefers-color-scheme: dark) { :root { --back: #14161a; --panel: #1d2026; --text: #e6e8eb; --soft: #a0a7b3;
  --line: #363b44;
  --blue: #79b4f2; --orange: #f2a160; --teal: #55c7c7; --green: #7bd08b; --red: #ff8a85; --before: #6b7380; --pink: #e39ad0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 0; }
p { margin: .4rem 0; } .lead { font-size: 1.1rem; } .soft, figcaption, caption { color: var(--soft); font-size: .9rem; }
pre { background: var(--panel); padding: .7rem .9rem; margin: .5rem 0; border-radius: 6px; overflow-x: auto; font-size: .875rem; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem; margin: .8rem 0; }
figure { margin: 0; min-width: 0; } svg { display: block; width: 100%; max-width: 32rem; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.moved { min-width: 13rem; } .outcome { min-width: 9rem; overflow-wrap: anywhere; }
tr.tuned td, tr.tuned th { background: var(--panel); font-weight: 600; } .bad { color: var(--red); }
.facts th { font-weight: normal; color: var(--soft); white-space: nowrap; } .facts td { overflow-wrap: anywhere; }
.bars { width: 100%; } .bars th { font-weight: normal; width: 1%; } .bars td:last-child { padding-right: 0; }
.bar { display: flex; align-items: center; gap: .4rem; line-height: 1.35; white-space: nowrap; }
.bar i { display: block; height: .6rem; min-width: 1px; border-radius: 2px; background: var(--before); }
.bar.after i { background: var(--blue); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .875rem; color: var(--soft); margin: .3rem 0; padding: 0;
  list-style: none; } .key svg { display: inline-block; width: 14px; height: 14px; vertical-align: -2px; margin-right: .3rem; }
svg text { fill: var(--text); font-size: 12px; } svg .name { fill: var(--soft); }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .reach { stroke: var(--before); stroke-width: 1; } svg .expected { stroke: var(--before); stroke-width: 1.5; fill: none; }
svg .failed { stroke: var(--red); stroke-width: 2; fill: none; } svg .best { stroke: var(--green); stroke-width: 2; fill: none; }
svg .diagonal, svg .one { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 4 3; }
svg .median { stroke: var(--blue); stroke-width: 2; } svg .round { fill: var(--blue); fill-opacity: .6; }
svg .curve { stroke: var(--blue); stroke-width: 1.5; fill: none; } svg circle { stroke: var(--back); stroke-width: 1; }
svg .predicted { fill: var(--blue); } svg .chosen { fill: var(--green); }
svg .measured { fill: none; stroke: var(--orange); stroke-width: 2; }
svg .baseline { fill: var(--text); } svg .annealed { fill: var(--blue); } svg .random { fill: var(--orange); }
svg .shared { fill: var(--teal); } svg .varied { fill: var(--before); } svg .switched { fill: var(--pink); }
svg .other { fill: var(--soft); }
svg line.interval { stroke-width: 1.5; stroke-opacity: .5; stroke: var(--soft); }
""")


class Compared(NamedTuple):
    """One quantity before and after, as bars: numbers that set their lengths, and what is written beside them."""

    name: str
    before: float
    after: float
    texts: tuple[str, str]


class Cell(NamedTuple):
    """A cell of a table: what is written, the number it stands for where it does, and a class of the style sheet."""

    text: object
    value: float | None = None
    kind: str | None = None


def document(title: str, body: Sequence[Markup]) -> str:
    """A whole page."""
    head = element("title", title), element("style", _STYLE)
    # Elements without an end are written out: they are the only ones.
    metas = Markup(
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    )
    page = element("html", element("head", metas, *head), "\n", element("body", joined(body)), lang="en")
    return f"<!doctype html>\n{page}\n"


def section(title: str, *content: object) -> Markup:
    """A heading and what is under it."""
    return element("section", element("h2", title), joined(content), "\n")


def paragraph(text: object, kind: str | None = None) -> Markup:
    """A paragraph."""
    return element("p", text, class_=kind)


def code(lines: Sequence[str]) -> Markup:
    """Lines to be copied."""
    return element("pre", element("code", "\n".join(lines)))


def charts(*figures: tuple[Markup, object]) -> Markup:
    """Charts beside each other where there is room, each with what is said under it."""
    drawn = [element("figure", chart, element("figcaption", caption)) for chart, caption in figures]
    return element("div", joined(drawn), class_="charts")


def table(head: Sequence[str], rows: Sequence[tuple[str | None, Sequence[Cell]]]) -> Markup:
    """A table that scrolls by itself where it is too wide: names of columns, and rows with a class or None.

    A column is set as its first cell is.
    """
    kinds = [cell.kind for cell in rows[0][1]]
    names = [element("th", name, class_="number" if kind == "number" else None) for name, kind in zip(head, kinds, strict=True)]
    lines = [element("tr", joined(map(_cell, cells)), class_=kind) for kind, cells in rows]
    inner = element("thead", element("tr", joined(names))), element("tbody", joined(lines))
    return element("div", element("table", joined(inner)), class_="wide")


def _cell(cell: Cell) -> Markup:
    shown = cell.text if cell.value is None else element("data", cell.text, value=repr(cell.value))
    return element("td", shown, class_=cell.kind)


def facts(rows: Mapping[str, object]) -> Markup:
    """Names and values."""
    lines = [element("tr", element("th", name), element("td", value)) for name, value in rows.items()]
    return element("div", element("table", element("tbody", joined(lines)), class_="facts"), class_="wide")


def bars(rows: Sequence[Compared]) -> Markup:
    """Two bars a row, before and after, the longest of all as long as there is room."""
    longest = max((max(row.before, row.after) for row in rows), default=0.0) or 1.0

    def bar(value: float, text: str, kind: str) -> Markup:
        # The text needs a part of the width: on a phone, too.
        return element(
            "div", element("i", style=f"width: {60 * value / longest:.1f}%"), element("span", text), class_=f"bar {kind}"
        )

    lines = [
        element(
            "tr",
            element("th", row.name),
            element("td", bar(row.before, row.texts[0], "before"), bar(row.after, row.texts[1], "after")),
        )
        for row in rows
    ]
    return element("table", element("tbody", joined(lines)), class_="bars")


def key(entries: Sequence[tuple[Markup, str]]) -> Markup:
    """What the marks of charts mean: a mark inside a square of 14 units, and its name."""
    items = [
        element("li", element("svg", mark, viewBox="0 0 14 14", aria_hidden="true"), element("span", text))
        for mark, text in entries
    ]
    return element("ul", joined(items), class_="key")


def mark(kind: str, shape: str = "dot") -> Markup:
    """A mark for :func:`key`: a dot, a cross, a square or a line of a class of the style sheet."""
    if shape == "dot":
        return element("circle", cx=7, cy=7, r=4, class_=kind)
    if shape == "square":
        return element("rect", x=3, y=3, width=8, height=8, class_=kind)
    if shape == "cross":
        return element("path", d="M4 4L10 10M4 10L10 4", class_=kind)
    if shape == "swatch":
        return element("rect", x=0, y=3, width=14, height=8, style=f"fill: var(--{kind})")
    return element("line", x1=0, y1=7, x2=14, y2=7, class_=kind)
