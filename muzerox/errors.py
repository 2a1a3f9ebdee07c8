"""The one kind of error a user can cause: a single readable line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave cannot be used.

    ``str(error)`` is one line: path, value, rule and, where one exists, the nearest valid choice. The
    command prints it and exits with 2.
    """

    def __init__(self, path: str, value: object, rule: str, nearest: object = None):
        self.path, self.value, self.rule, self.nearest = path, value, rule, nearest
        shown = repr(value)
        shown = shown if len(shown) <= 300 else f"{shown[:140]}...{shown[-140:]}"
        text = f"{path} = {shown}: {rule}" if value is not None else f"{path}: {rule}"
        if nearest is not None:
            text += f"; nearest valid: {nearest}"
        super().__init__(" ".join(text.split()))


class ConfigError(UserError):
    """A configuration value, key or file that breaks a rule."""


class EnvironmentUnavailable(UserError):
    """An environment id that does not exist or cannot be served."""


class CheckpointError(UserError):
    """A run directory or checkpoint that cannot be read or written."""


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The closest of ``names`` to ``name``; None when there are none."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return close[0] if close else None


class RunFailed(RuntimeError):
    """A run that cannot go on, through no fault of its inputs' form; ``str(error)`` is one line."""
