"""Which action a node selects: mctx's rules, for a batch of nodes.

A rule sees one :class:`~muzerox.search.tree.Node` of every tree. Q transforms are mctx's, or any function of that signature
that reads no other node than the one it is asked about: they are given a tree of that node alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mctx
import numpy as np

from muzerox.search.engine import Select, SelectRoot
from muzerox.search.tree import Node, action_axis, each, extremes, largest, total, turned, written_out

QTransform = Callable[[Any, Any], jax.Array]
_TIE_BREAK = 1e-7


def transformed_q(node: Node, qtransform: QTransform) -> jax.Array:
    """``qtransform`` of the node's children, [B, A]; mctx's default for PUCT with reductions that are fast on few actions."""
    options = _options(qtransform, mctx.qtransform_by_parent_and_siblings)
    if options is not None:
        seen = node.child_visits > 0
        low, high = extremes(jnp.where(seen, node.q, node.spread(node.value)), node.axis)
        low, high = jnp.minimum(low, node.value), jnp.maximum(high, node.value)
        return jnp.where(seen, node.q - node.spread(low), 0.0) / node.spread(jnp.maximum(high - low, options["epsilon"]))
    trees = jax.tree.map(lambda x: (x.ndim - 1) * (1 - node.axis), node)  # the axis of the batch
    return jax.vmap(lambda one: qtransform(_alone(one), 0), in_axes=(trees,), out_axes=1 - node.axis)(node)


def _alone(node: Node) -> mctx.Tree:
    """An unbatched tree of one node. Q comes as a reward, so that ``tree.qvalues`` finds it."""
    zeros = jnp.zeros_like(node.q)[None]
    return mctx.Tree(
        node_visits=node.visits[None],
        raw_values=node.raw_value[None],
        node_values=node.value[None],
        parents=jnp.full(1, mctx.Tree.NO_PARENT),
        action_from_parent=jnp.full(1, mctx.Tree.NO_PARENT),
        children_index=jnp.full((1, *node.q.shape), mctx.Tree.UNVISITED),
        children_prior_logits=node.prior_logits[None],
        children_values=zeros,
        children_visits=node.child_visits[None].astype(jnp.int32),
        children_rewards=node.q[None],
        children_discounts=zeros,
        embeddings=None,
        root_invalid_actions=jnp.zeros_like(node.prior_logits),
        extra_data=None,
    )


def completed_q(node: Node, qtransform: QTransform) -> jax.Array:
    """``qtransform`` of a node for Gumbel, [B, A]; mctx's own, with what the search keeps of a node instead of sums over it."""
    options = _options(qtransform, mctx.qtransform_completed_by_mix_value)
    if options is None:
        return transformed_q(node, qtransform)
    seen = node.child_visits > 0
    tiny = jnp.finfo(node.prior.dtype).tiny
    value = node.raw_value
    if options["use_mixed_value"]:
        below = node.visits - 1
        weighted = total(jnp.where(seen, node.prior * node.q, 0.0), node.axis) / jnp.maximum(node.seen_prior, tiny)
        value = (value + below * weighted) / node.visits
    completed = jnp.where(seen, node.q, node.spread(value))
    if options["rescale_values"]:
        low, high = extremes(completed, node.axis)
        completed = (completed - node.spread(low)) / node.spread(jnp.maximum(high - low, options["epsilon"]))
    return node.spread((options["maxvisit_init"] + node.most_visits) * options["value_scale"]) * completed


def _options(qtransform: QTransform, of: QTransform) -> dict[str, Any] | None:
    """The options of ``qtransform`` if it is mctx's function ``of``; else None."""
    given: dict[str, Any] = {}
    while isinstance(qtransform, functools.partial) and not qtransform.args:
        given, qtransform = qtransform.keywords | given, qtransform.func
    if qtransform is not of:
        return None
    defaults = inspect.signature(qtransform).parameters.values()
    return {p.name: p.default for p in defaults if p.kind is p.KEYWORD_ONLY} | given


def gumbel_root(
    chosen: jax.Array, invalid: jax.Array | None, num_simulations: int, max_num_considered_actions: int, qtransform: QTransform
) -> SelectRoot:
    """Sequential halving of the actions with the highest ``gumbel + logits`` (Danihelka et al., ICLR 2022).

    Args:
      chosen: [B, A] gumbel and logits, the largest logit 0.
      invalid: [B, A], 1 where an action is illegal.
    """
    batch, actions = chosen.shape
    valid = jnp.full(batch, actions) if invalid is None else jnp.sum(1 - invalid, axis=1).astype(jnp.int32)
    table = np.array([_halving_visits(m, num_simulations) for m in range(max_num_considered_actions + 1)], np.int32)
    wanted = jnp.asarray(table).T[:, jnp.minimum(max_num_considered_actions, valid)]  # [N, B]
    axis = action_axis(actions)
    chosen, invalid = turned(chosen, axis), invalid if invalid is None else turned(invalid, axis)

    def select(node: Node, width: int) -> jax.Array | np.ndarray:
        if width == actions:  # all of them: in what order does not matter
            return np.broadcast_to(np.arange(actions, dtype=np.int32)[:, None], (actions, batch))
        visits = wanted[node.visits[0] - 1]  # all roots are as old
        score = considered(node, visits, chosen, completed_q(node, qtransform))
        if width == 1:
            return masked(score, invalid, axis)[None]
        return jax.lax.top_k(turned(score, axis), width)[1].T.astype(jnp.int32)

    return select


