"""What an algorithm decides against mctx called directly, and against games whose answer is known."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import mctx
import numpy as np
import pytest
from toys import random_params, small_config

from muzerox import transforms
from muzerox.algorithms import make_algorithm
from muzerox.algorithms.base import make_family
from muzerox.config import Config, SearchConfig
from muzerox.envs import make_env
from muzerox.networks import make_model
from muzerox.precision import POLICIES
from muzerox.search import ENGINES, default_engine
from muzerox.search.policy import gumbel_search, muzero_search
from muzerox.types import Algorithm, EnvSpec, Params

B, N = 6, 8  # searches, simulations
RANGE = 2.0  # of values, as far apart as those of some nodes and not of others
VECTOR = EnvSpec(id="toy:vector", observation_shape=(4,), observation_dtype="float32", num_actions=3)
GAME = EnvSpec(id="toy:game", observation_shape=(4,), observation_dtype="float32", num_actions=5, num_players=2, has_legal=True)


def _setup(spec: EnvSpec, **changes: Any) -> tuple[Config, Algorithm, Params, jax.Array, jax.Array | None]:
    config = small_config(search__num_simulations=N, network__value_bound=10.0, **changes)
    algorithm = make_algorithm(config, spec)
    params = random_params(jax.random.key(1), algorithm.init(jax.random.key(0)))
    observation = jax.random.normal(jax.random.key(2), (B, *spec.observation_shape))
    legal = None
    if spec.has_legal:
        legal = jax.random.bernoulli(jax.random.key(3), 0.5, (B, spec.num_actions)).at[:, 2].set(True)
    return config, algorithm, params, observation, legal


def _direct(config: Config, spec: EnvSpec, params: Params, observation: jax.Array) -> tuple[mctx.RootFnOutput, Any]:
    """Root and recurrent function from the networks alone, at float32."""
    model = make_model(config.network, spec, POLICIES["O0"])

    def value(logits: jax.Array) -> jax.Array:
        return transforms.expected_value(logits, config.network.value_bound)

    def recurrent(params: Params, key: jax.Array, action: jax.Array, hidden: jax.Array) -> tuple:
        del key
        hidden, reward = model.dynamics(params, hidden, action)
        policy, logits = model.predict(params, hidden)
        signed = -config.train.discount if spec.num_players == 2 else config.train.discount
        output = mctx.RecurrentFnOutput(
            reward=transforms.expected_value(reward, config.network.reward_bound),
            discount=jnp.full(action.shape, signed, jnp.float32),
            prior_logits=policy,
            value=value(logits),
        )
        return output, hidden

    hidden = model.represent(params, observation)
    policy, logits = model.predict(params, hidden)
    return mctx.RootFnOutput(prior_logits=policy, value=value(logits), embedding=hidden), recurrent


def test_the_default_engine_is_the_one_measured_faster() -> None:
    assert (default_engine("cpu"), default_engine("gpu"), default_engine("tpu")) == ("fused", "fused", "mctx")


@pytest.mark.parametrize(
    ("name", "spec", "explore"),
    [("gumbel", GAME, True), ("gumbel", VECTOR, False), ("muzero", VECTOR, True), ("muzero", GAME, False)],
    ids=["gumbel", "gumbel greedy", "muzero", "muzero greedy"],
)
def test_targets_are_those_of_mctx(name: str, spec: EnvSpec, explore: bool) -> None:
    changes = {
        "search__max_depth": 4,
        "search__max_considered_actions": 3,
        "search__gumbel_scale": 0.7,
        "search__min_value_range": RANGE,
    }
    config, _, params, observation, legal = _setup(spec, search__algorithm=name, **changes)
    search = config.search

    @jax.jit
    def direct(key: jax.Array) -> Any:
        root, recurrent = _direct(config, spec, params, observation)
        invalid = None if legal is None else jnp.where(legal, 0, 1)
        if name == "gumbel":
            scale = functools.partial(
                mctx.qtransform_completed_by_mix_value,
                value_scale=search.value_scale,
                maxvisit_init=search.maxvisit_init,
                epsilon=RANGE,
            )
            return mctx.gumbel_muzero_policy(
                params,
                key,
                root,
                recurrent,
                N,
                invalid,
                max_depth=4,
                qtransform=scale,
                max_num_considered_actions=3,
                gumbel_scale=0.7 if explore else 0.0,
            )
        noise = {"dirichlet_fraction": 0.25, "temperature": 1.0} if explore else {"dirichlet_fraction": 0.0, "temperature": 0.0}
        scale = functools.partial(mctx.qtransform_by_parent_and_siblings, epsilon=RANGE)
        return mctx.muzero_policy(
            params, key, root, recurrent, N, invalid, max_depth=4, qtransform=scale, dirichlet_alpha=0.3, **noise
        )

    acts = {}
    engines = ("auto", *ENGINES)
    for engine in engines:
        algorithm = make_algorithm(config.replace("search.engine", engine), spec)
        acts[engine] = jax.jit(algorithm.act, static_argnums=4)
    for engine, seed in itertools.product(engines, range(3)):
        ours, theirs = acts[engine](jax.random.key(seed), params, observation, legal, explore), direct(jax.random.key(seed))
        np.testing.assert_array_equal(ours.action, theirs.action, err_msg=engine)
        np.testing.assert_allclose(ours.policy, theirs.action_weights, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(ours.value, theirs.search_tree.summary().value, rtol=1e-4, atol=1e-5)
        assert (ours.action.dtype, ours.policy.dtype, ours.value.dtype) == (jnp.int32, jnp.float32, jnp.float32)
        np.testing.assert_allclose(ours.policy.sum(-1), 1.0, rtol=1e-5)


def _record(level: str, spec: EnvSpec) -> Any:
    """A function that returns the tree that the family's root and recurrent function grow, and the parameters they read."""
    config, _, params, observation, legal = _setup(spec, precision__level=level)

    def search(key: jax.Array, params: Params, root: Any, recurrent: Any, invalid: Any, explore: bool) -> Any:
        del explore
        return mctx.gumbel_muzero_policy(params, key, root, recurrent, N, invalid).search_tree, params

    act = make_family(config, spec, search).act
    return lambda: act(jax.random.key(0), params, observation, legal, True)


