"""What the suites of the host have in common: records of NumPy arrays, and options of an id.

Nothing here imports JAX, so that a simulator's own process starts in a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from muzerox.errors import EnvironmentUnavailable, nearest_name

log = logging.getLogger("muzerox.simulators")


class Frames(NamedTuple):
    """What E simulators show after reset or step; the fields of ``TimeStep`` that a single player's game has."""

    observation: np.ndarray  # [E, ...] of the decision to take now: the next episode's where this one ended
    reward: np.ndarray  # [E] float32
    terminated: np.ndarray  # [E] bool
    truncated: np.ndarray  # [E] bool
    final_observation: np.ndarray  # [E, ...] what the step led to, before any reset


class Simulators(NamedTuple):
    """E running simulators of one player, to whom every action is always open.

    ``reset() -> Frames``, ``step(action int32 [E]) -> Frames``, ``close()``. They start their next episode within the step that
    ended the last. The arrays are the caller's to keep.
    """

    num_actions: int
    reset: Callable[[], Frames]
    step: Callable[[np.ndarray], Frames]
    close: Callable[[], None]


@contextmanager
def closing(close: Callable[[], None]) -> Iterator[None]:
    """Calls ``close``, which is somebody else's code, after the block; what it raises does not replace what the block raised."""
    try:
        yield
    except BaseException:
        try:
            close()
        except (Exception, SystemExit):
            log.warning("what failed could not be closed", exc_info=True)
        raise
    close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A value that an id may set: ``suite:name?option=value&option=value``."""

    kind: type[bool] | type[int] | type[float]
    default: bool | int | float | None  # None: what the environment itself has
    doc: str
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """One line: default, range, meaning."""
        limits = " ".join(f"{word} {limit:g}" for word, limit in (("from", self.low), ("to", self.high)) if limit is not None)
        return _shown(self) + (f" ({limits})" if limits else "") + f": {self.doc}"


def _shown(option: Option) -> str:
    if option.default is None:
        return "its own"
    return str(option.default).lower() if option.kind is bool else f"{option.default}"


def _example(name: str, option: Option) -> str:
    return f"{name}={option.low if option.default is None else _shown(option)}"


def _value(env_id: str, path: str, text: str, option: Option) -> bool | int | float:
    if option.kind is bool:
        if text not in ("true", "false"):
            raise EnvironmentUnavailable(
                "env", env_id, f"{path} = {text!r} must be true or false", f"{path}={nearest_name(text, ('true', 'false'))}"
            )
        return text == "true"
    try:
        value = option.kind(text)
    except ValueError:
        kind = "a whole number" if option.kind is int else "a number"
        raise EnvironmentUnavailable("env", env_id, f"{path} = {text!r} must be {kind}", _example(path, option)) from None
    low = -np.inf if option.low is None else option.low
    high = np.inf if option.high is None else option.high
    if not low <= value <= high:  # so written that NaN is out of range too
        nearest = option.kind(low if not value > high else high)
        span = f"from {low:g}" + (f" to {high:g}" if option.high is not None else "")
        raise EnvironmentUnavailable("env", env_id, f"{path} = {text} must be {span}", f"{path}={nearest}")
    return value


def parse_options(env_id: str, text: str, table: Mapping[str, Option]) -> dict[str, bool | int | float]:
    """``option=value&option=value`` to values by name; only those given.

    Raises:
      EnvironmentUnavailable: an option that the suite lacks or that is given twice, a value of another type or out of range.
    """
    given: dict[str, bool | int | float] = {}
    for part in text.split("&"):
        name, equals, value = part.partition("=")
        if name not in table:
            rule = f"knows the options {', '.join(table)}" if table else "takes no options"
            suite = env_id.partition(":")[0]
            raise EnvironmentUnavailable("env", env_id, f"{suite} {rule}, not {name!r}", nearest_name(name, table))
        if not equals:
            raise EnvironmentUnavailable("env", env_id, f"{name} needs a value", _example(name, table[name]))
        if name in given:
            raise EnvironmentUnavailable("env", env_id, f"{name} is given twice")
        given[name] = _value(env_id, name, value, table[name])
    return given
