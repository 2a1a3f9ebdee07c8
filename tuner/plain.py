"""Plain values from files that anyone may have edited, or a disk damaged: what each must be, and one line where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from predictor import SchemaError


class Rule(NamedTuple):
    """What a value must be."""

    holds: Callable[[Any], bool]
    what: str


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TEXT = Rule(lambda value: isinstance(value, str), "text")
FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
LIST = Rule(lambda value: isinstance(value, list), "a list")
TABLE = Rule(lambda value: isinstance(value, dict), "an object")
NUMBER = Rule(_is_number, "a number")
NUMBERS = Rule(lambda value: isinstance(value, list | tuple) and all(map(_is_number, value)), "a list of numbers")
POSITIVE = Rule(lambda value: _is_number(value) and value > 0, "a number above 0")
COUNT = Rule(lambda value: _is_number(value) and isinstance(value, int) and value >= 0, "a whole number of at least 0")


def optional(rule: Rule) -> Rule:
    """The same of a value that may be absent."""
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.what}, or null")


def check(kind: str, tree: Any, rules: Mapping[str, Rule]) -> None:
    """Raises SchemaError, which names ``kind``, unless ``tree`` is an object whose values keep to the rules; it may hold more."""
    if not isinstance(tree, dict):
        raise SchemaError(f"{kind}: must be an object")
    for name, rule in rules.items():
        if name not in tree:
            raise SchemaError(f"{kind}: lacks {name}")
        if not rule.holds(tree[name]):
            raise SchemaError(f"{kind}.{name} = {tree[name]!r:.100}: must be {rule.what}")
