"""Drift of precision levels: against an independent computation, on boards with illegal moves, with threads, on images."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import small_config

from muzerox import drift
from muzerox.config import Config
from muzerox.drift import Learnt, Numbers, at_level, compare, learn_and_draw, make_numbers
from muzerox.errors import RunFailed
from muzerox.networks import make_model
from muzerox.precision import POLICIES
from muzerox.transforms import expected_value
from muzerox.types import EnvSpec

KEY = jax.random.key(3)
UPDATES = 256
SMALL = {"network__width": 8, "network__depth": 1, "search__num_simulations": 3}


def board() -> Config:
    return small_config("pgx:tic_tac_toe", precision__level="O0", train__unroll_steps=3, **SMALL)


@pytest.fixture(scope="module")
def played() -> tuple[EnvSpec, Learnt]:
    """What is learnt in updates, not in seconds: on any machine as much, however busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "MOST_UPDATES", UPDATES)
        patch.setattr(drift, "MOST_SECONDS", 600.0)
        return learn_and_draw(board(), seconds=600.0, examples=32)


Make = Callable[..., Numbers]  # of a level, and of other parameters where they are given


@pytest.fixture(scope="module")
def make(played: tuple[EnvSpec, Learnt]) -> Make:
    """Numbers at a level, each time computed anew."""
    spec, learnt = played
    levels = {level: make_numbers(at_level(board(), level), spec) for level in ("O0", "O2")}
    return lambda level, params=learnt.params: levels[level](KEY, params, learnt.replayed)


@pytest.fixture(scope="module")
def base(make: Make) -> Numbers:
    return make("O0")


@pytest.fixture(scope="module")
def narrow(make: Make) -> Numbers:
    return make("O2")


def test_what_is_drawn_was_played(played: tuple[EnvSpec, Learnt]) -> None:
    _, learnt = played
    batch, legal = learnt.replayed
    assert UPDATES <= learnt.updates < 2 * UPDATES
    inside = ~(batch.absorbing | batch.unknown)
    assert inside[:, 0].all()
    assert not inside[:, -1].all()  # some games end within the unroll
    made = np.take_along_axis(legal[:, :-1], batch.action[..., None], axis=2)[..., 0]
    assert made[inside[:, :-1]].all()  # recorded moves were allowed where they were made
    empty = ~np.any(batch.observation, axis=-1).reshape(len(batch.observation), -1)
    np.testing.assert_array_equal(legal[:, 0], empty)
    assert any(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(learnt.params["value_head"]))


def test_what_has_learnt_too_little_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Learnt] = []

    def enough(spec: EnvSpec, learnt: Learnt) -> bool:
        assert spec.num_players == 2
        seen.append(learnt)
        return len(seen) == 2

    _, learnt = learn_and_draw(board(), seconds=0.1, examples=8, enough=enough)
    assert learnt is seen[1]
    assert learnt.seconds >= 2 * seen[0].seconds or learnt.updates >= 2 * seen[0].updates
    assert learnt.updates > seen[0].updates
    monkeypatch.setattr(drift, "MOST_SECONDS", 0.5)
    _, learnt = learn_and_draw(board(), seconds=0.1, examples=8, enough=lambda *_: False)
    assert learnt.seconds >= 0.5


def test_o0_does_not_drift_from_itself(base: Numbers, make: Make, played: tuple[EnvSpec, Learnt]) -> None:
    found = compare(base, make("O0"), played[1].replayed)
    for name in ("policy_kl", "value_error", "reward_error"):
        assert set(found[name]) == {0.0}, name
    assert (found["policy_kl_max"], found["weights_differ"], found["actions_agree"]) == (0.0, 0.0, 1.0)
    assert found["gradient_error"] == 0.0
    assert found["policy_learnt"] > 0


