"""Games of a trained agent against other agents: who may meet whom, and that games differ."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import muzerox
from muzerox.agent import Agent
from muzerox.errors import UserError
from muzerox.evaluate import make_episodes
from muzerox.opponents import perfect_tic_tac_toe, random_opponent


def test_an_agent_meets_the_agent_of_another_run(finished_game: Path) -> None:
    games = muzerox.evaluate_run(finished_game, episodes=50, opponent=str(finished_game))
    assert (games.wins or 0) + (games.draws or 0) + (games.losses or 0) == 50
    assert games.unfinished == 0
    assert games.std_return > 0.0  # two agents that never explore: without an opening at random, at most two games


def first_legal(key: jax.Array, observation: jax.Array, legal: jax.Array) -> jax.Array:
    del key, observation
    return jnp.argmax(legal, axis=-1).astype(jnp.int32)


@pytest.mark.parametrize("moves", [0, 2])
def test_random_moves_open_games_and_nothing_else(finished_game: Path, moves: int) -> None:
    agent = Agent.load(finished_game)
    play = jax.jit(make_episodes(agent.env, agent.algorithm, 64, opponent=first_legal, random_moves=moves))
    outcomes = play(jax.random.key(0), agent.params)
    kinds = {
        (seat, float(r), int(n))
        for seat, r, n in zip(np.arange(64) % 2, np.asarray(outcomes.returns), np.asarray(outcomes.lengths), strict=True)
    }
    assert len(kinds) == 2 if moves == 0 else len(kinds) > 4, kinds


def test_random_moves_of_a_whole_game_are_chance(finished_game: Path) -> None:
    """Nine moves at random are a game between random players: the first wins 58.5%, the second 28.8%, 12.7% are drawn."""
    agent = Agent.load(finished_game)
    play = jax.jit(make_episodes(agent.env, agent.algorithm, 4000, opponent=random_opponent, random_moves=9))
    returns = np.asarray(play(jax.random.key(0), agent.params).returns)
    first = np.concatenate([returns[::2], -returns[1::2]])
    assert [np.mean(first == r) for r in (1, 0, -1)] == pytest.approx([0.585, 0.127, 0.288], abs=0.03)


def test_perfect_play_knows_every_position_and_misses_no_win() -> None:
    table = perfect_tic_tac_toe()
    assert table.any(axis=1).sum() == 4520  # of 5,478 a game can get to, those where it goes on

    def moves(board: str) -> list[int]:
        return np.flatnonzero(table[sum(".xo".index(stone) * 3**cell for cell, stone in enumerate(board))]).tolist()

    assert moves("." * 9) == list(range(9))  # every opening draws
    assert moves("xx.oo....") == [2]
    assert moves("o........") == [4]  # a corner is answered in the middle
    assert moves("o...x...o") == [1, 3, 5, 7]  # and two of them at an edge, or they fork
    assert moves("xxxoo....") == []


def test_who_cannot_be_met_is_said_in_one_line(finished_game: Path, finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a run of gymnax:CartPole-v1, not of pgx:tic_tac_toe"):
        muzerox.evaluate_run(finished_game, opponent=str(finished_run))
    with pytest.raises(UserError, match="has one player"):
        muzerox.evaluate_run(finished_run, opponent=str(finished_game))
    with pytest.raises(UserError, match=r"must be one of random, perfect, or the directory of a run.*perfect"):
        muzerox.evaluate_run(finished_game, opponent="perfekt")
    with pytest.raises(UserError, match=str(tmp_path)):
        muzerox.evaluate_run(finished_game, opponent=str(tmp_path))
