"""Our search loop against mctx: the same trees in float64, and in float32 wherever scores are not all but equal."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any
from unittest import mock

import golden_trees
import jax
import jax.numpy as jnp
import mctx
import numpy as np
import numpy_search
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_models import Case, assert_same_trees, differing, gap_where_they_part, renumbered

from muzerox.compilation import ONCE
from muzerox.search import fused, selection

MIX, MIN_MAX, SIBLINGS = (
    mctx.qtransform_completed_by_mix_value,
    functools.partial(mctx.qtransform_by_min_max, min_value=-8.0, max_value=8.0),
    mctx.qtransform_by_parent_and_siblings,
)
THOROUGH = (pytest.mark.slow, pytest.mark.thorough)
GUMBEL = [
    (Case(), {}),
    (Case(batch=1, simulations=1, actions=2), {}),
    (Case(batch=32, simulations=50, actions=2, sharpness=0.3), {"max_num_considered_actions": 2}),
    (Case(batch=16, simulations=50, actions=18, masked=True, spread=5.0), {"gumbel_scale": 0.0}),
    (Case(batch=4, simulations=120, actions=5, discount=-0.99, sharpness=3.0), {"max_num_considered_actions": 5}),
    (Case(batch=8, simulations=30, actions=82, masked=True, noisy=True), {"gumbel_scale": 2.0}),
    (Case(batch=8, simulations=40, actions=3, max_depth=3, masked=True), {}),
    (Case(batch=8, simulations=12, actions=3, max_depth=1), {"max_num_considered_actions": 1}),
    (Case(batch=8, simulations=30, actions=4), {"qtransform": functools.partial(MIX, rescale_values=False)}),
    (Case(batch=8, simulations=30, actions=4), {"qtransform": functools.partial(MIX, use_mixed_value=False, value_scale=1.0)}),
    (Case(batch=8, simulations=30, actions=4), {"qtransform": functools.partial(MIX, epsilon=1.0)}),
    (Case(batch=8, simulations=30, actions=4), {"qtransform": SIBLINGS}),
]
PUCT = [
    (Case(), {}),
    (Case(batch=1, simulations=1, actions=2), {}),
    (Case(batch=32, simulations=50, actions=2, sharpness=0.3), {"dirichlet_fraction": 0.0}),
    (Case(batch=16, simulations=50, actions=18, masked=True, spread=5.0), {"temperature": 0.0, "dirichlet_alpha": 1.0}),
    (Case(batch=4, simulations=120, actions=5, discount=-0.99), {"pb_c_init": 2.0, "pb_c_base": 50}),
    (Case(batch=8, simulations=40, actions=3, max_depth=3, masked=True, noisy=True), {"temperature": 0.5}),
    (Case(batch=8, simulations=30, actions=4, spread=3.0), {"qtransform": MIN_MAX}),
    (Case(batch=8, simulations=30, actions=4), {"qtransform": functools.partial(SIBLINGS, epsilon=1.0)}),
]


_BY_MCTX: dict[str, mctx.PolicyOutput] = {}


def by_mctx(policy: str, case: Case, options: dict[str, Any]) -> mctx.PolicyOutput:
    """What mctx answers in float64, compiled once for all tests that ask."""
    problem = f"{policy} {case} {options}"
    if problem not in _BY_MCTX:
        _BY_MCTX[problem] = case.run(getattr(mctx, policy), jnp.float64, **options)
    return _BY_MCTX[problem]


@pytest.mark.parametrize(
    ("policy", "case", "options"),
    [*(("gumbel_muzero_policy", *problem) for problem in GUMBEL), *(("muzero_policy", *problem) for problem in PUCT)],
    ids=lambda x: "" if isinstance(x, dict) else x if isinstance(x, str) else f"{x.batch}x{x.actions}",
)
def test_the_trees_are_those_of_mctx(policy: str, case: Case, options: dict[str, Any]) -> None:
    alone = {"side_by_side": False} if policy == "gumbel_muzero_policy" else {}
    with jax.enable_x64(True):
        ours = case.run(getattr(fused, policy), jnp.float64, **options, **alone)
        theirs = by_mctx(policy, case, options)
        assert (ours.action == theirs.action).all()
        assert jnp.allclose(ours.action_weights, theirs.action_weights, rtol=1e-9)
        assert_same_trees(ours.search_tree, theirs.search_tree, rtol=1e-9)


SIDE_BY_SIDE = [
    *(problem for problem in GUMBEL if not problem[0].masked),
    (Case(batch=8, simulations=17, actions=2), {}),  # the last round is cut short
    (Case(batch=16, simulations=50, actions=18, spread=5.0), {"gumbel_scale": 0.0}),
    (Case(batch=8, simulations=40, actions=3, max_depth=3), {}),
    (Case(batch=8, simulations=33, actions=7), {"max_num_considered_actions": 4, "qtransform": SIBLINGS}),
    (Case(batch=4, simulations=100, actions=40, discount=-1.0), {}),
]


@pytest.mark.parametrize(("case", "options"), SIDE_BY_SIDE, ids=lambda x: "" if isinstance(x, dict) else f"{x.batch}x{x.actions}")
def test_the_trees_of_simulations_side_by_side_are_those_of_mctx_but_for_numbers(case: Case, options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        ours = case.run(fused.gumbel_muzero_policy, jnp.float64, **options, side_by_side=True)
        theirs = by_mctx("gumbel_muzero_policy", case, options)
        assert (ours.action == theirs.action).all()
        assert jnp.allclose(ours.action_weights, theirs.action_weights, rtol=1e-9)
        assert_same_trees(renumbered(ours.search_tree), renumbered(theirs.search_tree), rtol=1e-9)


def test_trees_that_differ_in_an_edge_differ_renumbered() -> None:
    tree = Case().run(mctx.gumbel_muzero_policy).search_tree
    moved = tree.replace(children_visits=tree.children_visits.at[3, 0].set(tree.children_visits[3, 0, ::-1]))
    assert_same_trees(renumbered(tree), renumbered(tree), rtol=0.0)
    with pytest.raises(AssertionError, match="children_visits"):
        assert_same_trees(renumbered(moved), renumbered(tree), rtol=0.0)


@pytest.mark.parametrize(
    ("actions", "simulations", "considered", "qtransform", "rounds"),
    [
        (2, 16, 16, MIX, (2,) * 8),
        (2, 5, 16, MIX, (2, 2, 1)),  # the fifth has a choice of two
        (3, 16, 16, MIX, (3, 3, 1, 1, 2, 2, 2, 2)),  # a halving: the best two are taken one by one, then they are known
        (8, 12, 4, MIX, (4, 1, 1, 2, 2, 2)),
        (8, 12, 4, SIBLINGS, (1, 1, 1, 1, 1, 1, 2, 2, 2)),  # four of eight, by scores that may change
        (4, 8, 4, SIBLINGS, (4, 1, 1, 2)),  # all of four
        (4, 3, 1, MIX, (1, 1, 1)),
    ],
)
def test_what_sequential_halving_visits_in_any_case(
    actions: int, simulations: int, considered: int, qtransform: selection.QTransform, rounds: tuple[int, ...]
) -> None:
    assert selection.gumbel_rounds(actions, simulations, considered, qtransform) == rounds


def test_the_network_is_asked_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two actions by itself, with more on demand or on a GPU, with masks never."""

    def asked(case: Case, **options: Any) -> set[int]:
        sizes: set[int] = set()

        class Counted(Case):
            def recurrent(self, params: Any, key: jax.Array, action: jax.Array, hidden: jax.Array) -> tuple:
                sizes.add(len(action))
                return super().recurrent(params, key, action, hidden)

        counted = Counted(**dataclasses.asdict(case))
        jax.eval_shape(counted.search(fused.gumbel_muzero_policy, **options), *counted.arguments())
        return sizes

    assert asked(Case(batch=8, actions=2)) == {16}
    assert asked(Case(batch=8, actions=2, simulations=5)) == {8, 16}
    assert asked(Case(batch=8, actions=4), max_num_considered_actions=2) == {16}
    assert asked(Case(batch=8, actions=2), side_by_side=False) == {8}
    assert asked(Case(batch=8, actions=4)) == {8}
    assert asked(Case(batch=8, actions=4), side_by_side=True) == {8, 16, 32}
    assert asked(Case(batch=8, actions=2, masked=True), side_by_side=True) == {8}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert asked(Case(batch=8, actions=4)) == {8, 16, 32}
    assert asked(Case(batch=8, actions=4), side_by_side=False) == {8}


