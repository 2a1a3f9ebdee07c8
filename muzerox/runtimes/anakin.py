"""Anakin: environments, search, replay and learner in one program on the device (Hessel et al., arXiv:2104.06272).

A dispatch fuses up to ``runtime.loop_count`` updates. Before each update every environment makes the steps that are due to
keep the replay ratio, so ``loop_count`` changes how often the host is asked and nothing that is learnt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from muzerox import replay
from muzerox.compilation import ONCE, compile_beside, compiler_options
from muzerox.config import Config
from muzerox.errors import ConfigError
from muzerox.learner import LearnerState, init_learner, make_update
from muzerox.parallel import over
from muzerox.replay import ReplayState
from muzerox.runtimes import placement
from muzerox.selfplay import ActorState, EpisodeStats, init_actors, make_act
from muzerox.types import Algorithm, Environment, Metrics, Report, Runtime, Skips, Transition


class RunState(struct.PyTreeNode):
    """Everything training is made of; saved and restored whole."""

    key: jax.Array  # [] typed key, never consumed: streams are fold_in(key, counter)
    learner: LearnerState
    actors: ActorState
    replay: ReplayState
    rows: jax.Array  # [] int32, steps every environment has made
    credit: jax.Array  # [] int32, earned and not yet spent, in the unit of ``_pace``

    @property
    def env_steps(self) -> int:
        """Environment steps made."""
        return int(self.rows) * len(self.actors.episode_length)


def _pace(config: Config) -> tuple[int, int, int]:
    """Whole numbers that keep the replay ratio exactly: what an update earns, what a row costs, rows before the first.

    With ratio p/q, an update of B samples pays for B q / (E p) rows: it earns B q, and a row costs E p. Raises
    ConfigError where credit would not fit an int32.
    """
    ratio = config.replay_ratio
    earned, cost = config.train.batch_size * ratio.denominator, config.runtime.num_envs * ratio.numerator
    shared = math.gcd(earned, cost)
    if (earned + cost) // shared >= 2**31:
        whole = max(1, round(config.train.replay_ratio))
        rule = "has too fine a fraction to be kept exactly with this train.batch_size and runtime.num_envs"
        raise ConfigError("train.replay_ratio", config.train.replay_ratio, rule, whole)
    first = max(math.ceil(config.replay.min_size / config.runtime.num_envs), config.sequence_length)
    return earned // shared, cost // shared, first


def updates_at(config: Config, env_steps: int) -> int:
    """``Runtime.updates_at``, without the runtime."""
    earned, cost, first_rows = _pace(config)
    rows = math.ceil(env_steps / config.runtime.num_envs) - first_rows
    return 1 + max(0, -(-rows * cost // earned))  # rounded up


def _placed(shapes: Any, shardings: Any) -> Any:
    """Shapes with shardings. Without, what lies in the host's memory would be traced as if it lay on the device, and all anew."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, shardings)