@pytest.mark.parametrize(("level", "tolerance"), [("O0", 1e-5), ("O2", 0.03)])
def test_numbers_are_those_of_the_model(
    level: str, tolerance: float, base: Numbers, narrow: Numbers, played: tuple[EnvSpec, Learnt]
) -> None:
    """Step by step; in 16 bits what is compiled as one rounds less often."""
    spec, learnt = played
    config, policy, batch = board(), POLICIES[level], learnt.replayed.batch
    model, numbers = make_model(config.network, spec, policy), {"O0": base, "O2": narrow}[level]
    params = jax.tree.map(lambda x: jnp.asarray(x).astype(policy.acting), learnt.params)
    hidden = model.represent(params, batch.observation)
    for k in range(config.train.unroll_steps + 1):
        logits, value_logits = model.predict(params, hidden)
        np.testing.assert_allclose(numbers.policy_logits[:, k], logits, atol=tolerance)
        values = expected_value(value_logits, config.network.value_bound)
        np.testing.assert_allclose(numbers.value[:, k], values, atol=tolerance)
        if k < config.train.unroll_steps:
            hidden, reward_logits = model.dynamics(params, hidden.astype(policy.embedding), batch.action[:, k])
            rewards = expected_value(reward_logits, config.network.reward_bound)
            np.testing.assert_allclose(numbers.reward[:, k], rewards, atol=tolerance)
    assert (numbers.policy_logits == base.policy_logits).all() == (level == "O0")


def test_a_levels_drift_is_what_its_numbers_say(base: Numbers, narrow: Numbers, played: tuple[EnvSpec, Learnt]) -> None:
    """Example by example, in Python's floats."""
    batch, legal = played[1].replayed
    inside = ~(batch.absorbing | batch.unknown)
    positions = inside.shape[1]

    def probabilities(numbers: Numbers, b: int, k: int) -> list[float]:
        pairs = zip(numbers.policy_logits[b, k].tolist(), legal[b, k], strict=True)
        powers = [math.exp(x) if ok else 0.0 for x, ok in pairs]
        return [x / sum(powers) for x in powers]

    def rms(xs: list[float]) -> float:
        return math.sqrt(sum(x * x for x in xs) / len(xs))

    kept = base.value[inside].tolist()
    mean = sum(kept) / len(kept)
    spread = max(rms([x - mean for x in kept]), 0.1 * rms(kept), 0.1 * rms(batch.partial_return[inside].tolist()))
    rewards = batch.reward[inside[:, :-1]].tolist()
    reward_spread = max(spread, rms([x - sum(rewards) / len(rewards) for x in rewards]))
    found = compare(base, narrow, played[1].replayed)
    assert found["value_spread"] == pytest.approx(spread)
    largest = 0.0
    for k in range(positions):
        there = [b for b in range(len(inside)) if inside[b, k]]
        pairs = [zip(probabilities(base, b, k), probabilities(narrow, b, k), strict=True) for b in there]
        kl = [sum(p * math.log(p / q) for p, q in pair if p > 0) for pair in pairs]
        largest = max(largest, *kl)
        assert found["policy_kl"][k] == pytest.approx(sum(kl) / len(there), abs=1e-12)
        errors = [abs(float(base.value[b, k]) - float(narrow.value[b, k])) for b in there]
        assert found["value_error"][k] == pytest.approx(sum(errors) / len(there) / spread)
        if k < positions - 1:  # the step from position k
            errors = [abs(float(base.reward[b, k]) - float(narrow.reward[b, k])) for b in there]
            assert found["reward_error"][k] == pytest.approx(sum(errors) / len(there) / reward_spread)
    assert found["policy_kl_max"] == pytest.approx(largest)
    assert largest > 0
    moved = np.abs(base.weights.astype(float) - narrow.weights).sum(1) / 2
    assert found["weights_differ"] == pytest.approx(moved.mean())
    length = max(np.linalg.norm(base.gradient.astype(float)), float(base.gradient_noise))
    assert found["gradient_error"] == pytest.approx(np.linalg.norm(base.gradient.astype(float) - narrow.gradient) / length)
    all_noise = base._replace(gradient_noise=np.float32(10.0 * length))
    assert compare(all_noise, narrow, played[1].replayed)["gradient_error"] == pytest.approx(found["gradient_error"] / 10.0)


def test_illegal_actions_and_what_follows_an_end_do_not_count(
    base: Numbers, narrow: Numbers, played: tuple[EnvSpec, Learnt]
) -> None:
    _, learnt = played
    batch, legal = learnt.replayed
    inside = ~(batch.absorbing | batch.unknown)
    ignored = ~legal | ~inside[..., None]
    assert ignored.any()
    odd = narrow._replace(
        policy_logits=np.where(ignored, 1e4, narrow.policy_logits),
        value=np.where(inside, narrow.value, -1e4),
        reward=np.where(inside[:, :-1], narrow.reward, 1e4),
    )
    assert compare(base, odd, learnt.replayed) == compare(base, narrow, learnt.replayed)
    counted = narrow._replace(policy_logits=np.where(ignored, narrow.policy_logits, narrow.policy_logits[..., ::-1] + 1.0))
    assert compare(base, counted, learnt.replayed)["policy_kl_max"] > 1e-3


