"""A training session that can be timed in bursts: what the subprocess of a measurement runs."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from tuner.bridge import (
    Config,
    PipelineTotals,
    Skips,
    cache_use,
    enable_cache,
    energy,
    has_diverged,
    lent_cores,
    make_algorithm,
    make_env,
    make_runtime,
    make_window,
    offer_cpu_devices,
    portion,
    resolve,
    resolve_kind,
    usage,
)

_LEAST_DISPATCHES = 4  # of a burst under threads, where half a second has as many: the first and the last overlap with nothing
# Threads are warm when self-play makes as many steps as are learnt from, but for this share of what is learnt in a second at the
# least, and in so many cycles: it makes rows whole.
_KEEPING_PACE, _LOOKED_AT, _CYCLES = 0.03, 1.0, 4


def cycle_of(config: Config) -> int:
    """Updates of a cycle, and of the shortest burst: rows are made every so many, and a burst holds its share of both."""
    rows = config.runtime.num_envs * config.selfplay_workers
    return max(1, math.ceil(rows / float(config.train.batch_size / config.replay_ratio)))


class Session:
    """A training in progress that is timed in bursts. It writes nothing but the compilation cache. Close it.

    Args:
      lent: cores that it may use until its program is compiled; by default none but its own.
    """

    def __init__(self, config: Config, lent: Sequence[int] = ()):
        enable_cache()
        offer_cpu_devices(config.runtime.num_devices)
        with cache_use() as from_cache:
            self._start(config, lent)
            self.from_cache = from_cache()

    def _start(self, config: Config, lent: Sequence[int]) -> None:
        start = time.perf_counter()
        config = config.replace({f"precision.{k}": v for k, v in vars(resolve(config.precision)).items()})
        env = make_env(config.env)
        config = resolve_kind(config, env)
        self._threaded = config.runtime.kind == "sebulba"
        if self._threaded:
            # Near its end self-play would no longer run ahead; and who measures may stop this process within a step.
            config = config.replace({"train.max_env_steps": 2_000_000_000, "runtime.step_timeout": 1e6})
        self.config = config
        self._steps_an_update = float(config.train.batch_size / config.replay_ratio)
        self._cycle = cycle_of(config)
        self._skips = Skips()  # of all updates: a loss scale may be found over several bursts
        jax.devices()  # for which XLA makes as many threads as there are cores: its own
        with lent_cores(lent) if lent else contextlib.nullcontext():
            self._runtime = make_runtime(config, env, make_algorithm(config, env.spec))
            # Playing the first rows can take minutes, and tells nothing of the pace that follows.
            self._state = self._runtime.prefill(self._runtime.init(jax.random.key(config.seed)))
            self._run(1, 2 if self._threaded else 1)  # the second batch under threads has to be played for
        # Saving a checkpoint copies the state: a training needs that much more than the bursts that are timed here.
        self._saved_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        self.compile_seconds = time.perf_counter() - start
        self._meter, _ = energy.find_meter(jax.default_backend())
        before = time.perf_counter()
        # Once more, so that no first use of anything is timed.
        if self._threaded:
            self._seconds_an_update = self._catch_up()
        else:
            self._run(1, self._cycle)
            self._seconds_an_update = (time.perf_counter() - before) / self._cycle
        self.warmup_seconds = time.perf_counter() - before

    def close(self) -> None:
        """Ends threads and environments."""
        self._runtime.close()

    def _run(self, n: int, loop_count: int) -> None:
        self._state, self._report = self._runtime.run(self._state, n, loop_count)
        self._skips = self._skips.then(self._report.skips)

    def _catch_up(self) -> float:
        """Has threads as far ahead of the learner as in a training. Returns the seconds that an update takes then.

        They may have run ahead while nobody learnt, until queues were full. Where self-play limits the pace, what was made is
        used up first; where the learner does, self-play takes processor time from it until it is as far ahead as it may be. In
        between, and once it is there, there is nothing to wait for.
        """
        loop_count, made, least, seconds = self.config.runtime.loop_count, 0, 1, math.inf
        most = max(self._cycle, _LEAST_DISPATCHES * loop_count) + make_window(self.config)
        looked: tuple[float, int, int] | None = None  # when, updates made by then, and by how many self-play was ahead
        while made < most:
            # Twice as many each time: the first few tell little of what an update takes.
            n, count = portion(least, loop_count, seconds)
            before = time.perf_counter()
            self._run(n, count)
            now = time.perf_counter()
            made, least, seconds = made + n * count, 2 * least, (now - before) / (n * count)
            if looked is None:
                looked = now, made, self._ahead()
            elif now - looked[0] >= _LOOKED_AT and made - looked[1] >= _CYCLES * self._cycle:
                if abs(self._ahead() - looked[2]) <= _KEEPING_PACE * (made - looked[1]):
                    break
                looked = now, made, self._ahead()
        return seconds

    def _ahead(self) -> int:
        """Updates that self-play has made enough steps for, and that are yet to be made."""
        return self._runtime.updates_at(self._report.env_steps) - self._report.updates

    def _never_learnt(self) -> bool:
        """Whether every update was left out, though they may be few, and there is no loss scale that is yet to be found."""
        return self._skips.total == self._skips.updates and self.config.precision.loss_scale != "dynamic"

    def _joules(self) -> float | None:
        """Since the last look; None where nobody tells, and once a counter is gone: seconds are measured all the same."""
        try:
            return self._meter.joules() if self._meter else None
        except OSError:
            self._meter = None
            return None

    def _portions(self, seconds: float, loop_count: int) -> list[tuple[int, int]]:
        """Dispatches, and updates of each, that are asked for at once, one after the other, in a burst of about ``seconds``."""
        if self._threaded:
            # As in a training, in whole dispatches.
            n, count = portion(sys.maxsize, self.config.runtime.loop_count, self._seconds_an_update)
            wanted = round(seconds / max(self._seconds_an_update, 1e-9) / count)
            whole, remainder = divmod(max(wanted, math.ceil(self._cycle / count), min(_LEAST_DISPATCHES, n)), n)
            return [(n, count)] * whole + [(remainder, count)] * (remainder > 0)
        updates = max(1, round(seconds / max(self._seconds_an_update, 1e-9) / self._cycle)) * self._cycle
        whole, remainder = divmod(updates, loop_count)
        return [(whole, loop_count)] * (whole > 0) + [(1, remainder)] * (remainder > 0)

    @property
    def shortest_burst(self) -> float:
        """Seconds that a burst takes at the least, about."""
        return self._seconds_an_update * sum(n * count for n, count in self._portions(0.0, self.config.runtime.loop_count))

    def burst(self, seconds: float, loop_count: int) -> dict[str, Any]:
        """Trains for about ``seconds`` in dispatches of ``loop_count`` updates, in whole cycles of acting and learning.

        The last dispatch makes what is left; where not even one fits, it is the only one: next to it, dispatching costs nothing.
        Under sebulba dispatches are of the configured size, or as much shorter as a training makes them, and threads stay at work
        after a burst: the next goes on from where this one ended, if it follows at once or the process is stopped in between.
        """
        portions = self._portions(seconds, loop_count)
        updates = sum(n * count for n, count in portions)
        if self._threaded:
            self._run(1, portions[0][1])  # who waited while nobody learnt has stopped
        pipeline = PipelineTotals()
        self._joules()
        machine, cpu, wall = usage.machine_cpu_seconds(), usage.cpu_seconds(), time.perf_counter()
        for n, count in portions:
            self._run(n, count)
            pipeline.add(self._report.pipeline)
        wall, cpu, machine_after = time.perf_counter() - wall, usage.cpu_seconds() - cpu, usage.machine_cpu_seconds()
        joules = self._joules()
        self._seconds_an_update = wall / updates
        lost = has_diverged(self.config.precision, self._skips) or self._never_learnt()
        return {
            "wall_seconds": wall,
            "seconds_per_env_step": wall / (updates * self._steps_an_update),
            "updates_per_second": updates / wall,
            "cpu_use": cpu / wall,
            "others_seconds": 0.0 if machine is None or machine_after is None else max(0.0, machine_after - machine - cpu),
            "peak_bytes": usage.peak_bytes() + self._saved_bytes,
            "device_peak_bytes": _device_peak_bytes(),
            "joules_per_env_step": joules / (updates * self._steps_an_update) if joules is not None else None,
            "finite": not lost and math.isfinite(self._report.metrics.get("loss", 0.0)),  # none, where all were left out
            **_pipeline_figures(pipeline.result(), wall),
        }


def _pipeline_figures(pipeline: dict[str, float], wall: float) -> dict[str, Any]:
    """How old what was used was, and threads waiting by what they waited for; nothing of a runtime without threads."""
    ages = {name: pipeline[f"{name}_mean"] for name in ("batch_staleness", "acting_staleness") if f"{name}_mean" in pipeline}
    waits = {
        name.removeprefix("wait_").removesuffix("_seconds"): round(value / wall, 4)
        for name, value in pipeline.items()
        if name.startswith("wait_") and name.endswith("_seconds")
    }
    return {**ages, "waits": waits}


def _device_peak_bytes() -> float | None:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats["peak_bytes_in_use"]) if "peak_bytes_in_use" in stats else None