def build(config: Config, env: Environment, algorithm: Algorithm) -> Runtime:
    """The Anakin runtime. Raises ConfigError when the mesh needs more devices or memory than there is."""
    mesh = placement.make_mesh(config.runtime.num_devices)
    num_envs = config.runtime.num_envs
    earned, cost, first_rows = _pace(config)
    # Jitted so that they are traced once, though their shapes are asked for first: either takes half a second or more.
    by_devices = over(mesh, algorithm)
    act = jax.jit(make_act(env, by_devices, random_action=config.train.random_action), inline=True)
    update = jax.jit(make_update(config, env.spec, by_devices, mesh), inline=True)

    def begin(key: jax.Array) -> tuple[jax.Array, LearnerState, ActorState]:
        key_params, key_envs, key_run = jax.random.split(key, 3)
        return key_run, init_learner(key_params, config, algorithm), init_actors(key_envs, env, num_envs)

    def row_of(key: jax.Array, learner: LearnerState, actors: ActorState) -> Transition:
        return act(key, learner.params, actors, EpisodeStats.zero())[2]

    begun = jax.eval_shape(begin, jax.random.key(0))
    row = jax.eval_shape(row_of, *_placed(begun, placement.replicate(mesh, begun)))

    def init(key: jax.Array) -> RunState:
        key_run, learner, actors = begin(key)
        example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), row)
        return RunState(
            key=key_run,
            learner=learner,
            actors=actors,
            replay=replay.init(config.replay, example),
            rows=jnp.int32(0),
            credit=jnp.int32(0),
        )

    def prefill(state: RunState) -> RunState:
        now = state.actors.timestep
        shape = jax.tree.map(lambda ring: jnp.zeros(ring.shape[1:], ring.dtype), state.replay.storage)
        row = shape.replace(observation=now.observation, policy=shape.policy + 1.0 / env.spec.num_actions)
        row = row if row.legal is None else row.replace(legal=now.legal)
        ring = jax.lax.fori_loop(0, first_rows, lambda _, ring: replay.add(ring, row), state.replay)
        return state.replace(replay=ring, rows=jnp.int32(first_rows))

    def play(state: RunState, stats: EpisodeStats) -> tuple[RunState, EpisodeStats]:
        """Every environment makes the steps due before the next update."""
        key = jax.random.fold_in(state.key, 0)

        def step(_: jax.Array, carry: tuple) -> tuple:
            actors, ring, rows, stats = carry
            actors, stats, row = act(jax.random.fold_in(key, rows), state.learner.params, actors, stats)
            return actors, replay.add(ring, row), rows + 1, stats

        is_first = state.rows == 0
        due = jnp.where(is_first, first_rows, state.credit // cost)
        actors, ring, rows, stats = jax.lax.fori_loop(0, due, step, (state.actors, state.replay, state.rows, stats))
        credit = jnp.where(is_first, 0, state.credit % cost)
        return state.replace(actors=actors, replay=ring, rows=rows, credit=credit), stats

    def dispatch(state: RunState, count: jax.Array) -> tuple[RunState, EpisodeStats, Metrics, Skips]:
        """``count`` updates, their metrics summed over those that were finite, and those skipped."""

        def iteration(_: jax.Array, carry: tuple) -> tuple:
            state, stats, sums, skips = carry
            state, stats = play(state, stats)
            key = jax.random.fold_in(jax.random.fold_in(state.key, 1), state.learner.updates)
            learner, ring, metrics = update(key, state.learner, state.replay)
            skip = metrics.pop("skipped")
            # A skipped update has no loss worth averaging.
            sums = jax.tree.map(lambda total, x: total + jnp.where(skip > 0, 0.0, x), sums, metrics)
            state = state.replace(learner=learner, replay=ring, credit=state.credit + earned)
            return state, stats, sums, skips.then(Skips.of(skip))

        metrics = jax.eval_shape(update, state.key, state.learner, state.replay)[2]
        zeros = {name: jnp.float32(0.0) for name in metrics if name != "skipped"}
        none = jax.tree.map(jnp.int32, Skips())
        return jax.lax.fori_loop(0, count, iteration, (state, EpisodeStats.zero(), zeros, none))

    example = jax.eval_shape(init, jax.random.key(0))
    on_host = config.replay.placement == "host" or mesh.devices.flat[0].platform == "cpu"
    placement.check_replay(config, example.replay, on_host=on_host, device_bytes=None if on_host else placement.memory(mesh))
    shardings = placement.replicate(mesh, example).replace(
        actors=placement.split_axis(mesh, example.actors, 0),
        replay=placement.place_storage(config.replay, placement.split_axis(mesh, example.replay, 1)),
    )
    jit_init = jax.jit(init, out_shardings=shardings, compiler_options=ONCE)
    jit_prefill = jax.jit(prefill, donate_argnums=0, in_shardings=(shardings,), out_shardings=shardings, compiler_options=ONCE)
    jit_dispatch = jax.jit(
        dispatch,
        donate_argnums=0,
        in_shardings=(shardings, None),
        out_shardings=(shardings, None, None, None),
        compiler_options=compiler_options(),
    )

    # The number of updates is an argument: fusing more or fewer of them compiles nothing.
    compiled = compile_beside(jit_dispatch, _placed(example, shardings), jax.ShapeDtypeStruct((), jnp.int32))

    def run(state: RunState, n: int, loop_count: int = config.runtime.loop_count) -> tuple[RunState, Report]:
        state = jax.device_put(state, shardings)  # moves nothing unless the state was just restored
        count = np.int32(loop_count)
        outputs: list[tuple[EpisodeStats, Metrics, Skips]] = []
        for _ in range(n):
            state, *output = compiled()(state, count)
            outputs.append(tuple(output))
        return state, _report(num_envs, state, jax.device_get(outputs))

    def draw(state: RunState, key: jax.Array, count: int, gather: Callable[..., Any]) -> Any:
        def drawn(key: jax.Array, ring: ReplayState) -> Any:
            return gather(ring.storage, replay.sample(config.replay, key, ring, count, config.sequence_length))

        return jax.jit(drawn)(key, state.replay)

    return Runtime(jit_init, run, functools.partial(updates_at, config), jit_prefill, draw)


def _report(num_envs: int, state: RunState, outputs: list[Any]) -> Report:
    episodes = sum(int(stats.count) for stats, _, _ in outputs)
    skips = functools.reduce(Skips.then, (jax.tree.map(int, skips) for _, _, skips in outputs), Skips())
    finite = skips.updates - skips.total
    return Report(
        env_steps=int(state.rows) * num_envs,
        updates=int(state.learner.updates),
        episodes=episodes,
        mean_return=sum(float(stats.return_sum) for stats, _, _ in outputs) / episodes if episodes else None,
        mean_length=sum(int(stats.length_sum) for stats, _, _ in outputs) / episodes if episodes else None,
        skips=skips,
        metrics={name: sum(float(sums[name]) for _, sums, _ in outputs) / finite for name in outputs[0][1]} if finite else {},
    )