def gumbel_rounds(actions: int, num_simulations: int, max_num_considered_actions: int, qtransform: QTransform) -> tuple[int, ...]:
    """How many simulations of sequential halving may go side by side, in turn, so that it visits what mctx visits.

    One round visits every action that is still considered once: its edges are known before its first simulation, unless a
    halving came before. Then mctx takes the best, one by one, by values that each simulation changes; so it is here. In the first
    round of all, actions go by ``gumbel + logits`` where the transform gives the same to all that are unvisited.
    """
    fair = _options(qtransform, mctx.qtransform_completed_by_mix_value) is not None
    visits = _halving_visits(min(actions, max_num_considered_actions), num_simulations)
    rounds: list[int] = []
    eligible = None  # actions that were visited as often as the round asks for
    for _, group in itertools.groupby(visits):
        width = len(list(group))
        known = width == eligible or (eligible is None and (fair or width == actions))
        rounds += [width] if known else [1] * width
        eligible = width
    return tuple(rounds)


def considered(node: Node, visits: jax.Array, chosen: jax.Array, completed: jax.Array) -> jax.Array:
    """Scores [B|A] of the root's actions that were visited ``visits`` [B] times; of the others, minus infinity."""
    # The floor lets an action be visited that is the only one considered.
    return jnp.where(node.child_visits == node.spread(visits), jnp.maximum(-1e9, chosen + completed), -jnp.inf)


def _halving_visits(considered: int, num_simulations: int) -> list[int]:
    """How often the action to visit was visited before, for every simulation."""
    if considered <= 1:
        return list(range(num_simulations))
    phases = math.ceil(math.log2(considered))
    sequence: list[int] = []
    visits, left = 0, considered
    while len(sequence) < num_simulations:
        times = max(1, num_simulations // (phases * left))
        sequence += [visits + n for n in range(times) for _ in range(left)]
        visits, left = visits + times, max(2, left // 2)
    return sequence[:num_simulations]


def gumbel_interior(num_simulations: int, qtransform: QTransform) -> Select:
    """The action whose share of visits is farthest below its share of the improved policy (the same paper)."""
    bounded = _bounded(_options(qtransform, mctx.qtransform_completed_by_mix_value), num_simulations)

    def select(node: Node) -> jax.Array:
        completed = completed_q(node, qtransform)
        if bounded:
            # The softmax without its logits and without a search for the largest of them: how large Q can be is known.
            highest = (bounded["maxvisit_init"] + node.most_visits) * bounded["value_scale"]
            unscaled = node.prior * jnp.exp(completed - node.spread(highest))
        else:
            logits = node.prior_logits + completed
            unscaled = jnp.exp(logits - node.spread(largest(logits, node.axis)))
        policy = unscaled / node.spread(total(unscaled, node.axis))
        return masked(policy - node.child_visits / node.spread(node.visits), None, node.axis)

    return select


def _bounded(options: dict[str, Any] | None, num_simulations: int) -> dict[str, Any] | None:
    """The options if with them Q is so near its largest that no weight vanishes that a softmax would have kept in float32."""
    if options is None or not options["rescale_values"]:
        return None
    scale, visits = options["value_scale"], options["maxvisit_init"]
    if not (isinstance(scale, int | float) and isinstance(visits, int | float)):  # traced: not known
        return None
    return options if scale >= 0 and 0 <= (visits + num_simulations) * scale <= 40 else None


def puct_score(node: Node, bits: jax.Array, qtransform: QTransform, pb_c_init: Any, pb_c_base: Any) -> jax.Array:
    """What MuZero's rule chooses the largest of, [B|A] (Schrittwieser et al., arXiv:1911.08265, appendix B).

    Args:
      bits: uint32 [B|A], random; every node, and every visit of it, makes its own noise of them, which breaks ties.
    """
    pb_c = pb_c_init + jnp.log((node.visits + pb_c_base + 1.0) / pb_c_base)
    policy_score = node.spread(jnp.sqrt(node.visits) * pb_c) * node.prior / (node.child_visits + 1)
    return transformed_q(node, qtransform) + policy_score + _TIE_BREAK * _noise(bits, node).astype(policy_score.dtype)


def _noise(bits: jax.Array, node: Node) -> jax.Array:
    """Uniform on [0, 1) from ``bits``, other for every node and visit: a hash, far cheaper than splitting keys."""
    salt = node.number.astype(jnp.uint32) * jnp.uint32(0x9E3779B9) + node.visits.astype(jnp.uint32) * jnp.uint32(0x85EBCA6B)
    mixed = (bits ^ node.spread(salt)) * jnp.uint32(0x7FEB352D)
    return (mixed >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def masked(score: jax.Array, invalid: jax.Array | None, axis: int) -> jax.Array:
    """The best valid action [B] int32; 0 where none is valid."""
    if invalid is not None:
        score = jnp.where(invalid, -jnp.inf, score)
    last = score.shape[axis] - 1
    if written_out(score, axis):
        first, *others = each(score, axis)
        best, found = first, jnp.zeros(first.shape, jnp.int32)
        for action, other in enumerate(others, 1):
            best, found = jnp.where(other > best, other, best), jnp.where(other > best, action, found)
        return found
    numbers = jnp.expand_dims(jnp.arange(last + 1, dtype=jnp.int32), 1 - axis)
    # An argmax in two reductions, which vectorise where a reduction of pairs does not: four times as fast on a CPU.
    # The second in whole numbers: on floats XLA 0.10.2 crashes compiling some programs (tests/muzerox/test_checkpoint.py).
    return jnp.min(jnp.where(score == jnp.expand_dims(largest(score, axis), axis), numbers, last), axis=axis)