@pytest.mark.parametrize("policy", ["gumbel", "puct"])
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=256, simulations=32, actions=18, seed=5),
        Case(batch=256, simulations=50, actions=2, seed=6, discount=-1.0),
        pytest.param(Case(batch=64, simulations=200, actions=82, seed=7), marks=THOROUGH),
        pytest.param(Case(batch=256, simulations=100, actions=9, seed=8, spread=5.0, sharpness=3.0), marks=THOROUGH),
    ],
    ids=lambda case: f"{case.batch}x{case.simulations}x{case.actions}",
)
def test_in_float32_searches_part_only_where_scores_are_all_but_equal(policy: str, case: Case) -> None:
    if policy == "gumbel":
        ours, theirs = case.run(fused.gumbel_muzero_policy, side_by_side=False), case.run(mctx.gumbel_muzero_policy)
        assert differing(case.run(fused.gumbel_muzero_policy), theirs).sum() <= 0.01 * case.batch
    else:
        ours, theirs = (case.run(module.muzero_policy) for module in (fused, mctx))
    apart = np.flatnonzero(differing(ours, theirs))
    assert len(apart) <= 0.01 * case.batch
    for b in apart:
        if policy == "puct":
            score_root = score = numpy_search.puct
        else:
            gumbel = np.asarray(theirs.search_tree.extra_data.root_gumbel[b])
            score_root, score = numpy_search.gumbel_root(gumbel, 16, case.simulations), numpy_search.gumbel_interior
        assert gap_where_they_part(ours, theirs, int(b), score_root, score) < 1e-5


