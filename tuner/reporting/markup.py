"""HTML and SVG from elements: what is not markup already is escaped where it is put in, so that nothing can be forgotten."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")  # a page may not hold them, and files cannot hold surrogates


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(content: object) -> Markup:
    """``content`` as markup: itself if it is that, else its text, escaped; what cannot be shown becomes U+FFFD."""
    if isinstance(content, Markup):
        return content
    return Markup(html.escape(_UNPRINTABLE.sub("\ufffd", str(content)), quote=True))


def joined(contents: Iterable[object]) -> Markup:
    """All of them, one after the other."""
    return Markup("".join(escaped(content) for content in contents))


def element(name: str, *children: object, **attributes: object) -> Markup:
    """``<name attributes>children</name>``.

    Underscores in names of attributes stand for hyphens, one at the end for nothing (``class_``); what is None is left out.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"' for key, value in attributes.items() if value is not None
    )
    return Markup(f"<{name}{shown}>{joined(children)}</{name}>")
