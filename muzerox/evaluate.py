"""Evaluation: whole episodes with search and without exploration.

With two players the agent meets an opponent, moving first in every other game, and a return is the outcome for the
agent: 1 won, 0 drawn, -1 lost.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.compilation import compile_beside, compiler_options
from muzerox.config import Config
from muzerox.envs import in_process
from muzerox.envs.simulators import closing
from muzerox.errors import RunFailed, UserError
from muzerox.opponents import Opponent, random_opponent
from muzerox.types import Algorithm, Environment, HostBatch, HostEnvironment, Params, TimeStep

MAX_EPISODE_STEPS = 27_000  # half an hour of Atari at 15 decisions a second; games without an end stop here
HOST_BATCH = 64  # environments that play an evaluation on the host at a time


class Stopped(Exception):
    """An evaluation was asked to stop, and has no result."""


class Episodes(NamedTuple):
    """Outcome of each episode."""

    returns: Any  # [episodes] float32, undiscounted
    lengths: Any  # [episodes] int32
    finished: Any  # [episodes] bool, False where the step limit cut it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Summary of an evaluation. ``wins``, ``draws`` and ``losses`` are present with two players."""

    mean_return: float
    std_return: float
    episodes: int
    mean_length: float
    unfinished: int
    wins: int | None = None
    draws: int | None = None
    losses: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, absent ones left out."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}


def make_episodes(
    env: Environment,
    algorithm: Algorithm,
    episodes: int,
    *,
    opponent: Opponent = random_opponent,
    random_moves: int = 0,
    max_steps: int = MAX_EPISODE_STEPS,
) -> Callable[[jax.Array, Params], Episodes]:
    """``play(key, params) -> Episodes``: a pure function to be jitted; all episodes in parallel.

    Args:
      opponent: with two players, who the agent meets; it moves first in the odd games.
      random_moves: with two players, so many moves open a game at random, for games between players without chance to differ.
      max_steps: episodes are cut after this many steps, counting both players'.
    """
    spec = env.spec
    env_step = jax.vmap(env.step)
    seat = jnp.arange(episodes) % 2

    def play(key: jax.Array, params: Params) -> Episodes:
        key_reset, key_play = jax.random.split(key)
        state, timestep = jax.vmap(env.reset)(jax.random.split(key_reset, episodes))

        def unfinished(carry: tuple) -> jax.Array:
            return jnp.any(~carry[3].finished) & (carry[0] < max_steps)

        def step(carry: tuple) -> tuple:
            t, state, timestep, so_far = carry
            key_search, key_env, key_opponent = jax.random.split(jax.random.fold_in(key_play, t), 3)
            legal = timestep.legal if spec.has_legal else None
            action = algorithm.act(key_search, params, timestep.observation, legal, False).action
            sign = jnp.ones(episodes)
            if spec.num_players == 2:
                mine = t % 2 == seat
                action = jnp.where(mine, action, opponent(key_opponent, timestep.observation, timestep.legal))
                if random_moves:
                    opening = random_opponent(jax.random.fold_in(key_opponent, 1), timestep.observation, timestep.legal)
                    action = jnp.where(t < random_moves, opening, action)
                sign = jnp.where(mine, 1.0, -1.0)
            state, timestep = env_step(jax.random.split(key_env, episodes), state, action)
            going = ~so_far.finished
            so_far = Episodes(
                returns=so_far.returns + jnp.where(going, sign * timestep.reward, 0.0),
                lengths=so_far.lengths + going,
                finished=so_far.finished | timestep.ended,
            )
            return t + 1, state, timestep, so_far

        start = Episodes(jnp.zeros(episodes), jnp.zeros(episodes, jnp.int32), jnp.zeros(episodes, jnp.bool_))
        carry: tuple[jax.Array, Any, TimeStep, Episodes] = (jnp.int32(0), state, timestep, start)
        return jax.lax.while_loop(unfinished, step, carry)[3]

    return play