@pytest.mark.parametrize(("level", "stored"), [("O0", "float32"), ("O1", "float32"), ("O2", "bfloat16")])
def test_tree_statistics_are_float32_and_embeddings_as_the_level_says(level: str, stored: str) -> None:
    tree, params = jax.eval_shape(_record(level, GAME))
    for name in ("raw_values", "node_values", "children_prior_logits", "children_rewards", "children_values"):
        assert getattr(tree, name).dtype == jnp.float32, name
    assert tree.children_discounts.dtype == jnp.float32
    assert tree.embeddings.dtype == ("uint16" if stored == "bfloat16" and jax.default_backend() == "cpu" else stored)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(stored)}


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_storing_sixteen_bits_packed_changes_no_decision_and_widens_no_tree(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU XLA would turn all [.., width] embeddings to float32 and back at every simulation."""

    def decide() -> tuple[Any, str]:
        _, algorithm, params, observation, legal = _setup(GAME, precision__level="O2", search__engine=engine)
        program = jax.jit(algorithm.act, static_argnums=4).lower(jax.random.key(0), params, observation, legal, True).compile()
        return program(jax.random.key(0), params, observation, legal), program.as_text()

    packed, program = decide()
    monkeypatch.setattr("muzerox.algorithms.base.pack", lambda x, dtype: x.astype(dtype))
    plain, widening = decide()
    np.testing.assert_array_equal(packed.action, plain.action)
    np.testing.assert_array_equal(packed.policy, plain.policy)
    nodes = B * (N + 1)
    stored = re.compile(rf"bf16\[({nodes}|{B},{N + 1}),\d+\]")
    if jax.default_backend() == "cpu":
        assert not stored.search(program)
    assert stored.search(widening)


@pytest.mark.parametrize(("spec", "sign"), [(VECTOR, 1.0), (GAME, -1.0)], ids=["one player", "two players"])
def test_discounts_in_the_tree_have_the_sign_of_the_turn(spec: EnvSpec, sign: float) -> None:
    tree, _ = jax.jit(_record("O0", spec))()
    expanded = np.asarray(tree.children_index) >= 0
    assert expanded.sum() == N * B
    np.testing.assert_allclose(np.asarray(tree.children_discounts)[expanded], sign * 0.9, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gumbel", {}), ("muzero", {}), *(("muzero", {"search__temperature": 5.0, "search__engine": e}) for e in ENGINES)],
)
def test_illegal_actions_are_never_chosen_nor_weighted(name: str, changes: dict[str, Any]) -> None:
    """Over every set of legal actions. Without exploration Gumbel does not depend on the key."""
    _, algorithm, params, _, _ = _setup(GAME, search__algorithm=name, **changes)
    observation = jax.random.normal(jax.random.key(4), (31, 4)) * 3
    legal = (np.arange(1, 32)[:, None] >> np.arange(5)) % 2 == 1  # the non-empty sets of five actions
    act = jax.jit(algorithm.act, static_argnums=4)
    for explore in (True, False):
        decisions = [act(jax.random.key(seed), params, observation, legal, explore) for seed in range(6)]
        for decision in decisions:
            assert legal[np.arange(31), np.asarray(decision.action)].all()
            np.testing.assert_array_equal(np.asarray(decision.policy)[~legal], 0.0)
            np.testing.assert_allclose(decision.policy.sum(-1), 1.0, rtol=1e-5)
        distinct = len({tuple(np.asarray(decision.action)) for decision in decisions})
        if explore:
            assert distinct > 1
        elif name == "gumbel":
            jax.tree.map(lambda *leaves: [np.testing.assert_array_equal(leaves[0], x) for x in leaves], *decisions)


# Nim: take one to three sticks, who takes the last one wins. A hidden state is the number of sticks left; the model is
# exact about rules and rewards and knows nothing of values.


def _nim(params: Any, key: jax.Array, action: jax.Array, sticks: jax.Array) -> tuple:
    del params, key
    left = jnp.maximum(sticks - (action + 1), 0)
    won = (sticks > 0) & (left == 0)
    over = left == 0
    output = mctx.RecurrentFnOutput(
        reward=won.astype(jnp.float32),
        discount=jnp.where(over, 0.0, -1.0),
        prior_logits=jnp.zeros((*action.shape, 3)),
        value=jnp.zeros(action.shape),
    )
    return output, left


@pytest.mark.parametrize("make", [gumbel_search, muzero_search], ids=["gumbel", "muzero"])
def test_nim_is_won_whenever_it_can_be(make: Any) -> None:
    sticks = jnp.array([1, 2, 3, 5, 6, 7, 4, 8])
    root = mctx.RootFnOutput(prior_logits=jnp.zeros((8, 3)), value=jnp.zeros(8), embedding=sticks)
    invalid = (jnp.arange(3)[None] >= sticks[:, None]).astype(jnp.int32)  # no more than there are
    search = make(SearchConfig(num_simulations=200))
    decision = jax.jit(lambda key: search(key, None, root, _nim, invalid, False))(jax.random.key(0))
    taken = np.asarray(decision.action) + 1
    np.testing.assert_array_equal(taken[:6], np.asarray(sticks[:6]) % 4)  # leave a multiple of four
    if make is muzero_search:  # Gumbel's halving visits bad actions as often as good ones until late: its mean says little
        value = np.asarray(decision.value)
        assert (value[:6] > 0.3).all()
        assert (value[6:] < -0.3).all()  # the player to move loses against good play


def test_a_split_search_is_the_searches_of_its_parts() -> None:
    env = make_env("gymnax:CartPole-v1")
    whole, split = (make_algorithm(small_config(search__split=n), env.spec) for n in (1, 2))
    params = random_params(jax.random.key(1), whole.init(jax.random.key(0)))
    observation = jax.random.normal(jax.random.key(2), (8, 4))
    keys = jax.random.split(jax.random.key(3), 2)
    act, act_split = (jax.jit(algorithm.act, static_argnums=4) for algorithm in (whole, split))
    parts = [act(key, params, part, None, True) for key, part in zip(keys, jnp.split(observation, 2), strict=True)]
    expected = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    found = act_split(jax.random.key(3), params, observation, None, True)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
    odd = act_split(jax.random.key(3), params, observation[:7], None, True)  # parts do not divide it: searched whole
    chex.assert_trees_all_close(odd, act(jax.random.key(3), params, observation[:7], None, True))


class _TicTacToe:
    """The environment itself as the model of a search: hidden states are positions."""

    def __init__(self) -> None:
        self.env = make_env("pgx:tic_tac_toe")
        self.play, self.step = jax.jit(self.env.step), jax.vmap(self.env.step, in_axes=(None, 0, 0))

    def position(self, moves: list[int]) -> tuple[Any, Any]:
        state, timestep = jax.jit(self.env.reset)(jax.random.key(0))
        for move in moves:
            state, timestep = self.play(jax.random.key(0), state, jnp.int32(move))
        return state, timestep

    def recurrent(self, params: Any, key: jax.Array, action: jax.Array, state: Any) -> tuple:
        del params
        state, timestep = self.step(key, state, action)
        output = mctx.RecurrentFnOutput(
            reward=timestep.reward,
            discount=jnp.where(timestep.ended, 0.0, -1.0),
            prior_logits=jnp.where(timestep.legal, 0.0, -1e9),
            value=jnp.zeros(action.shape),
        )
        return output, state


def test_tic_tac_toe_takes_a_win_and_stops_a_loss() -> None:
    game = _TicTacToe()
    # 0 1 2 / 3 4 5 / 6 7 8. Win now: first player has 0, 1; second player has 3, 4. Stop a loss: the other has 0, 1; 6, 7.
    positions = [([0, 3, 1, 4], 2), ([0, 3, 8, 4, 2], 5), ([0, 4, 1], 2), ([4, 6, 0, 8], 7)]
    states, timesteps = jax.tree.map(lambda *x: jnp.stack(x), *[game.position(moves) for moves, _ in positions])
    best = [answer for _, answer in positions]
    count = len(positions)
    root = mctx.RootFnOutput(prior_logits=jnp.zeros((count, 9)), value=jnp.zeros(count), embedding=states)
    invalid = 1 - timesteps.legal.astype(jnp.int32)
    search = gumbel_search(SearchConfig(num_simulations=150))
    decision = jax.jit(lambda key: search(key, None, root, game.recurrent, invalid, False))(jax.random.key(0))
    np.testing.assert_array_equal(decision.action, best)