def test_searches_choose_legal_actions(base: Numbers, narrow: Numbers, played: tuple[EnvSpec, Learnt]) -> None:
    legal = played[1].replayed.legal[:, 0]
    for numbers in (base, narrow):
        assert np.take_along_axis(legal, numbers.action[:, None], axis=1).all()
        assert np.where(legal, 0.0, numbers.weights).max() == 0.0


def test_damaged_parameters_drift_much_farther_than_narrow_ones(
    base: Numbers, narrow: Numbers, make: Make, played: tuple[EnvSpec, Learnt]
) -> None:
    """Rounded to two bits after the leading one, as float8_e5m2 has them."""
    learnt = played[1]

    def coarse(x: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.round(mantissa * 8.0) / 8.0, exponent).astype(np.float32)

    damaged = compare(base, make("O0", jax.tree.map(coarse, learnt.params)), learnt.replayed)
    fine = compare(base, narrow, learnt.replayed)
    assert max(damaged["policy_kl"]) > 10 * max(fine["policy_kl"])
    assert max(damaged["value_error"]) > max(0.02, 5 * max(fine["value_error"]))
    assert damaged["gradient_error"] > 2 * fine["gradient_error"]


def test_the_gradient_has_a_standard_error(base: Numbers, played: tuple[EnvSpec, Learnt]) -> None:
    """Of equal parts, each computed alone: the mean of their gradients, and by how they differ its standard error."""
    spec, learnt = played
    numbers, size = make_numbers(board(), spec), len(base.action) // drift.PARTS
    parts = [jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], learnt.replayed) for i in range(drift.PARTS)]
    found = np.array([numbers(KEY, learnt.params, part).gradient for part in parts], float)
    np.testing.assert_allclose(base.gradient, found.mean(0), atol=2e-3 * np.abs(found).max())
    assert base.gradient_noise == pytest.approx(np.sqrt(found.var(0, ddof=1).sum() / drift.PARTS), rel=1e-3)


def test_no_more_updates_than_learning_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine: gradients of a training that is done are all rounding."""
    monkeypatch.setattr(drift, "MOST_UPDATES", 96)
    _, learnt = learn_and_draw(board(), seconds=30.0, examples=8)
    assert 96 <= learnt.updates < 2 * 96
    assert learnt.seconds < 30.0


def test_values_that_are_all_the_same_have_a_spread(base: Numbers, played: tuple[EnvSpec, Learnt]) -> None:
    same = base._replace(value=np.full_like(base.value, 10.0))
    off = same._replace(value=same.value + np.float32(0.125))
    found = compare(same, off, played[1].replayed)
    assert found["value_spread"] == pytest.approx(1.0)
    assert found["value_error"] == pytest.approx([0.125] * len(found["value_error"]))


def test_rewards_that_differ_more_than_values_are_their_own_measure(base: Numbers, played: tuple[EnvSpec, Learnt]) -> None:
    """As early in a game's training, when no value says yet who wins."""
    replayed = played[1].replayed
    batch = replayed.batch
    counted = ~(batch.absorbing | batch.unknown)[:, :-1]
    won = np.zeros_like(batch.reward)
    won[counted] = np.arange(counted.sum()) % 2 * 2.0 - 1.0  # as often as lost
    off = base._replace(reward=base.reward + np.float32(0.01))
    found = compare(base, off, replayed._replace(batch=batch.replace(reward=won)))
    assert found["value_spread"] < 0.5
    assert found["reward_error"] == pytest.approx([0.01] * len(found["reward_error"]), rel=0.01)


def test_what_is_not_finite_is_said(base: Numbers, played: tuple[EnvSpec, Learnt]) -> None:
    value = base.value.copy()
    value[0, 0] = np.nan
    with pytest.raises(RunFailed, match="its value not finite"):
        compare(base, base._replace(value=value), played[1].replayed)
    with pytest.raises(RunFailed, match="O0's value not finite"):
        compare(base._replace(value=value), base, played[1].replayed)
