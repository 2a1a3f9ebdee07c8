"""A running pipeline: the threads, what they share, and the learner, which works in the caller's thread."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import jax
import numpy as np

from muzerox import usage
from muzerox.compilation import compile_beside
from muzerox.config import Config
from muzerox.errors import RunFailed
from muzerox.learner import LearnerState
from muzerox.replay import Sample
from muzerox.runtimes.sebulba.crew import Crew
from muzerox.runtimes.sebulba.limiter import Pace, RateLimiter
from muzerox.runtimes.sebulba.meter import Meter
from muzerox.runtimes.sebulba.parameters import ParameterStore, Published
from muzerox.runtimes.sebulba.programs import Learned, Programs
from muzerox.runtimes.sebulba.queues import BoundedQueue, Closed, Interrupted
from muzerox.runtimes.sebulba.ring import RingState, SharedRing
from muzerox.runtimes.sebulba.workers import ContextBody, Episodes, Ready, SearchBody, Shared, play
from muzerox.types import EnvSpec, HostEnvironment, Report, Skips


def make_pace(config: Config) -> Pace:
    """The replay ratio of a configuration; the first update waits until some worker surely has a whole sequence."""
    columns = config.runtime.num_envs * config.selfplay_workers
    first = max(config.replay.min_size, config.sequence_length * columns)
    return Pace(first=first, batch_size=config.train.batch_size, replay_ratio=config.replay_ratio)


def make_window(config: Config) -> int:
    """Updates that self-play may be ahead of the learner: what may be under way at once, and another dispatch's worth."""
    runtime = config.runtime
    waiting = runtime.search_queue_size + runtime.batch_queue_size
    return 2 * runtime.loop_count + waiting + runtime.cpu_actors + runtime.searching_devices


def _shapes(config: Config, programs: Programs, key: jax.Array, learner: LearnerState, ring: RingState) -> tuple:
    """Shapes of the arguments of ``Programs.learn``."""

    size = config.train.batch_size
    row: Any = jax.ShapeDtypeStruct((size,), np.int32)
    importance: Any = jax.ShapeDtypeStruct((size,), np.float32)
    gathered = jax.eval_shape(programs.gather, ring.storage, Sample(row, row, importance))
    batch = gathered[0], None
    if programs.target:
        leaves = jax.tree.leaves(learner.target_params)
        batch = jax.eval_shape(programs.target, jax.random.key_data(key), np.uint32(0), leaves, *gathered)
    # Where arguments lie is the program's business.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (learner, batch))
    return shapes[0], (shapes[1],) * config.runtime.loop_count, jax.ShapeDtypeStruct((), np.int32)