def stochastic(module: Any, *, batch: int, simulations: int, masked: bool) -> mctx.PolicyOutput:
    """What Stochastic MuZero answers with a random model of 3 actions and 5 outcomes."""
    actions, outcomes, hidden = 3, 5, 4
    rng = np.random.default_rng(11)
    weights = {
        name: jnp.asarray(rng.normal(size=shape))
        for name, shape in {
            "state": (hidden, hidden),
            "action": (actions, hidden),
            "outcome": (outcomes, hidden),
            "policy": (hidden, actions),
            "chance": (hidden, outcomes),
            "value": (hidden,),
        }.items()
    }

    def decision(params: Any, key: jax.Array, action: jax.Array, state: jax.Array) -> tuple:
        del key
        after = jnp.tanh(state @ params["state"] + params["action"][jnp.clip(action, 0, actions - 1)])
        return mctx_decision(chance_logits=after @ params["chance"], afterstate_value=after @ params["value"]), after

    def chance(params: Any, key: jax.Array, outcome: jax.Array, after: jax.Array) -> tuple:
        del key
        state = jnp.tanh(after @ params["state"] + params["outcome"][jnp.clip(outcome, 0, outcomes - 1)])
        output = mctx.ChanceRecurrentFnOutput(
            action_logits=state @ params["policy"],
            value=state @ params["value"],
            reward=0.2 * state[:, 0],
            discount=jnp.full(state.shape[0], 0.95),
        )
        return output, state

    mctx_decision = mctx.DecisionRecurrentFnOutput
    root = mctx.RootFnOutput(
        prior_logits=jnp.asarray(rng.normal(size=(batch, actions))),
        value=jnp.asarray(rng.normal(size=batch)),
        embedding=jnp.asarray(rng.normal(size=(batch, hidden))),
    )
    invalid = jnp.asarray(np.arange(batch)[:, None] % 3 == np.arange(actions), jnp.int32) if masked else None
    run = jax.jit(
        lambda params, root: module.stochastic_muzero_policy(
            params, jax.random.key(2), root, decision, chance, simulations, invalid_actions=invalid
        ),
        compiler_options=ONCE,
    )
    return run(weights, root)


