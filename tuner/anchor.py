"""A process that stays alive beside what is measured after it, which is told as of when the first was measured.

Machines that others share are slower by a half for minutes, and two measurements one after the other differ by a tenth; in
alternation with one and the same process they differ by half of that (benchmarks/README.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from predictor import Hardware, Measurement, Outcome
from tuner.bridge import Config
from tuner.measure import REPEATS, Reference, Timing, measure_timings

_LONGEST_BURST = 1.0  # seconds: longer ones would take too much of a budget from what is to be measured
_MEMORY = 0.1  # of the machine's, which the others do not have


class Anchor:
    """The start's process. Close it, or use it as a context manager: a worker is a process of its own."""

    def __init__(self, config: Config, *, hardware: Hardware, timeout: float, say: Callable[[str], None]):
        """Starts it; :meth:`measure` or :meth:`resume` says as of when the others are to be told."""
        self._say = say
        self._then: float | None = None  # seconds an environment step
        self._timing = Timing(config, hardware=hardware, timeout=timeout)

    def __enter__(self) -> Anchor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; it may have ended before."""
        self._then = None
        self._timing.worker.stop()

    @property
    def reference(self) -> Reference | None:
        """What others are measured beside; None where it is no use, or has failed since."""
        if self._then is not None and self._timing.failure is not None:
            self._say(f"the start's process has ended ({self._timing.failure}): nothing is measured beside it any more")
            self.close()
        return None if self._then is None else Reference(self._timing, self._then)

    def measure(self, *, seconds: float, enough: float, loop_counts: Sequence[int]) -> list[Measurement]:
        """Measures its own configuration, as :func:`tuner.measure.measure_config` does. Of no use to others, it ends."""
        self._timing.wait()
        (found,) = measure_timings([self._timing], [loop_counts], rounds=REPEATS, seconds=seconds, enough=enough)
        self._keep(found[0])
        return found

    def resume(self, known: Measurement) -> None:
        """Another process measured its configuration: what follows is told as of then."""
        if self._suits(known):  # else nobody waits until it is up
            self._timing.wait()
        self._keep(known)

    def _suits(self, known: Measurement) -> bool:
        """Whether its process may stay beside others, by what was measured of it."""
        hardware = self._timing.hardware
        # What has an accelerator has its memory, and is not shared with strangers.
        fits = hardware.platform == "cpu" and (known.peak_bytes or math.inf) <= _MEMORY * hardware.memory_bytes
        # Threads would have to rest between bursts, which favours some configurations over others: benchmarks/README.md.
        return known.outcome == Outcome.OK and fits and self._timing.config.runtime.kind != "sebulba"

    def _keep(self, known: Measurement) -> None:
        shortest = self._timing.ready.get("warmup_seconds", math.inf)  # of its bursts: a cycle of acting and learning
        if self._suits(known) and self._timing.failure is None and shortest <= _LONGEST_BURST:
            self._then = known.seconds_per_env_step
        else:
            self.close()
