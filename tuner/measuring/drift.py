"""Whether a precision level may be chosen: how far its numbers are from O0's, what is too far, and how that is said."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from predictor import Hardware
from tuner.bridge import REFERENCE, Config, concrete
from tuner.measuring.worker_client import TIMEOUT, Worker, WorkerFailed

TRAINING_SECONDS = 4.0  # before numbers are compared
EXAMPLES = 128  # replayed sequences


class Limits(NamedTuple):
    """What a level must keep to: a few times what bfloat16 needs, and less than what 8 bits would.

    Measured with the presets of both CartPoles, tic_tac_toe and MinAtar Breakout after four seconds of training on a CPU or 1,024
    updates, three seeds each: the worst of twelve. Of parameters that are off by 1 in 100, or rounded to float8's three bits, the
    best of twelve. The other search engine at O0 gives exact zeros.

                         O1_float16    O1, O2    parameters to 1 in 100    float8
        KL / learnt         0.00001    0.0003                   0.00002    0.0017
        values                 0.1%      1.0%                      1.0%      4.2%
        rewards                0.3%      1.3%                        0%        0%
        searches               1.0%      5.2%                      1.2%      1.1%
        gradients              2.2%      7.8%                      2.3%       13%

    Each alone may miss what 8 bits do; values missed none of it. (Rewards as shares of the spread of values alone, as they were
    until O1 was refused for 2.3% of what tic_tac_toe's values were after 176 updates.)
    """

    # Nats. By Pinsker's inequality 2% of the probability moves at the most.
    policy_kl: float = 1e-3
    # Of the KL of policies from uniform ones: a tenth of their differences, squared. What says little yet may differ by little.
    policy_share: float = 0.01
    policy_kl_max: float = 0.1  # of any state: 22% of its probability
    value_error: float = 0.02  # what values are learnt from, sums of rewards, differs by all of that spread and more
    reward_error: float = 0.02
    # Catches what is broken, no more: a search spreads its values over a scale of its own, and where actions are as good as each
    # other any rounding decides. Another draw of exploration moves 12% in MinAtar Breakout and 22% in tic_tac_toe; on Acrobot, of
    # whose policy little is learnt in seconds, O2 moved 15.5% where policies differed by 1e-8 nats and values by 0.05%.
    weights_differ: float = 0.4
    # 12 degrees. Not of a training that is done: as policies and values become what they are compared with, gradients vanish, and
    # rounding is all of them (after 5,000 updates of CartPole O1's are off by 0.4 and its training goes on well).
    gradient_error: float = 0.2
    policy_learnt: float = 1e-3  # at least: what has learnt nothing is the same at every level


LIMITS = Limits()
_TOLD = 4  # of the checks, the first: the others are named where they refuse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """How far a level's numbers are from O0's, for the same parameters; see ``muzerox.drift.compare``."""

    policy_kl: tuple[float, ...]  # nats, mean over sequences, by position: the root and after each unrolled step
    policy_kl_max: float
    value_error: tuple[float, ...]  # of the spread of O0's values, by position
    reward_error: tuple[float, ...]
    value_spread: float
    policy_learnt: float  # nats from uniform
    actions_agree: float  # share of searched roots
    weights_differ: float  # total variation
    gradient_error: float  # of O0's length, or of what chance does to it
    updates: int  # of the training before
    training_seconds: float
    examples: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drift:
    """What was found of a precision level: figures, or why there are none."""

    level: str
    speedup: float | None = None  # of the trial that asked for it, over the start
    figures: Figures | None
    failure: str | None = None
    seconds: float = 0.0  # that finding out took

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Drift:
        """The inverse of :meth:`to_dict`, which may hold more. Raises KeyError, TypeError or ValueError."""
        values = {field.name: tree[field.name] for field in dataclasses.fields(cls)}
        figures = values["figures"]
        return cls(**{**values, "figures": None if figures is None else make_figures(figures)})

    @property
    def complaints(self) -> tuple[str, ...]:
        """What speaks against the level; nothing where it is accepted."""
        if self.figures is None:
            return (self.failure or "there are no figures",)
        return tuple(f"{what} ({limit})" for what, limit, kept in _checks(self.figures) if not kept)

    @property
    def accepted(self) -> bool:
        """Whether the level may be chosen."""
        return not self.complaints

    def explain(self) -> str:
        """One line, with figures."""
        speed = f"{self.speedup:.2f}x as good as the start; " if self.speedup is not None else ""
        if self.figures is None:
            return f"{self.level}: {speed}could not be compared with {REFERENCE} ({self.failure}): not used"
        told = ", ".join(f"{what} ({limit})" for what, limit, _ in _checks(self.figures)[:_TOLD])
        trained = f"{self.figures.updates:,} updates"
        verdict = "accepted" if self.accepted else f"refused for {', '.join(self.complaints)}"
        return f"{self.level}: {speed}against {REFERENCE} after {trained}: {told}: {verdict}"


def make_figures(tree: dict[str, Any]) -> Figures:
    """Figures from plain values. Raises TypeError for other names, ValueError for what are no numbers."""
    whole = ("updates", "examples")
    values: dict[str, Any] = {}
    for name, x in tree.items():
        values[name] = tuple(float(y) for y in x) if isinstance(x, (list, tuple)) else int(x) if name in whole else float(x)
    return Figures(**values)


def _checks(figures: Figures) -> list[tuple[str, str, bool]]:
    """What is compared, with its figure, and its limit; whether it is kept to. What is no number keeps to none."""
    f, limit = figures, LIMITS
    kl, value, reward = (float(np.max(x)) for x in (f.policy_kl, f.value_error, f.reward_error))  # max() would lose a NaN
    most = float(np.minimum(limit.policy_kl, limit.policy_share * f.policy_learnt))
    return [
        (f"policies differ by {kl:.2g} nats", f"limit {most:.2g}", kl <= most),
        (f"values by {value:.2%} of their spread", f"limit {limit.value_error:.0%}", value <= limit.value_error),
        (f"searches by {f.weights_differ:.2%}", f"limit {limit.weights_differ:.0%}", f.weights_differ <= limit.weights_differ),
        (f"gradients by {f.gradient_error:.1%}", f"limit {limit.gradient_error:.0%}", f.gradient_error <= limit.gradient_error),
        (f"rewards by {reward:.2%}", f"limit {limit.reward_error:.0%}", reward <= limit.reward_error),
        (f"one policy by {f.policy_kl_max:.2g} nats", f"limit {limit.policy_kl_max:g}", f.policy_kl_max <= limit.policy_kl_max),
        (
            f"policies that had learnt {f.policy_learnt:.2g} nats",
            f"at least {limit.policy_learnt:g}",
            f.policy_learnt >= limit.policy_learnt,
        ),
    ]


def measure_drift(
    config: Config,
    levels: Sequence[str],
    *,
    hardware: Hardware,
    seconds: float = TRAINING_SECONDS,
    examples: int = EXAMPLES,
    timeout: float = TIMEOUT,
) -> dict[str, Drift]:
    """Trains ``config`` for some seconds in a subprocess, and compares each of ``levels`` with O0 on sequences of its replay.

    Args:
      seconds: of training, beside what compiling and playing the first sequences take; more if little is learnt in them.
      examples: sequences.
      timeout: seconds that all of it may take.

    Returns:
      By level a Drift; where it failed, with a ``failure``: that level is not to be trusted.

    Raises:
      UserError: a configuration that this machine cannot be asked for.
    """
    began = time.monotonic()
    # Nothing is timed: what is compiled beside the training need not fit what the training is allowed.
    config = concrete(config, hardware.platform).replace("allocation.memory_gib", None)
    request = {
        "kind": "drift",
        "config": config.to_dict(),
        "levels": list(levels),
        "seconds": seconds,
        "examples": examples,
        "least_learnt": LIMITS.policy_learnt,
    }
    found: dict[str, Any]
    try:
        with Worker(request, timeout=timeout) as worker:
            found = worker.answer()["levels"]
    except WorkerFailed as failure:
        found = {level: {"failure": f"{failure.outcome}: {failure.error}"} for level in levels}
    share = (time.monotonic() - began) / max(1, len(levels))

    def drift(level: str) -> Drift:
        failure = found[level].get("failure")
        figures = make_figures(found[level]) if failure is None else None
        return Drift(level=level, figures=figures, failure=failure, seconds=share)

    return {level: drift(level) for level in levels}