@pytest.mark.parametrize("masked", [False, True])
def test_stochastic_search_grows_the_trees_of_mctx(masked: bool) -> None:
    with jax.enable_x64(True):
        ours, theirs = (stochastic(module, batch=6, simulations=40, masked=masked) for module in (fused, mctx))
        assert (ours.action == theirs.action).all()
        assert jnp.allclose(ours.action_weights, theirs.action_weights, rtol=1e-9)
        # Which part of an embedding counts is the same; the other part is never read, and differs at the root.
        assert (ours.search_tree.embeddings.is_decision_node == theirs.search_tree.embeddings.is_decision_node).all()
        assert_same_trees(ours.search_tree.replace(embeddings=None), theirs.search_tree.replace(embeddings=None), rtol=1e-9)


@settings(max_examples=5)
@given(data=st.data())
def test_any_problem_gets_the_answer_of_mctx(data: st.DataObject) -> None:
    with jax.enable_x64(True):
        ours, theirs = answers(data, batch=16, simulations=24, actions=12)
        assert (ours.action == theirs.action).all()
        assert_same_trees(ours.search_tree, theirs.search_tree, rtol=1e-8)


@pytest.mark.slow(150)
@settings(max_examples=25, derandomize=True)
@given(data=st.data())
def test_any_large_problem_gets_the_answer_of_mctx(data: st.DataObject) -> None:
    with jax.enable_x64(True):
        ours, theirs = answers(data, batch=256, simulations=200, actions=362)
        assert (ours.action == theirs.action).all()
        assert_same_trees(ours.search_tree, theirs.search_tree, rtol=1e-8)


