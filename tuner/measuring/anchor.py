"""A process that stays alive beside what is measured after it, which is told as of when the first was measured.

Between its bursts it is stopped, and disturbs nobody.

Machines that others share are slower by a half for minutes, and two measurements one after the other differ by a tenth; in
alternation with one and the same process they differ by half of that (docs/tuning.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from predictor import Hardware, Measurement, Outcome
from tuner.bridge import Config
from tuner.measuring.measure import REPEATS, Bursts, Reference, Timing, measure_timings

_LONGEST_BURST = 1.0  # seconds: longer ones would take too much of a budget from what is to be measured
_MEMORY = 0.1  # of the machine's, which the others do not have


class Anchor:
    """The start's process, once there is one. Close it, or use it as a context manager: a worker is a process of its own."""

    def __init__(self, *, hardware: Hardware, say: Callable[[str], None]):
        self._hardware, self._say = hardware, say
        self._timing: Timing | None = None
        self._reference: Reference | None = None  # the same process while others are measured beside it

    def __enter__(self) -> Anchor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; it may have ended before."""
        self._reference = None
        if self._timing is not None:
            self._timing.worker.stop()

    def measure(
        self, config: Config, *, seconds: float, enough: float, loop_counts: Sequence[int], timeout: float
    ) -> list[Measurement]:
        """Measures a configuration, as :func:`tuner.measure_config` does. Where it may not stay, its process ends."""
        timing = self._start(config, timeout)
        (found,) = measure_timings([timing], [loop_counts], Bursts(REPEATS, seconds, enough), say=self._say)
        self._keep(timing, found[0])
        return found

    def beside(self, config: Config, known: Measurement, timeout: float) -> Reference | None:
        """What others are measured beside; None where it would be no use, or has failed.

        Where another process measured the start, ``config``, as ``known``, one is started, and what follows is told as of then.
        """
        if self._timing is None and self._suits(known):
            self._keep(self._start(config, timeout), known)
        if self._reference is not None and (failure := self._reference.timing.failure) is not None:
            self._say(f"the start's process has ended ({failure}): nothing is measured beside it any more")
            self.close()
        return self._reference

    def _start(self, config: Config, timeout: float) -> Timing:
        self._timing = Timing(config, hardware=self._hardware, timeout=timeout)
        self._timing.wait()
        return self._timing

    def _suits(self, known: Measurement) -> bool:
        """Whether its process may stay beside others, by what was measured of it."""
        # What has an accelerator has its memory, and is not shared with strangers.
        fits = self._hardware.platform == "cpu" and (known.peak_bytes or math.inf) <= _MEMORY * self._hardware.memory_bytes
        return known.outcome == Outcome.OK and fits

    def _keep(self, timing: Timing, known: Measurement) -> None:
        then = known.seconds_per_env_step
        quick = timing.ready.get("shortest_burst", math.inf) <= _LONGEST_BURST
        if then is None or timing.failure is not None or not quick or not self._suits(known):
            self.close()
            return
        self._reference = Reference(timing, then)
