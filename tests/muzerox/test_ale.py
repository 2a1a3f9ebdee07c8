"""Atari: what an observation is, lives, final frames, evaluation by the score, options."""

from __future__ import annotations

import itertools

import numpy as np
from host_play import draw, ends, make, play


def test_atari_observations() -> None:
    spec = make("ale:Breakout").spec
    assert (spec.observation_shape, spec.observation_dtype, spec.num_actions) == ((84, 84, 4), "uint8", 4)
    shown = play("ale:Breakout?threads=1", draw(4, 20))
    assert not shown[0].observation[0, ..., :3].any()  # a game begins with one frame, the newest last
    for before, after in itertools.pairwise(shown):
        np.testing.assert_array_equal(after.observation[0, ..., :3], before.observation[0, ..., 1:])
    frame = shown[-1].observation[0, ..., -1]
    assert frame[8:].any()
    rows = frame.astype(int).sum(1)
    assert rows[20:28].mean() > 2 * rows[45:55].mean()  # bricks lie above the empty middle: rows are the first axis


def test_the_final_frame_of_a_cut_game_is_the_one_that_was_reached() -> None:
    """The same game, once cut after 40 frames and once not."""
    actions = draw(4, 10)
    whole, cut = play("ale:Breakout", actions), play("ale:Breakout?max_frames=40", actions)
    assert ends(cut) == [(False, False)] * 9 + [(False, True)]
    np.testing.assert_array_equal(cut[-1].final_observation, whole[10].observation)
    np.testing.assert_array_equal(cut[-1].reward, whole[10].reward)
    assert not cut[-1].observation[..., :3].any()
    assert not np.array_equal(cut[-1].observation[..., 3], whole[-1].observation[..., 3])


def test_a_life_lost_ends_the_episode_while_the_game_goes_on() -> None:
    """The same games with and without: all that differs is ``terminated`` where a life is lost and the game goes on."""
    actions = draw(4, 320, 2)
    lives, games = (play(f"ale:Breakout?episodic_life={x}", actions, num_envs=2) for x in ("true", "false"))
    lost = over = 0
    for t in range(1, len(lives)):
        one, other = lives[t], games[t]
        np.testing.assert_array_equal(one.observation, other.observation)
        np.testing.assert_array_equal(one.final_observation, other.final_observation)
        assert not one.truncated.any()
        for i in range(2):
            np.testing.assert_array_equal(one.final_observation[i, ..., :3], lives[t - 1].observation[i, ..., 1:])
            if other.terminated[i]:  # a new game is shown, after the last frame of the old
                assert one.terminated[i]
                assert not one.observation[i, ..., :3].any()
                over += 1
            elif one.terminated[i]:
                np.testing.assert_array_equal(one.final_observation[i], one.observation[i])
                lost += 1
    assert over >= 2
    assert 4 * over <= lost <= 4 * over + 8  # a game of Breakout has five lives


def test_evaluation_plays_whole_games_by_their_score() -> None:
    actions = draw(7, 80)
    learnt, scored = (play("ale:Assault?threads=1", actions, evaluation=x) for x in (False, True))
    rewards, scores = (np.array([t.reward[0] for t in shown]) for shown in (learnt, scored))
    assert scores.max() == 21.0
    np.testing.assert_array_equal(rewards, np.clip(scores, -1, 1))
    assert sum(t.terminated[0] for t in learnt) >= sum(t.terminated[0] for t in scored)
    breakout = play("ale:Breakout?threads=1", [1, 0, 0, 0] * 60, evaluation=True)
    games = play("ale:Breakout?threads=1&episodic_life=false", [1, 0, 0, 0] * 60)
    assert ends(breakout) == ends(games)


def test_options_of_atari() -> None:
    assert make("ale:Pong?full_actions=true").spec.num_actions == 18
    actions = draw(6, 12)
    plain, again, sticky = (play(f"ale:Pong?threads=1{x}", actions) for x in ("", "", "&sticky_actions=1"))
    np.testing.assert_array_equal(plain[-1].observation, again[-1].observation)
    assert not np.array_equal(plain[-1].observation, sticky[-1].observation)
    idle = [play(f"ale:Freeway?idle_frames={n}", [], num_envs=3)[0].observation for n in (0, 30)]
    assert (idle[0][0] == idle[0][1]).all()  # nothing but idle frames tells the starts of a game apart
    assert len({x.tobytes() for x in idle[1]}) > 1
