"""How a tuning ended, and the time it was given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from predictor import Hardware, Measurement, SchemaError
from tuner import plain
from tuner.bridge import Config, UserError
from tuner.comparison import speedup_interval
from tuner.history import Trial
from tuner.measuring.drift import Drift

_RULES = {
    "out": plain.TEXT,
    "finished": plain.FLAG,
    "speedup": plain.optional(plain.POSITIVE),
    "objective": plain.TEXT,
    "gain": plain.optional(plain.POSITIVE),
    "balance_factor": plain.optional(plain.NUMBER),
    "verdict": plain.optional(plain.TEXT),
    "seconds": plain.NUMBER,
    "config": plain.TABLE,
    "start_measurement": plain.optional(plain.TABLE),
    "measurement": plain.optional(plain.TABLE),
    "predicted": plain.TABLE,
    "drifts": plain.LIST,
}
_PREDICTED = {"env_steps_per_second": plain.POSITIVE, "seconds_per_env_step": plain.POSITIVE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneResult:
    """How a tuning ended. ``config`` holds the allocation, too."""

    out: str
    finished: bool  # False when it was interrupted before the comparison; it can be continued
    start: Config
    config: Config  # the best: what tuned.toml holds
    speedup: float | None  # tuned over start, environment steps a second, measured in alternation; 1 for the start itself
    start_measurement: Measurement | None  # of the alternation
    measurement: Measurement | None
    predicted: dict[str, Any]  # Prediction of the tuned configuration, made before the comparison
    balance: float | None
    verdict: str | None
    seconds: float
    hardware: Hardware
    history: tuple[Trial, ...]
    objective: str = "time"  # what was minimised
    gain: float | None = None  # start over tuned, in what was minimised; the speedup where that is time
    drifts: tuple[Drift, ...] = ()  # of the precision levels that were faster than the start's

    @property
    def compared(self) -> bool:
        """Whether anything was measured in alternation with the start; else it is told as it was measured first."""
        return self.start_measurement is not None and self.start_measurement != self.history[0].measurement

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the speedup of trainings lies nine times in ten; None where the start stayed or was compared with nothing."""
        start, ours = self.start_measurement, self.measurement
        return None if start is None or ours is None or self.speedup == 1.0 else speedup_interval(ours, start)

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints and result.json holds: plain values."""
        start, ours = self.start_measurement, self.measurement
        return {
            "out": self.out,
            "finished": self.finished,
            "speedup": self.speedup,
            "speedup_interval": self.interval,
            "objective": self.objective,
            "gain": self.gain,
            "start_env_steps_per_second": start.env_steps_per_second if start else None,
            "tuned_env_steps_per_second": ours.env_steps_per_second if ours else None,
            "predicted_env_steps_per_second": self.predicted["env_steps_per_second"],
            "balance_factor": self.balance,
            "verdict": self.verdict,
            "trials": len(self.history),
            "seconds": round(self.seconds, 1),
            "config": self.config.to_dict(),
            "start_measurement": start.to_dict() if start else None,
            "measurement": ours.to_dict() if ours else None,
            "predicted": self.predicted,
            "drifts": [drift.to_dict() | {"accepted": drift.accepted, "says": drift.explain()} for drift in self.drifts],
        }

    @classmethod
    def from_dict(
        cls,
        tree: dict[str, Any],
        *,
        start: Config,
        hardware: Hardware,
        history: Sequence[Trial],
        source: str | Path = "result.json",
    ) -> TuneResult:
        """The result of a tuning that had ended, from :meth:`to_dict` and what else its folder holds.

        Raises:
          UserError: it names ``source``, the file that the tree is from.
        """
        try:
            plain.check("result", tree, _RULES)
            plain.check("predicted", tree["predicted"], _PREDICTED)
            measured = [
                Measurement.from_dict(tree[name]) if tree[name] else None for name in ("start_measurement", "measurement")
            ]
            if all(measured) != (tree["speedup"] is not None) or len({len(m.repeats) for m in measured if m}) > 1:
                raise SchemaError("a speedup is what two measurements of as many repeats tell")
            return cls(
                config=Config.from_dict(tree["config"]),
                start=start,
                start_measurement=measured[0],
                measurement=measured[1],
                hardware=hardware,
                history=tuple(history),
                drifts=tuple(Drift.from_dict(drift) for drift in tree["drifts"]),
                balance=tree["balance_factor"],
                **{
                    name: tree[name]
                    for name in ("out", "finished", "speedup", "objective", "gain", "predicted", "verdict", "seconds")
                },
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # of a drift that is none, too
            raise UserError(str(source), None, f"is not a result ({error}); delete it to compare again") from None


def parse_budget(text: str | float) -> float:
    """``"90s"``, ``"4m"``, ``"1.5h"`` or seconds to seconds. Raises UserError unless it is from 10 seconds to 7 days."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    spelled = str(text).strip().lower()
    try:
        number, unit = (spelled[:-1], units[spelled[-1]]) if spelled[-1:] in units else (spelled, 1.0)
        seconds = float(number if number.isascii() else "") * unit  # float() reads the digits of every script
    except ValueError:
        raise UserError("budget", text, "must be a time such as 90s, 4m or 1h", "4m") from None
    if not 10.0 <= seconds <= 7 * 86400.0:  # NaN fails too
        nearest = "5m" if math.isnan(seconds) else "10s" if seconds < 10.0 else "168h"
        raise UserError("budget", text, "must be from 10 seconds to 7 days", nearest)
    return seconds
