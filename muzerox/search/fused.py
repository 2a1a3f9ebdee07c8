"""The policies of mctx on our search loop: the same signatures, inputs, outputs and answers.

A program on mctx imports ``gumbel_muzero_policy``, ``muzero_policy`` or ``stochastic_muzero_policy`` from here instead. Root
noise and the sampling of actions consume the key as mctx does; only the 1e-7 that break ties of PUCT are others, and what a
``recurrent_fn`` draws where simulations are made side by side.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mctx
from flax import struct

from muzerox.compilation import apart
from muzerox.search import engine, selection
from muzerox.search.selection import QTransform
from muzerox.search.tree import Node, action_axis, turned

_PER_ACTION = (
    "children_index",
    "children_prior_logits",
    "children_visits",
    "children_rewards",
    "children_discounts",
    "children_values",
    "root_invalid_actions",
)


class StochasticState(struct.PyTreeNode):
    """Embedding of a node of Stochastic MuZero: a state if a decision is to be taken there, else an afterstate."""

    state_embedding: Any  # [B, ...]
    afterstate_embedding: Any  # [B, ...]
    is_decision_node: jax.Array  # [B] bool


def gumbel_muzero_policy(
    params: Any,
    rng_key: jax.Array,
    root: mctx.RootFnOutput,
    recurrent_fn: mctx.RecurrentFn,
    num_simulations: int,
    invalid_actions: jax.Array | None = None,
    max_depth: int | None = None,
    loop_fn: Any = jax.lax.fori_loop,
    *,
    qtransform: QTransform = mctx.qtransform_completed_by_mix_value,
    max_num_considered_actions: int = 16,
    gumbel_scale: Any = 1.0,
    side_by_side: bool | None = None,
) -> mctx.PolicyOutput:
    """Full Gumbel MuZero (Danihelka et al., ICLR 2022), as ``mctx.gumbel_muzero_policy``.

    Args:
      root: prior_logits [B, A], value [B], embedding [B, ...].
      recurrent_fn: ``(params, key, action [B], embedding) -> (mctx.RecurrentFnOutput, embedding)``.
      invalid_actions: [B, A], 1 where an action is illegal.
      max_depth: edges from the root to the farthest leaf; default no limit.
      qtransform: reads only the node it is asked about.
      max_num_considered_actions: actions visited at the root, at most.
      gumbel_scale: 0 for the best action without noise.
      side_by_side: whether simulations that sequential halving makes in any case, each below another action of the root, are made
        at once: True wherever that is known (:func:`muzerox.search.selection.gumbel_rounds`), None on a GPU, and elsewhere where
        no more than two actions are considered, False nowhere. Never with ``invalid_actions``. The tree is mctx's, but nodes made
        at once may have one another's numbers, and a ``recurrent_fn`` that draws from its key draws other numbers.

    Returns:
      action [B], action_weights [B, A] (the improved policy) and the search tree.
    """
    logits = _mask(root.prior_logits, invalid_actions)
    root = root.replace(prior_logits=logits)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, gumbel_key = jax.random.split(key)
        return key, jax.random.gumbel(gumbel_key, shape=logits.shape, dtype=logits.dtype)

    rng_key, gumbel = apart(draw)(rng_key)
    gumbel = gumbel_scale * gumbel
    chosen = gumbel + (logits - jnp.max(logits, axis=1, keepdims=True))
    rounds = (1,) * num_simulations
    if side_by_side is not False and invalid_actions is None:  # with masks, roots halve differently many actions
        known = selection.gumbel_rounds(logits.shape[1], num_simulations, max_num_considered_actions, qtransform)
        # More at once take more memory, and every width is another loop to compile: up to two pay everywhere. A GPU, which takes
        # hardly longer for more roots, searches 1.7 to 1.8 times as fast.
        if side_by_side or max(known) <= 2 or jax.default_backend() == "gpu":
            rounds = known
    tree, node = engine.search(
        params,
        rng_key,
        root=root,
        recurrent_fn=recurrent_fn,
        select_root=selection.gumbel_root(chosen, invalid_actions, num_simulations, max_num_considered_actions, qtransform),
        select=selection.gumbel_interior(num_simulations, qtransform),
        rounds=rounds,
        max_depth=max_depth,
        invalid_actions=invalid_actions,
        extra_data=mctx.GumbelMuZeroExtraData(root_gumbel=gumbel),
        loop_fn=loop_fn,
    )
    completed_q = selection.completed_q(node, qtransform)
    best = turned(selection.considered(node, node.most_visits, turned(chosen, node.axis), completed_q), node.axis)
    return mctx.PolicyOutput(
        action=selection.masked(best, invalid_actions, axis=1),
        action_weights=jax.nn.softmax(_mask(logits + turned(completed_q, node.axis), invalid_actions)),
        search_tree=tree,
    )


def muzero_policy(
    params: Any,
    rng_key: jax.Array,
    root: mctx.RootFnOutput,
    recurrent_fn: mctx.RecurrentFn,
    num_simulations: int,
    invalid_actions: jax.Array | None = None,
    max_depth: int | None = None,
    loop_fn: Any = jax.lax.fori_loop,
    *,
    qtransform: QTransform = mctx.qtransform_by_parent_and_siblings,
    dirichlet_fraction: float = 0.25,
    dirichlet_alpha: float = 0.3,
    pb_c_init: Any = 1.25,
    pb_c_base: Any = 19652,
    temperature: Any = 1.0,
) -> mctx.PolicyOutput:
    """MuZero (Schrittwieser et al., arXiv:1911.08265), as ``mctx.muzero_policy``.

    Args:
      root, recurrent_fn, invalid_actions, max_depth, qtransform: as in :func:`gumbel_muzero_policy`.
      dirichlet_fraction: share of Dirichlet noise in the root's prior, from 0 to 1.
      temperature: actions are sampled in proportion to ``visits ** (1 / temperature)``; 0 for the most visited.

    Returns:
      action [B], action_weights [B, A] (shares of visits) and the search tree.
    """
    rng_key, dirichlet_key, search_key = jax.random.split(rng_key, 3)
    root = root.replace(
        prior_logits=_mask(_noisy(dirichlet_key, root.prior_logits, dirichlet_fraction, dirichlet_alpha), invalid_actions)
    )
    axis = action_axis(root.prior_logits.shape[1])
    bits = turned(_tie_break_bits(search_key, root.prior_logits.shape), axis)
    invalid = invalid_actions if invalid_actions is None else turned(invalid_actions, axis)

    def score(node: Node) -> jax.Array:
        return selection.puct_score(node, bits, qtransform, pb_c_init, pb_c_base)

    tree, node = engine.search(
        params,
        search_key,
        root=root,
        recurrent_fn=recurrent_fn,
        select_root=lambda node, _: selection.masked(score(node), invalid, axis)[None],
        select=lambda node: selection.masked(score(node), None, axis),
        rounds=(1,) * num_simulations,
        max_depth=max_depth,
        invalid_actions=invalid_actions,
        loop_fn=loop_fn,
    )
    return _sampled(rng_key, tree, turned(node.child_visits, axis), temperature)


def stochastic_muzero_policy(
    params: Any,
    rng_key: jax.Array,
    root: mctx.RootFnOutput,
    decision_recurrent_fn: Any,
    chance_recurrent_fn: Any,
    num_simulations: int,
    invalid_actions: jax.Array | None = None,
    max_depth: int | None = None,
    loop_fn: Any = jax.lax.fori_loop,
    *,
    qtransform: QTransform = mctx.qtransform_by_parent_and_siblings,
    dirichlet_fraction: float = 0.25,
    dirichlet_alpha: float = 0.3,
    pb_c_init: Any = 1.25,
    pb_c_base: Any = 19652,
    temperature: Any = 1.0,
) -> mctx.PolicyOutput:
    """Stochastic MuZero (Antonoglou et al., ICLR 2022), as ``mctx.stochastic_muzero_policy``.

    Decisions and chance take turns, so that a node's depth says which it is; both share the tree, in A actions and C outcomes.

    Args:
      decision_recurrent_fn: ``(params, key, action, state) -> (mctx.DecisionRecurrentFnOutput, afterstate)``.
      chance_recurrent_fn: ``(params, key, outcome, afterstate) -> (mctx.ChanceRecurrentFnOutput, state)``.
      the others: as in :func:`muzero_policy`.

    Returns:
      action [B], action_weights [B, A] and the search tree, of which edges of chance are left out.
    """
    batch, actions = root.prior_logits.shape
    rng_key, dirichlet_key, search_key = jax.random.split(rng_key, 3)
    logits = _mask(_noisy(dirichlet_key, root.prior_logits, dirichlet_fraction, dirichlet_alpha), invalid_actions)
    nothing = jnp.zeros(batch, jnp.int32)
    # Only the shapes of an afterstate are wanted; its content is never read before it is written.
    output, afterstate = jax.eval_shape(decision_recurrent_fn, params, rng_key, nothing, root.embedding)
    outcomes = output.chance_logits.shape[-1]
    root = root.replace(
        prior_logits=_beside(logits, outcomes, after=True),
        embedding=StochasticState(
            state_embedding=root.embedding,
            afterstate_embedding=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), afterstate),
            is_decision_node=jnp.ones(batch, bool),
        ),
    )
    axis = action_axis(actions + outcomes)
    bits = turned(_tie_break_bits(search_key, (batch, actions)), axis)
    invalid = invalid_actions if invalid_actions is None else turned(invalid_actions, axis)

    def decide(node: Node) -> jax.Array:
        return selection.puct_score(_slice(node, slice(None, actions)), bits, qtransform, pb_c_init, pb_c_base)

    def select(node: Node) -> jax.Array:
        chance = _slice(node, slice(actions, None))
        # Outcomes in proportion to their probability: the one that is farthest behind.
        outcome = selection.masked(chance.prior / (chance.child_visits + 1), None, axis)
        return jnp.where(node.depth % 2 == 0, selection.masked(decide(node), None, axis), actions + outcome)

    tree, node = engine.search(
        params,
        search_key,
        root=root,
        recurrent_fn=_in_turns(decision_recurrent_fn, chance_recurrent_fn, actions, outcomes),
        select_root=lambda node, _: selection.masked(decide(node), invalid, axis)[None],
        select=select,
        rounds=(1,) * num_simulations,
        max_depth=max_depth,
        invalid_actions=invalid_actions,
        loop_fn=loop_fn,
    )
    of_actions = {name: getattr(tree, name)[..., :actions] for name in _PER_ACTION}
    return _sampled(rng_key, tree.replace(**of_actions), turned(node.child_visits, axis)[:, :actions], temperature)


def _in_turns(decision_fn: Any, chance_fn: Any, actions: int, outcomes: int) -> Any:
    """Both functions as one recurrent function over A + C edges; each node takes its own part of both results."""

    def recurrent_fn(
        params: Any, key: jax.Array, edge: jax.Array, embedding: StochasticState
    ) -> tuple[mctx.RecurrentFnOutput, StochasticState]:
        decision, afterstate = decision_fn(params, key, edge, embedding.state_embedding)
        chance, state = chance_fn(params, key, edge - actions, embedding.afterstate_embedding)
        decided = mctx.RecurrentFnOutput(
            prior_logits=_beside(decision.chance_logits, actions, after=False),
            value=decision.afterstate_value,
            reward=jnp.zeros_like(decision.afterstate_value),
            discount=jnp.ones_like(decision.afterstate_value),
        )
        happened = mctx.RecurrentFnOutput(
            prior_logits=_beside(chance.action_logits, outcomes, after=True),
            value=chance.value,
            reward=chance.reward,
            discount=chance.discount,
        )
        was_decision = embedding.is_decision_node
        output = jax.tree.map(lambda a, b: jnp.where(was_decision.reshape((-1,) + (1,) * (a.ndim - 1)), a, b), decided, happened)
        return output, StochasticState(state_embedding=state, afterstate_embedding=afterstate, is_decision_node=~was_decision)

    return recurrent_fn


def _beside(logits: jax.Array, count: int, *, after: bool) -> jax.Array:
    """Logits with ``count`` edges of the other kind, which no node of this kind has, before or after them."""
    other = jnp.full((logits.shape[0], count), -jnp.inf, logits.dtype)
    return jnp.concatenate([logits, other] if after else [other, logits], axis=-1)


def _slice(node: Node, which: slice) -> Node:
    """The node as if it had only some of its edges."""
    index = (which,) if node.axis == 0 else (slice(None), which)
    return node.replace(**{name: getattr(node, name)[index] for name in ("prior_logits", "prior", "child_visits", "q")})


def _sampled(key: jax.Array, tree: mctx.Tree, visits: jax.Array, temperature: Any) -> mctx.PolicyOutput:
    """Actions in proportion to the root's visits [B, A], as ``visits ** (1 / temperature)``."""
    weights = visits / jnp.sum(visits, axis=1, keepdims=True)
    tiny = jnp.finfo(weights.dtype).tiny
    logits = jnp.log(weights)  # none without a visit, which those that are not legal never have, at any temperature
    # Less the largest: dividing by a small temperature must not overflow.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.maximum(tiny, temperature)
    return mctx.PolicyOutput(action=jax.random.categorical(key, logits), action_weights=weights, search_tree=tree)


def _noisy(key: jax.Array, logits: jax.Array, fraction: float, alpha: float) -> jax.Array:
    """Logits of the softmax mixed with Dirichlet noise."""
    batch, actions = logits.shape
    noise = jax.random.dirichlet(key, alpha=jnp.full([actions], fill_value=alpha), shape=(batch,))
    probs = (1 - fraction) * jax.nn.softmax(logits) + fraction * noise
    return jnp.log(jnp.maximum(probs, jnp.finfo(probs.dtype).tiny))


def _mask(logits: jax.Array, invalid: jax.Array | None) -> jax.Array:
    """Logits without mass where an action is invalid; finite, so that nothing is NaN where all are."""
    if invalid is None:
        return logits
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(invalid, jnp.finfo(logits.dtype).min, logits)


def _tie_break_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # A stream of its own: the search splits this key, and fold_in with a small number is one of the parts.
    return jax.random.bits(jax.random.fold_in(key, 2**31 - 1), shape, jnp.uint32)