def answers(data: st.DataObject, *, batch: int, simulations: int, actions: int) -> tuple[mctx.PolicyOutput, mctx.PolicyOutput]:
    """Ours and mctx's, in float64, with either policy on a problem of at most these shapes that mctx solves in seconds."""
    b = data.draw(st.sampled_from([1, 2, 3, 8, batch // 2, batch]))
    n = data.draw(st.integers(1, min(simulations, max(2, 1_000_000 // (b * 12)))))
    case = Case(
        batch=b,
        simulations=n,
        actions=data.draw(st.integers(2, min(actions, max(2, 1_000_000 // (b * n))))),
        seed=data.draw(st.integers(0, 2**16)),
        sharpness=data.draw(st.sampled_from([0.1, 1.0, 5.0])),
        spread=data.draw(st.sampled_from([0.1, 1.0, 10.0])),
        discount=data.draw(st.sampled_from([0.9, 1.0, -1.0])),
        noisy=data.draw(st.booleans()),
        masked=data.draw(st.booleans()),
        max_depth=data.draw(st.sampled_from([None, None, 1, 2, 4])),
    )
    own: dict[str, Any] = {}  # options of ours alone
    if data.draw(st.booleans()):
        policy, options = "gumbel_muzero_policy", {"qtransform": data.draw(st.sampled_from([MIX, SIBLINGS, MIN_MAX]))}
        own["side_by_side"] = not case.noisy and data.draw(st.booleans())  # what is drawn of one key is another side by side
        options["gumbel_scale"] = data.draw(st.sampled_from([0.0, 1.0]))
        options["max_num_considered_actions"] = data.draw(st.sampled_from([1, 4, 16]))
    else:
        policy, options = "muzero_policy", {"qtransform": data.draw(st.sampled_from([SIBLINGS, MIN_MAX]))}
        options["dirichlet_fraction"] = data.draw(st.sampled_from([0.0, 0.25]))
    # Two draws of the 1e-7 that break ties part searches of unlikely actions: neither side draws them here.
    with (
        mock.patch.object(selection, "_TIE_BREAK", 0.0),
        mock.patch.object(jax.random, "uniform", lambda _, shape: jnp.zeros(shape)),
    ):
        ours = case.run(getattr(fused, policy), jnp.float64, **options, **own)
        theirs = case.run(getattr(mctx, policy), jnp.float64, **options)
    if own.get("side_by_side"):
        ours, theirs = (output.replace(search_tree=renumbered(output.search_tree)) for output in (ours, theirs))
    return ours, theirs


@pytest.mark.parametrize("policy", ["gumbel", "puct"])
@pytest.mark.parametrize("discount", [0.97, -1.0])
def test_a_tree_search_in_numpy_agrees(policy: str, discount: float) -> None:
    """Written from the papers, for one root at a time."""
    case = Case(batch=5, simulations=40, actions=6, discount=discount, seed=3)
    with jax.enable_x64(True):
        params, root, _ = case.random(jnp.float64)
        if policy == "gumbel":
            ours = case.run(fused.gumbel_muzero_policy, jnp.float64, max_num_considered_actions=4).search_tree
            select = numpy_search.gumbel_interior
        else:
            ours = case.run(fused.muzero_policy, jnp.float64, dirichlet_fraction=0.0).search_tree
            select = numpy_search.puct
    weights = {name: np.asarray(x) for name, x in params.items()}

    def model(action: int, hidden: np.ndarray) -> tuple[float, float, np.ndarray, float, np.ndarray]:
        hidden = np.tanh(hidden @ weights["hidden"] + weights["action"][action])
        return float(hidden @ weights["reward"]), discount, hidden @ weights["prior"], float(hidden @ weights["value"]), hidden

    for b in range(case.batch):
        gumbel = None if policy == "puct" else np.asarray(ours.extra_data.root_gumbel[b])
        at_root = select if gumbel is None else numpy_search.gumbel_root(gumbel, 4, case.simulations)
        start = numpy_search.Node(root.prior_logits[b], float(root.value[b]), np.asarray(root.embedding[b]))
        numpy_search.search(start, model, at_root, select, case.simulations)

        def compare(node: numpy_search.Node, index: int, b: int = b) -> None:
            np.testing.assert_array_equal(ours.children_visits[b, index], node.visits)
            np.testing.assert_allclose(ours.node_values[b, index], node.value, rtol=1e-9)
            for action, child in node.children.items():
                compare(child, int(ours.children_index[b, index, action]))

        compare(start, 0)


@pytest.mark.parametrize("name", golden_trees.CASES)
def test_golden_trees(name: str) -> None:
    kept = json.loads(golden_trees.FILE.read_text())[name]
    for field, x in golden_trees.grow(fused, name).items():
        if np.issubdtype(x.dtype, np.integer):
            np.testing.assert_array_equal(x, kept[field], err_msg=field)
        else:
            np.testing.assert_allclose(x, kept[field], rtol=1e-9, atol=1e-12, err_msg=field)


def test_more_edges_than_int32_counts_are_an_error() -> None:
    root = mctx.RootFnOutput(
        prior_logits=jax.ShapeDtypeStruct((2**16, 362), jnp.float32),
        value=jax.ShapeDtypeStruct((2**16,), jnp.float32),
        embedding=jax.ShapeDtypeStruct((2**16, 1), jnp.float32),
    )

    def search(root: mctx.RootFnOutput) -> Any:
        return fused.muzero_policy(None, jax.random.key(0), root, lambda *_: None, num_simulations=200)

    with pytest.raises(ValueError, match=r"num_simulations = 200: 65536 roots of 362 actions .* 2\^31 edges .* valid: 89"):
        jax.eval_shape(search, root)
