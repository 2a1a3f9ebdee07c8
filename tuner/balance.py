"""The resource balance factor of a run, and how allocations are corrected by it, one resource at a time. Pure.

Step 2.5 of the method. B is the mean over resources of allocated / demand, the demand being what the run was measured to
use, with headroom, were nothing limited. B > 1 + d: over-allocated, CPU and memory are reduced first. B < 1 - d: starved,
the accelerator is increased first, then the bottleneck. A resource that is no farther than d from its own demand is left
alone. What the method does not say, a mean hides: where B is between the two and still a resource lacks more than d of its
demand, it is increased as if B were low.

A correction moves one resource, so that the next run tells what it did: where that takes ``WORSE`` times as long the move is
undone, and not tried again until the demand for that resource changes by more than d, or the move of another one has paid: what
does not help while cores are short may help when they are not. What an undone move goes back to was measured, so that the next
move is made from there at once.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tuner.allocate import Limits

THRESHOLD = 0.25  # d
WORSE = 1.02  # times the seconds before a move: then it is undone
TIED = 0.05  # resources whose shares of their demand differ by less are told apart by their value to the predictor
CORES, MEMORY, ACCELERATOR = range(3)
GROUPS = (CORES, MEMORY, ACCELERATOR)  # which resource each column of ``allocate.RESOURCES`` is a part of
NOTHING = -1


class Verdict(enum.StrEnum):
    """What a balance factor means."""

    OVER = "over-allocated"
    BALANCED = "balanced"
    STARVED = "starved"


class Seen(NamedTuple):
    """What a run under an allocation said; [C] by column."""

    seconds: float  # an environment step; infinite where memory ran out, NaN where it is not to be compared
    wanted: np.ndarray  # what it would have been given, headroom included, were nothing limited
    limits: Limits  # what keeps it alive, and what there is
    gain: np.ndarray  # log seconds that a step more is predicted to win, over the step's share of all there is
    loss: np.ndarray  # log seconds that a step less is predicted to cost, likewise


class State(NamedTuple):
    """Where corrections stand; [C] by column."""

    allocated: np.ndarray  # to the next run
    before: np.ndarray  # the last move
    seconds: float  # of the run before the last move; NaN before any
    moved: int  # resource of that move, NOTHING where there is none to judge
    asked: np.ndarray  # where that move was to go; what is allocated may be rounded
    refused: np.ndarray  # where a move that was undone was to go; NaN where none was


def start(allocated: ArrayLike) -> State:
    """The state of whoever has been given ``allocated`` [C], and has corrected nothing yet."""
    given = np.asarray(allocated, np.float64)
    return State(given, given, math.nan, NOTHING, given, np.full_like(given, np.nan))


def balance_factor(allocated: ArrayLike, wanted: ArrayLike) -> jnp.ndarray:
    """B, float32 [...]: the mean of allocated / demand over the resources [..., R] that are wanted at all (demand > 0)."""
    allocated, wanted = jnp.asarray(allocated, jnp.float32), jnp.asarray(wanted, jnp.float32)
    counts = wanted > 0
    ratio = jnp.where(counts, allocated / jnp.where(counts, wanted, 1.0), 0.0)
    return jnp.sum(ratio, axis=-1) / jnp.maximum(jnp.sum(counts, axis=-1), 1)


def verdict(factor: float, threshold: float = THRESHOLD) -> Verdict:
    """The verdict on one balance factor."""
    if factor > 1.0 + threshold:
        return Verdict.OVER
    return Verdict.STARVED if factor < 1.0 - threshold else Verdict.BALANCED


def correct(state: State, seen: Seen, groups: tuple[int, ...] = GROUPS, threshold: float = THRESHOLD) -> State:
    """The state after a run under ``state.allocated``: the last move undone if it did not pay, and at most one resource moved.

    Args:
      state: [C] columns.
      groups: which of CORES, MEMORY, ACCELERATOR each column is a part of; columns of one resource move together, as devices
        do that change their role.
      threshold: d.
    """
    column, target = np.asarray(groups), _target(seen)
    here, seconds, refused = state.allocated, seen.seconds, state.refused
    if state.moved != NOTHING and seen.seconds > WORSE * state.seconds:
        here, seconds = state.before, state.seconds
        refused = np.where(column == state.moved, state.asked, refused)
        if math.isinf(seen.seconds):  # it did not run, so that what it said is a guess
            return State(here, here, seconds, NOTHING, here, refused)
    elif state.moved != NOTHING and WORSE * seen.seconds < state.seconds:
        refused = np.full_like(refused, np.nan)
    changed = np.abs(target - refused) > threshold * refused
    refused = np.where(changed, np.nan, refused)
    resource = _to_move(here, refused, seen, column, threshold)
    moved = np.where(column == resource, target, here)
    return State(moved, here, seconds, resource, moved, refused)


def _target(seen: Seen) -> np.ndarray:
    """The demand between the limits; a minimum above the maximum yields the maximum."""
    return np.minimum(np.maximum(seen.wanted, seen.limits.minimum), seen.limits.maximum)


def _to_move(allocated: np.ndarray, refused: np.ndarray, seen: Seen, column: np.ndarray, threshold: float) -> int:
    """The resource that the next correction moves; NOTHING inside the dead band, or where no move is left."""
    target = _target(seen)
    ratio = np.where(target > 0, allocated / np.where(target > 0, target, 1.0), 1.0)
    resources = [g for g in dict.fromkeys(column.tolist()) if np.isnan(refused[column == g]).any()]
    least = {g: float(ratio[column == g].min()) for g in resources}
    most = {g: float(ratio[column == g].max()) for g in resources}
    short = [g for g in resources if least[g] < 1.0 - threshold]
    over = [g for g in resources if most[g] > 1.0 + threshold and g not in short]

    def bottleneck(among: list[int]) -> int:
        tied = [g for g in among if least[g] <= (1.0 + TIED) * min(least[h] for h in among)]
        return max(tied, key=lambda g: float(seen.gain[column == g].max()))

    def excess(among: list[int]) -> int:
        tied = [g for g in among if most[g] >= (1.0 - TIED) * max(most[h] for h in among)]
        return min(tied, key=lambda g: float(seen.loss[column == g].max()))

    if math.isinf(seen.seconds) and MEMORY in short:
        return MEMORY  # it did not run for want of that: the rest of what it said is a guess
    whole = [(allocated[column == g].sum(), seen.wanted[column == g].sum()) for g in dict.fromkeys(column.tolist())]
    said = verdict(float(balance_factor(*np.array(whole).T)), threshold)
    if said is Verdict.OVER and over:
        return excess([g for g in over if g != ACCELERATOR] or over)
    if short:
        return ACCELERATOR if ACCELERATOR in short else bottleneck(short)
    return NOTHING
