"""Sebulba: host threads that step environments, search and learn meet at queues (Hessel et al., arXiv:2104.06272).

The pipeline is EfficientZero's (Ye et al., arXiv:2111.00210): self-play writes the replay; cpu actors draw contexts from it;
search workers make targets and reanalyze with the target parameters (where nothing is reanalyzed, the learner makes targets);
the learner takes finished batches, so many (``runtime.loop_count``) a dispatch, writes priorities back and publishes. Queues
block; a rate limiter keeps the replay ratio.

    self-play workers -> replay -> cpu actors -> search queue -> search workers -> batch queue -> learner
            ^                                                            ^                            |
            +-------------------------- parameters ---------------------+----------------------------+
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from muzerox.compilation import ONCE
from muzerox.config import Config
from muzerox.envs.host import in_process, on_host
from muzerox.learner import LearnerState, init_learner
from muzerox.runtimes import placement
from muzerox.runtimes.sebulba import ring
from muzerox.runtimes.sebulba.pipeline import Pipeline, make_pace
from muzerox.runtimes.sebulba.programs import make_programs
from muzerox.runtimes.sebulba.ring import RingState
from muzerox.types import Algorithm, Environment, HostEnvironment, Report, Runtime


class RunState(struct.PyTreeNode):
    """Everything training is made of, as far as it outlives threads; saved and restored whole.

    Environments cannot be saved: their unfinished episodes are cut when a run is resumed.
    """

    key: jax.Array  # [] typed key, never consumed
    learner: LearnerState
    replay: RingState | None  # None while threads are at work on it
    steps: jax.Array  # [] int32, environment steps made

    @property
    def env_steps(self) -> int:
        """Environment steps made."""
        return int(self.steps)


def updates_at(config: Config, env_steps: int) -> int:
    """``Runtime.updates_at``, without the runtime."""
    return make_pace(config).updates_at(env_steps)


def build(config: Config, env: Environment | HostEnvironment, algorithm: Algorithm) -> Runtime:
    """The Sebulba runtime. Raises ConfigError when the machine lacks its devices or memory."""
    host = on_host(env) if isinstance(env, Environment) else env
    if config.runtime.step_in == "process":
        host = HostEnvironment(host.spec, lambda n, seed: in_process(config.env, n, seed, config.runtime.step_timeout))
    spec = dataclasses.replace(host.spec, can_truncate=True)  # a failure may cut any episode
    acting, searching, learning = placement.assign(config.runtime)
    everywhere, shards = placement.learner_shardings(learning)
    own = placement.is_own(searching[0])
    threads = config.runtime.role_threads if own else None
    searching_apart = not set(searching) <= set(learning)
    programs = make_programs(config, spec, algorithm, everywhere, shards, searching_apart=searching_apart, threads=threads)
    on_device = config.replay.placement == "device" and not own
    storage = searching[0] if on_device else placement.host_device(config.runtime, own=own)
    device_bytes = (storage.memory_stats() or {}).get("bytes_limit")
    shapes = jax.eval_shape(lambda: ring.init(config, spec))
    placement.check_replay(config, shapes, on_host=storage.platform == "cpu", device_bytes=device_bytes)
    pace = make_pace(config)
    running: list[Pipeline] = []
    interrupted = False

    def begin(key: jax.Array) -> RunState:
        key_params, key_run = jax.random.split(key)
        return RunState(key=key_run, learner=init_learner(key_params, config, algorithm), replay=None, steps=jnp.int32(0))

    def empty() -> RingState:
        return ring.init(config, spec)

    # Each operation by itself would be a program, compiled at every start.
    jit_begin, jit_empty = jax.jit(begin, compiler_options=ONCE), jax.jit(empty, compiler_options=ONCE)

    def init(key: jax.Array) -> RunState:
        if isinstance(key, jax.core.Tracer):  # whoever asks for shapes: a program within another has no options
            return begin(key).replace(replay=empty())
        # A ring for the host's memory may be more than an accelerator has. JAX's defaults do not reach devices made for roles.
        with contextlib.nullcontext() if own else jax.default_device(storage):
            replay = jit_empty()
        return jit_begin(key).replace(replay=replay)

    def adopt(state: RunState) -> Pipeline:
        """Threads at work on a state that has just been made or restored."""
        close()
        assert state.replay is not None
        pipeline = Pipeline(
            config,
            spec,
            host,
            programs,
            key=state.key,
            learner=jax.device_put(state.learner, everywhere),
            ring=state.replay,
            acting=acting,
            searching=searching,
            storage=storage,
            batch_sharding=shards,
        )
        running.append(pipeline)
        if interrupted:  # while this was being made
            pipeline.interrupt()
        atexit.register(pipeline.close)  # threads inside compiled programs must not outlive the interpreter
        return pipeline

    def learner_of(pipeline: Pipeline) -> LearnerState:
        """On JAX's devices, which those who evaluate and save use."""
        return jax.device_put(pipeline.learner, jax.devices()[0]) if placement.is_own(learning[0]) else pipeline.learner

    def run(state: RunState, n: int, loop_count: int = config.runtime.loop_count) -> tuple[RunState, Report]:
        pipeline = adopt(state) if state.replay is not None else running[0]
        report = pipeline.learn(n * loop_count)
        return state.replace(learner=learner_of(pipeline), replay=None, steps=jnp.int32(report.env_steps)), report

    first_rows = math.ceil(pace.first / (config.runtime.num_envs * config.selfplay_workers))

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=ONCE)
    def fill(replay: ring.RingState) -> ring.RingState:
        filled = replay.storage.replace(policy=replay.storage.policy + 1.0 / spec.num_actions)
        priority, count = replay.priority.at[:first_rows].set(1.0), jnp.full_like(replay.count, first_rows)
        return replay.replace(storage=filled, priority=priority, count=count)

    def prefill(state: RunState) -> RunState:
        assert state.replay is not None
        replay = fill(state.replay)
        return state.replace(replay=replay, steps=jnp.int32(first_rows * replay.priority.shape[1]))

    def draw(state: RunState, key: jax.Array, count: int, gather: Callable[..., Any]) -> Any:
        assert state.replay is None  # threads are at work on it
        shared = running[0].ring
        return shared.read(shared.sample(np.random.default_rng(np.array(jax.random.key_data(key))), count), jax.jit(gather))[1]

    def snapshot(state: RunState) -> RunState:
        if not running:
            return state
        replay = running[0].ring.snapshot()  # whatever the state holds: where run has failed it was donated
        steps = jnp.int32(int(replay.count.sum()) * config.runtime.num_envs)
        return state.replace(learner=learner_of(running[0]), replay=replay, steps=steps)

    def interrupt() -> None:
        nonlocal interrupted
        interrupted = True
        for pipeline in running:
            pipeline.interrupt()

    def close() -> None:
        while running:
            pipeline = running.pop()
            atexit.unregister(pipeline.close)
            pipeline.close()

    return Runtime(init, run, functools.partial(updates_at, config), prefill, draw, snapshot, interrupt, close)