class Pipeline:
    """Starts its threads when made; :meth:`learn` makes updates; :meth:`close` joins the threads.

    Args:
      learner, ring: where training stands.
      acting, searching: devices; the replay lies on ``storage``.
      batch_sharding: of batches on the learning devices.
    """

    def __init__(
        self,
        config: Config,
        spec: EnvSpec,
        env: HostEnvironment,
        programs: Programs,
        *,
        key: jax.Array,
        learner: LearnerState,
        ring: RingState,
        acting: list[jax.Device],
        searching: list[jax.Device],
        storage: jax.Device,
        batch_sharding: Any,
    ):
        self._config, self._learner = config, learner
        self._updates = self._dispatched = int(learner.updates)  # made, and made or under way
        self._meter = Meter()
        self._episodes = Episodes()
        self._interrupted = False
        self._failed: RunFailed | None = None
        self._held: list[Ready] = []  # taken from the queue and not yet learnt from
        self._process_seconds, self._learner_seconds, self._simulator_seconds = time.process_time(), 0.0, 0.0
        self.ring = SharedRing(config, ring, storage)
        env_steps = int(self.ring.count.sum()) * config.runtime.num_envs
        pace = make_pace(config)
        self.limiter = RateLimiter(
            pace,
            self._meter,
            window=make_window(config),
            updates=self._updates,
            env_steps=env_steps,
            last=pace.updates_at(config.train.max_env_steps),
        )
        parameters = ParameterStore(self._meter)
        parameters.publish(Published(self._updates, *jax.tree.map(np.array, (learner.params, learner.target_params))))
        self._shared = Shared(
            config=config,
            spec=spec,
            env=env,
            programs=programs,
            meter=self._meter,
            limiter=self.limiter,
            ring=self.ring,
            parameters=parameters,
            contexts=BoundedQueue("search", config.runtime.search_queue_size, self._meter),
            ready=BoundedQueue("batch", config.runtime.batch_queue_size, self._meter),
            episodes=self._episodes,
            key=jax.random.fold_in(key, self._updates),
            acting=acting,
            searching=searching,
            batch_sharding=batch_sharding,
        )
        # The search workers and self-play compile what they run; the learner's program compiles beside theirs.
        self._learn = compile_beside(programs.learn, *_shapes(config, programs, key, learner, ring))
        self.crew = Crew(self._meter, max_failures=config.runtime.max_failures, on_end=self._fail)
        for index in range(config.runtime.selfplay_workers):
            self.crew.start("selfplay", index, functools.partial(play, self._shared))
        for index in range(config.runtime.cpu_actors):
            self.crew.start("context", index, ContextBody(self._shared, index))
        for index in range(len(searching)):
            self.crew.start("search", index, SearchBody(self._shared, index))
        self.crew.watch(min(1.0, config.runtime.step_timeout / 4))

    @property
    def learner(self) -> LearnerState:
        """Where the learner stands."""
        return self._learner

    def learn(self, updates: int) -> Report:
        """Makes so many updates, in dispatches of at most ``runtime.loop_count``; fewer when interrupted.

        Raises:
          RunFailed: a worker failed too often. What was learnt by then is in :attr:`learner` and :attr:`ring`.
        """
        self.limiter.until(self._updates + updates)
        left, outputs = updates, []
        thread_seconds = time.thread_time()
        pending: tuple[list[Ready], Learned] | None = None
        try:
            while left and not self._interrupted:
                count = min(left, self._config.runtime.loop_count)
                self._collect(count)
                ready, self._held = self._held[:count], self._held[count:]
                # Results of the dispatch before are looked at while this one runs.
                following = ready, self._dispatch(ready)
                if pending is not None:
                    outputs.append(self._finish(*pending))
                pending, left = following, left - count
        except Interrupted:
            pass  # what came so far is kept in hand, and what was learnt is reported
        except Closed:
            if pending is not None:
                self._finish(*pending)
            raise self._failed or RunFailed("the pipeline has been closed") from None
        if pending is not None:
            outputs.append(self._finish(*pending))
        self._learner_seconds = time.thread_time() - thread_seconds
        return self._report(outputs)

    def _collect(self, count: int) -> None:
        """Has at least ``count`` batches in hand. Raises Closed, or Interrupted, keeping what came."""
        while len(self._held) < count:
            self._held.append(self._shared.ready.get(lambda: self._interrupted))

    def _dispatch(self, ready: list[Ready]) -> Learned:
        padded = ready + [ready[-1]] * (self._config.runtime.loop_count - len(ready))
        batches = tuple((item.batch, item.targets) for item in padded)
        self._learner, learned = self._learn()(self._learner, batches, np.int32(len(ready)))
        for number, item in enumerate(ready, start=self._dispatched):
            self._meter.observe("batch_staleness", 0 if item.version is None else number - item.version)
        self._dispatched += len(ready)
        return learned

    def _finish(self, ready: list[Ready], learned: Learned) -> tuple[dict[str, float], Skips]:
        """Waits for a dispatch, writes priorities back and publishes. Returns sums of metrics, and updates that were skipped."""
        with self._meter.wait("learner"):
            priority, sums, skips = jax.device_get((learned.priority, learned.sums, learned.skips))
        self._updates += len(ready)
        self._shared.parameters.publish(Published(self._updates, learned.params, learned.target_params))
        self.limiter.learned(self._updates)
        for item, error in zip(ready, priority, strict=False):  # rows beyond are padding
            if np.isfinite(error).all():
                self.ring.update_priority(item.start, error)
        return {name: float(x) for name, x in sums.items()}, jax.tree.map(int, skips)

    def _report(self, outputs: list[tuple[dict[str, float], Skips]]) -> Report:
        skips = functools.reduce(Skips.then, (x for _, x in outputs), Skips())
        finite = skips.updates - skips.total
        episodes, return_sum, length_sum = self._episodes.take()
        names = outputs[0][0] if outputs else {}
        pipeline = self._meter.take()
        now = time.process_time()
        pipeline["cpu_process_seconds"], self._process_seconds = now - self._process_seconds, now
        if self._config.runtime.step_in == "process":
            now = usage.descendants_cpu_seconds()  # less than before where one was replaced
            pipeline["cpu_simulators_seconds"], self._simulator_seconds = max(now - self._simulator_seconds, 0.0), now
        pipeline["cpu_learner_seconds"] = self._learner_seconds
        pipeline["bytes_rows"] = pipeline.get("selfplay_count", 0.0) * self.ring.row_bytes
        return Report(
            env_steps=self.limiter.env_steps,
            updates=self._updates,
            episodes=episodes,
            mean_return=return_sum / episodes if episodes else None,
            mean_length=length_sum / episodes if episodes else None,
            skips=skips,
            metrics={name: math.fsum(sums[name] for sums, _ in outputs) / finite for name in names} if finite else {},
            pipeline=pipeline,
        )

    def interrupt(self) -> None:
        """Has :meth:`learn` return soon; safe in a signal handler."""
        self._interrupted = True
        self._shared.ready.wake()

    def close(self) -> None:
        """Stops and joins the threads; closes environments."""
        self.limiter.close()
        self._shared.contexts.close()
        self._shared.ready.close()
        self.crew.stop()

    def _fail(self, failure: RunFailed) -> None:
        self._failed = failure
        self.limiter.close()
        self._shared.contexts.close()
        self._shared.ready.close()