def make_host_episodes(
    env: HostEnvironment,
    algorithm: Algorithm,
    episodes: int,
    *,
    opponent: Opponent = random_opponent,
    max_steps: int = MAX_EPISODE_STEPS,
    num_envs: int = HOST_BATCH,
) -> Callable[..., Episodes]:
    """``play(key or seed, params, stopped) -> Episodes`` of NumPy arrays, over environments that run on the host.

    They are those of ``env.make_evaluation`` where it has one: whole games by their true score. Rounds of at most ``num_envs``
    of them are played to the end, and the first episode of each counts, so that short ones are not counted more often.
    The search is compiled at the first call, the environments are made and closed within each.

    Args:
      opponent: with two players, who the agent meets; it moves first in the odd games.
      max_steps: episodes are cut after this many steps, counting both players'.

    Raises:
      RunFailed: from ``play``, when an environment raises an exception or its process dies.
      Stopped: from ``play``, as soon as ``stopped()`` holds; it is asked before every step. By default it never does.
    """
    spec, size = env.spec, min(episodes, num_envs)
    make = env.make_evaluation or env.make

    @functools.partial(jax.jit, compiler_options=compiler_options())
    def choose(key: jax.Array, params: Params, observation: jax.Array, legal: Any, t: jax.Array, seat: jax.Array) -> jax.Array:
        key_search, key_opponent = jax.random.split(jax.random.fold_in(key, t))
        action = algorithm.act(key_search, params, observation, legal, False).action
        if spec.num_players == 1:
            return action
        return jnp.where(t % 2 == seat, action, opponent(key_opponent, observation, legal))

    def play(key: jax.Array | int, params: Params, stopped: Callable[[], bool] = lambda: False) -> Episodes:
        key_envs, key_play = jax.random.split(jax.random.key(int(key)) if isinstance(key, numbers.Integral) else key)
        seed = int(jax.random.randint(key_envs, (), 0, np.iinfo(np.int32).max))
        with _simulating():
            batch = make(size, seed)
        played = Episodes(np.zeros(episodes, np.float32), np.zeros(episodes, np.int32), np.zeros(episodes, np.bool_))
        with closing(lambda: _close(batch)):
            for first in range(0, episodes, size):
                returns, lengths, finished = (x[first : first + size] for x in played)  # views: written through
                seat = (first + np.arange(size, dtype=np.int32)) % 2
                round_key = jax.random.fold_in(key_play, first)
                with _simulating():
                    timestep = batch.reset()
                for t in range(max_steps):
                    if stopped():
                        raise Stopped
                    legal = timestep.legal if spec.has_legal or spec.num_players == 2 else None
                    action = np.asarray(choose(round_key, params, timestep.observation, legal, np.int32(t), seat))
                    with _simulating():
                        timestep = batch.step(action)
                    sign = np.where(t % 2 == seat, 1.0, -1.0) if spec.num_players == 2 else np.ones(size)
                    counted = slice(len(returns))  # the last round may need fewer than play
                    returns += np.where(finished, 0.0, sign[counted] * timestep.reward[counted])
                    lengths += ~finished
                    finished |= timestep.ended[counted]
                    if finished.all():
                        break
        return played

    return play


@contextmanager
def _simulating() -> Iterator[None]:
    """Turns whatever a simulator raises into a RunFailed of one line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # it is somebody else's code, and may also call sys.exit
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RunFailed(f"the environment failed in an evaluation: {what}") from error


def _close(batch: HostBatch) -> None:
    with _simulating():
        batch.close()


def summarise(env: Environment | HostEnvironment, episodes: Episodes) -> Evaluation:
    """Episodes to their summary, on the host."""
    returns, lengths, finished = (np.asarray(x) for x in episodes)
    two = env.spec.num_players == 2
    return Evaluation(
        mean_return=float(returns.mean()),
        std_return=float(returns.std()),
        episodes=len(returns),
        mean_length=float(lengths.mean()),
        unfinished=int((~finished).sum()),
        wins=int((returns > 0).sum()) if two else None,
        draws=int((returns == 0).sum()) if two else None,
        losses=int((returns < 0).sum()) if two else None,
    )


def solved(config: Config, evaluation: Evaluation | None) -> bool:
    """Whether it reached ``train.target_return``."""
    target = config.train.target_return
    return target is not None and evaluation is not None and evaluation.mean_return >= target


def evaluated(config: Config, env: HostEnvironment) -> HostEnvironment:
    """The environment with its evaluations where ``runtime.step_in`` says: one that hangs or dies in a process ends only that."""
    if config.runtime.step_in != "process":
        return env
    make = functools.partial(in_process, config.env, timeout=config.runtime.step_timeout, evaluation=True)
    return env._replace(make_evaluation=make)


def make_evaluate(
    config: Config, env: Environment | HostEnvironment, algorithm: Algorithm
) -> Callable[[int, Params, Callable[[], bool]], Evaluation]:
    """``evaluate(updates, params, stopped)`` of a training, compiled in a thread.

    The best of many evaluations is partly luck: one that reaches ``train.target_return`` is made again with fresh episodes, and
    those alone count, as the first were chosen for what they returned.

    Raises:
      RunFailed, Stopped: from ``evaluate``, on the host; on the device a call is one program, which is not stopped.
    """
    device = jax.devices()[0]
    root = jax.random.fold_in(jax.random.key(config.seed), 2)
    if isinstance(env, HostEnvironment):
        play_on_host = make_host_episodes(evaluated(config, env), algorithm, config.train.eval_episodes)
    else:
        jitted = jax.jit(make_episodes(env, algorithm, config.train.eval_episodes), compiler_options=compiler_options())
        compiled = compile_beside(jitted, root, jax.eval_shape(algorithm.init, root))

    def play(key: jax.Array, params: Params, stopped: Callable[[], bool]) -> Episodes:
        return play_on_host(key, params, stopped) if isinstance(env, HostEnvironment) else compiled()(key, params)

    def evaluate(updates: int, params: Params, stopped: Callable[[], bool]) -> Evaluation:
        key, params = jax.random.fold_in(root, updates), jax.device_put(params, device)
        evaluation = summarise(env, play(jax.random.fold_in(key, 0), params, stopped))
        if not solved(config, evaluation):
            return evaluation
        if stopped():
            raise Stopped
        return summarise(env, play(jax.random.fold_in(key, 1), params, stopped))

    return evaluate
