"""A trained agent that acts by search."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.algorithms import make_algorithm
from muzerox.allocation import running_out
from muzerox.checkpoint import Checkpoints
from muzerox.compilation import compiler_options, enable_cache
from muzerox.config import Config
from muzerox.envs import make_env
from muzerox.errors import UserError
from muzerox.evaluate import Evaluation, evaluated, make_episodes, make_host_episodes, summarise
from muzerox.opponents import OPPONENTS, Opponent, make_opponent
from muzerox.run_dir import RunDir
from muzerox.types import Algorithm, Environment, EnvSpec, HostEnvironment, Params

OPENING_MOVES = 2  # at random, in games between two agents
_FEWER = "play fewer episodes at once"


class Agent:
    """Parameters with the search that uses them.

    Attributes:
      config: the run's configuration, at the precision level the agent acts at.
      env: its environment.
      params: nested dict of float32 arrays.
    """

    def __init__(self, config: Config, env: Environment | HostEnvironment, algorithm: Algorithm, params: Params):
        self.config, self.env, self.algorithm, self.params = config, env, algorithm, params
        self._act = jax.jit(
            lambda key, params, observation, legal: algorithm.act(key, params, observation, legal, False).action,
            compiler_options=compiler_options(),
        )

    @property
    def spec(self) -> EnvSpec:
        """Shapes the agent expects."""
        return self.env.spec

    @staticmethod
    def load(path: str | Path, *, precision: str | None = None) -> Agent:
        """The agent of a run directory, from its newest checkpoint, with searches as deep as they become in its training.

        Args:
          precision: a level of ``muzerox.precision.POLICIES``; by default the level it was trained at.

        Raises:
          CheckpointError: not a run, no checkpoint, or a corrupt one.
          ConfigError: unknown precision level.
        """
        run = RunDir(path)
        config = run.load_config()
        config = config.searching(config.deepenings[-1][1])
        if precision is not None:
            config = config.replace({"precision.level": precision, "precision.loss_scale": "auto"})
        env = make_env(config.env)
        algorithm = make_algorithm(config, env.spec)
        checkpoints = Checkpoints(run.checkpoints, writable=False)
        try:
            params = checkpoints.restore_params(jax.eval_shape(algorithm.init, jax.random.key(0)))
        finally:
            checkpoints.close()
        return Agent(config, env, algorithm, params)

    def act(self, observation: Any, legal: Any = None, *, seed: int = 0) -> Any:
        """The best action by search, without exploration.

        Args:
          observation: [*observation_shape] or [B, *observation_shape].
          legal: [A] or [B, A] bool; None allows every action.
          seed: for the search's tie-breaks.

        Returns:
          int for one observation, int32 array [B] for a batch.

        Raises:
          UserError: shapes that do not fit the environment, or a state without a legal action.
        """
        shape = self.spec.observation_shape
        observation = np.asarray(observation)
        single = observation.shape == shape
        batch = observation[None] if single else observation
        if batch.shape[1:] != shape or batch.ndim != len(shape) + 1 or not batch.shape[0]:
            raise UserError("observation", list(observation.shape), f"must have shape {list(shape)} or [B, ...] of it")
        mask = None
        if legal is not None:
            mask = np.asarray(legal, bool)
            mask = mask[None] if single and mask.ndim == 1 else mask
            if mask.shape != (len(batch), self.spec.num_actions):
                raise UserError("legal", list(np.shape(legal)), f"must have shape {[len(batch), self.spec.num_actions]}")
            if not mask.any(-1).all():
                raise UserError("legal", None, "a state has no legal action")
        elif self.spec.has_legal:
            mask = np.ones((len(batch), self.spec.num_actions), bool)
        batch = batch.astype(self.spec.observation_dtype)
        action = np.asarray(
            self._act(jax.random.key(seed), self.params, jnp.asarray(batch), None if mask is None else jnp.asarray(mask))
        )
        return int(action[0]) if single else action

    def at(self, level: str) -> Agent:
        """The same parameters at another precision level."""
        config = self.config.replace({"precision.level": level, "precision.loss_scale": "auto"})
        return Agent(config, self.env, make_algorithm(config, self.spec), self.params)


def evaluate_run(
    path: str | Path, *, episodes: int = 64, seed: int = 0, opponent: str = "random", precision: str | None = None
) -> Evaluation:
    """Plays ``episodes`` whole episodes with a run's newest agent; see ``muzerox.evaluate``.

    Args:
      opponent: with two players, a row of ``muzerox.opponents`` or the directory of another run. Games between agents begin
        with ``OPENING_MOVES`` random moves, since neither side explores: without them all games would be the same two.

    Raises:
      CheckpointError: not a run, no checkpoint, or a corrupt one.
      ConfigError: unknown precision level.
      UserError: an opponent that the environment does not have.
      RunFailed: a simulator that fails, or a device that runs out of memory.
    """
    enable_cache()
    agent = Agent.load(path, precision=precision)
    against_run = opponent not in OPPONENTS and os.path.isdir(opponent)  # not Path's, which raises where a name is too long
    other = _agent_as_opponent(opponent, agent.spec) if against_run else make_opponent(opponent, agent.spec)
    if isinstance(agent.env, HostEnvironment):
        play_on_host = make_host_episodes(evaluated(agent.config, agent.env), agent.algorithm, episodes)
        with running_out(_FEWER):
            return summarise(agent.env, play_on_host(jax.random.key(seed), agent.params))
    random_moves = OPENING_MOVES if against_run else 0
    episodes_of = make_episodes(agent.env, agent.algorithm, episodes, opponent=other, random_moves=random_moves)
    play = jax.jit(episodes_of, compiler_options=compiler_options())
    with running_out(_FEWER):
        return summarise(agent.env, play(jax.random.key(seed), agent.params))


def _agent_as_opponent(path: str, spec: EnvSpec) -> Opponent:
    if spec.num_players != 2:
        raise UserError("--opponent", path, f"{spec.id} has one player, who meets nobody", "random")
    agent = Agent.load(path)
    if agent.spec.id != spec.id:
        raise UserError("--opponent", path, f"is a run of {agent.spec.id}, not of {spec.id}", "random")

    def opponent(key: jax.Array, observation: jax.Array, legal: jax.Array) -> jax.Array:
        return agent.algorithm.act(key, agent.params, observation, legal if spec.has_legal else None, False).action

    return opponent
