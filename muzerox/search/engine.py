"""The search loop: one tree an element of the batch, all grown in step, in O(B A) a level.

mctx (DeepMind) is the reference for every number here. Three facts make the same answers cheaper:

- What a node would select changes only when a backup passes through it. So the backup, which has the node's statistics at
  hand, also notes where a descent from that node would end; the next descent is one lookup below the root.
- A level of the backup touches one node of every tree. Its loop is one over the batch with a scalar condition and scatters
  that drop finished trees; a batched condition would make XLA select over whole trees, once a level.
- Statistics of an edge are those of the node it leads to: only visits and Q of children are kept twice, in rows that a
  selection reads at once; the rest of an ``mctx.Tree`` is put together at the end, and only if somebody reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx

ROOT = mctx.Tree.ROOT_INDEX
UNVISITED = mctx.Tree.UNVISITED
NO_PARENT = mctx.Tree.NO_PARENT


class Node(NamedTuple):
    """One node of every tree: all that a selection may depend on. Unvisited children have q 0."""

    number: jax.Array  # [B] int32, of the node in its tree
    depth: jax.Array  # [B] int32, 0 at the root
    visits: jax.Array  # [B] int32, one more than those of its children
    value: jax.Array  # [B] mean of what was backed up
    raw_value: jax.Array  # [B] the network's
    prior_logits: jax.Array  # [B, A]
    prior: jax.Array  # [B, A] their softmax, nowhere 0
    seen_prior: jax.Array  # [B] its sum over visited children
    most_visits: jax.Array  # [B] int32, of a child
    child_visits: jax.Array  # [B, A] whole numbers
    q: jax.Array  # [B, A] reward and discounted value of the child


Select = Callable[[Node], jax.Array]  # the action [B] int32

# What is gathered and scattered together lies together: columns of a node, and planes of its row.
_VISITS, _MOST_VISITS, _END, _PARENT, _ACTION, _DEPTH = range(6)  # end: the edge n A + a where a descent from here ends
_VALUE, _SEEN_PRIOR, _RAW_VALUE, _REWARD, _DISCOUNT = range(5)  # reward and discount are of the step that led here
_PRIOR, _Q, _CHILD_VISITS = range(3)


class _Nodes(NamedTuple):
    """Nodes of all trees: element b's node n is at b N + n. The root's own statistics are in ``_Root``."""

    ints: jax.Array  # [B N, 6] int32
    floats: jax.Array  # [B N, 5]
    rows: jax.Array  # [B N, 3, A]
    prior_logits: jax.Array  # [B N, A]
    child: jax.Array  # [B N, A] int32, node of the same tree
    embedding: Any  # [B N, ...]


class _Root(NamedTuple):
    """What changes at the root: every simulation passes it, so nothing of it needs gathering."""

    value: jax.Array  # [B]
    child: jax.Array  # [B, A] int32
    child_visits: jax.Array  # [B, A]
    q: jax.Array  # [B, A]


def search(
    params: Any,
    key: jax.Array,
    *,
    root: mctx.RootFnOutput,
    recurrent_fn: Any,
    select_root: Select,
    select: Select,
    num_simulations: int,
    max_depth: int | None = None,
    invalid_actions: jax.Array | None = None,
    extra_data: Any = None,
    loop_fn: Any = jax.lax.fori_loop,
) -> tuple[mctx.Tree, Node]:
    """Grows a tree of ``num_simulations`` expansions below each root.

    Args:
      root: prior logits [B, A], value [B], embedding [B, ...].
      recurrent_fn: ``(params, key, action [B], embedding [B, ...]) -> (mctx.RecurrentFnOutput, embedding)``.
      select_root: the action at the root.
      select: the action at any other node. It must depend on nothing but the node: it is asked once, when the node changed.
      max_depth: edges from the root to the farthest leaf; default no limit.
      invalid_actions: [B, A], 1 where an action is illegal; kept in the tree for whoever reads it.

    Returns:
      The tree mctx would have grown, statistics at least float32; and its root.
    """
    batch, actions = root.prior_logits.shape
    limit = num_simulations if max_depth is None else max_depth
    cut = limit < num_simulations  # whether a descent may end at a node that is there already
    trees = jnp.arange(batch, dtype=jnp.int32)
    first = trees * (num_simulations + 1)  # where a tree's nodes begin
    nodes, root_state = _init(root, num_simulations)
    dtype = root_state.value.dtype
    root_prior = _prior(root.prior_logits, dtype)
    zero = jnp.zeros(batch, jnp.int32)

    def root_node(state: _Root, visits: jax.Array) -> Node:
        return Node(
            number=zero,
            depth=zero,
            visits=zero + visits,
            value=state.value,
            raw_value=root.value.astype(dtype),
            prior_logits=root.prior_logits,
            prior=root_prior,
            seen_prior=jnp.sum(jnp.where(state.child_visits > 0, root_prior, 0.0), axis=1),
            most_visits=jnp.max(state.child_visits, axis=1).astype(jnp.int32),
            child_visits=state.child_visits,
            q=state.q,
        )

    def simulate(sim: jax.Array, carry: tuple[jax.Array, _Nodes, _Root]) -> tuple[jax.Array, _Nodes, _Root]:
        key, nodes, state = carry
        # Split as mctx does, so that a recurrent function that uses its key gets the same one.
        key, _, expand_key = jax.random.split(key, 3)
        new = jnp.asarray(sim, jnp.int32) + 1

        # Descend.
        root_action = select_root(root_node(state, new))
        child = _at(state.child, trees, root_action)
        stops = (child == UNVISITED) | (limit <= 1)
        end = jnp.where(stops, root_action, _at(nodes.ints, first + jnp.maximum(child, 0), _END))
        parent, action = end // actions, end % actions
        leaf = zero + new
        if cut:
            seen = jnp.where(stops, child, _at(nodes.child, first + parent, action))
            leaf = jnp.where(seen == UNVISITED, leaf, seen)

        # Expand.
        at_parent, at_leaf = first + parent, first + leaf
        step, embedding = recurrent_fn(params, expand_key, action, jax.tree.map(lambda x: _at(x, at_parent), nodes.embedding))
        logits, value = step.prior_logits.astype(nodes.prior_logits.dtype), step.value.astype(dtype)
        nothing = jnp.zeros((batch, actions), dtype)
        fresh = Node(
            number=leaf,
            depth=_at(nodes.ints, at_parent, _DEPTH) + 1,
            visits=_at(nodes.ints, at_leaf, _VISITS) + 1 if cut else zero + 1,
            value=value,
            raw_value=value,
            prior_logits=logits,
            prior=_prior(logits, dtype),
            seen_prior=nothing[:, 0],
            most_visits=zero,
            child_visits=nothing,
            q=nothing,
        )
        reward, discount = step.reward.astype(dtype), step.discount.astype(dtype)
        ints = (fresh.visits, zero, leaf * actions + select(fresh), parent, action, fresh.depth)
        floats = (value, nothing[:, 0], value, reward, discount)
        nodes = _Nodes(
            ints=_set(nodes.ints, at_leaf, value=jnp.stack(ints, axis=1)),
            floats=_set(nodes.floats, at_leaf, value=jnp.stack(floats, axis=1)),
            rows=_set(nodes.rows, at_leaf, value=jnp.stack([fresh.prior, nothing, nothing], axis=1)),
            prior_logits=_set(nodes.prior_logits, at_leaf, value=logits),
            child=_set(nodes.child, at_parent, action, value=leaf),
            embedding=jax.tree.map(lambda x, y: _set(x, at_leaf, value=y.astype(x.dtype)), nodes.embedding, embedding),
        )

        # Back up: below the root level by level, then the root, where all trees arrive.
        nodes, top = _backup(nodes, first, _Level(leaf, value, value, parent, action, reward, discount), select, limit)
        here = _one_hot(top.action, actions)
        returned = top.reward + top.discount * top.returned
        state = _Root(
            value=(state.value * new + returned) / (new + 1.0),
            child=jnp.where(here, top.number[:, None], state.child),
            child_visits=state.child_visits + here,
            q=jnp.where(here, (top.reward + top.discount * top.value)[:, None], state.q),
        )
        return key, nodes, state

    _, nodes, root_state = loop_fn(0, num_simulations, simulate, (key, nodes, root_state))
    tree = _as_mctx(nodes, root_state, root, num_simulations, invalid_actions, extra_data)
    return tree, root_node(root_state, jnp.int32(num_simulations + 1))


class _Level(NamedTuple):
    """How far the backup of every tree has come: the node that was brought up to date last, [B]."""

    number: jax.Array  # int32, of the node in its tree
    value: jax.Array  # of the node
    returned: jax.Array  # what is backed up from it
    parent: jax.Array  # int32
    action: jax.Array  # int32, that led to it
    reward: jax.Array
    discount: jax.Array


def _backup(nodes: _Nodes, first: jax.Array, level: _Level, select: Select, limit: int) -> tuple[_Nodes, _Level]:
    """Brings the nodes between a leaf and the root up to date; ends at the root's children."""
    actions = nodes.child.shape[1]

    def climb(carry: tuple[_Nodes, _Level]) -> tuple[_Nodes, _Level]:
        nodes, level = carry
        at = first + level.parent
        ints, floats, row = _at(nodes.ints, at), _at(nodes.floats, at), _at(nodes.rows, at)
        visits = ints[:, _VISITS]
        returned = level.reward + level.discount * level.returned
        q = level.reward + level.discount * level.value
        here = _one_hot(level.action, actions)
        # Every value that is written depends on all that was read there before: without that, XLA copies whole trees first.
        edge = jnp.take_along_axis(row, level.action[:, None, None], axis=2, mode="promise_in_bounds")[:, :, 0]
        times = edge[:, _CHILD_VISITS] + 1.0
        node = Node(
            number=level.parent,
            depth=ints[:, _DEPTH],
            visits=visits + 1,
            value=(floats[:, _VALUE] * visits + returned) / (visits + 1.0),
            raw_value=floats[:, _RAW_VALUE],
            prior_logits=_at(nodes.prior_logits, at),
            prior=row[:, _PRIOR],
            seen_prior=floats[:, _SEEN_PRIOR] + jnp.where(times == 1.0, edge[:, _PRIOR], 0.0),
            most_visits=jnp.maximum(ints[:, _MOST_VISITS], times.astype(jnp.int32)),
            child_visits=row[:, _CHILD_VISITS] + here,
            q=jnp.where(here, q[:, None], row[:, _Q]),
        )
        best = select(node)
        child = _at(nodes.child, at, best)
        stops = (child == UNVISITED) | (node.depth + 1 >= limit)
        end = jnp.where(stops, level.parent * actions + best, _at(nodes.ints, first + jnp.maximum(child, 0), _END))
        moving = level.parent != ROOT
        at = jnp.where(moving, at, nodes.ints.shape[0])  # beyond the end: dropped
        changed = (node.visits, node.most_visits, end)
        nodes = nodes._replace(
            ints=_set(nodes.ints, at, slice(_VISITS, _END + 1), value=jnp.stack(changed, axis=1)),
            floats=_set(nodes.floats, at, slice(_VALUE, _SEEN_PRIOR + 1), value=jnp.stack([node.value, node.seen_prior], axis=1)),
            rows=_set(nodes.rows, at, slice(_Q, _CHILD_VISITS + 1), level.action, value=jnp.stack([q, times], axis=1)),
        )
        above = _Level(
            level.parent,
            node.value,
            returned,
            ints[:, _PARENT],
            ints[:, _ACTION],
            floats[:, _REWARD],
            floats[:, _DISCOUNT],
        )
        return nodes, jax.tree.map(lambda x, y: jnp.where(moving, y, x), level, above)

    return jax.lax.while_loop(lambda carry: jnp.any(carry[1].parent != ROOT), climb, (nodes, level))


def _at(x: jax.Array, *index: Any) -> jax.Array:
    """``x[index]`` for indices that are known to be inside."""
    return x.at[index].get(mode="promise_in_bounds")


def _set(x: jax.Array, *index: Any, value: jax.Array) -> jax.Array:
    """``x`` with ``value`` at ``index``; one index a tree, so no two are the same; indices beyond the end write nothing."""
    return x.at[index].set(value, mode="drop", unique_indices=True)


def _prior(logits: jax.Array, dtype: Any) -> jax.Array:
    return jnp.maximum(jax.nn.softmax(logits), jnp.finfo(logits.dtype).tiny).astype(dtype)


def _one_hot(action: jax.Array, actions: int) -> jax.Array:
    return action[:, None] == jnp.arange(actions, dtype=jnp.int32)[None, :]


def _init(root: mctx.RootFnOutput, num_simulations: int) -> tuple[_Nodes, _Root]:
    batch, actions = root.prior_logits.shape
    shape = (batch, num_simulations + 1)
    count = batch * (num_simulations + 1)
    dtype = jnp.promote_types(root.value.dtype, jnp.float32)  # averages in less are wrong

    def embedding(x: jax.Array) -> jax.Array:
        return jnp.zeros((*shape, *x.shape[1:]), x.dtype).at[:, ROOT].set(x).reshape((count, *x.shape[1:]))

    nodes = _Nodes(
        ints=jnp.zeros((count, 6), jnp.int32).at[:, jnp.array([_PARENT, _ACTION])].set(NO_PARENT),
        floats=jnp.zeros((count, 5), dtype),
        rows=jnp.zeros((count, 3, actions), dtype),
        prior_logits=jnp.zeros((count, actions), root.prior_logits.dtype),
        child=jnp.full((count, actions), UNVISITED, jnp.int32),
        embedding=jax.tree.map(embedding, root.embedding),
    )
    state = _Root(
        value=root.value.astype(dtype),
        child=jnp.full((batch, actions), UNVISITED, jnp.int32),
        child_visits=jnp.zeros((batch, actions), dtype),
        q=jnp.zeros((batch, actions), dtype),
    )
    return nodes, state


def _as_mctx(
    nodes: _Nodes, state: _Root, root: mctx.RootFnOutput, num_simulations: int, invalid_actions: Any, extra_data: Any
) -> mctx.Tree:
    """The tree in mctx's fields, [B, N, ...]. What nobody reads of it is never computed under jit."""
    shape = (root.value.shape[0], num_simulations + 1)

    def whole(x: jax.Array, at_root: jax.Array | int | None = None) -> jax.Array:
        x = x.reshape((*shape, *x.shape[1:]))
        return x if at_root is None else x.at[:, ROOT].set(at_root)

    child = whole(nodes.child, state.child)
    value = whole(nodes.floats[:, _VALUE], state.value)

    def of_child(x: jax.Array) -> jax.Array:
        """What is known of the node that an edge leads to [B, N, A]; 0 where it leads nowhere."""
        found = jax.vmap(lambda node, index: node[jnp.maximum(index, 0)])(x, child)
        return jnp.where(child == UNVISITED, 0, found)

    return mctx.Tree(
        node_visits=whole(nodes.ints[:, _VISITS], num_simulations + 1),
        raw_values=whole(nodes.floats[:, _RAW_VALUE], root.value.astype(value.dtype)),
        node_values=value,
        parents=whole(nodes.ints[:, _PARENT]),
        action_from_parent=whole(nodes.ints[:, _ACTION]),
        children_index=child,
        children_prior_logits=whole(nodes.prior_logits, root.prior_logits),
        children_values=of_child(value),
        children_visits=whole(nodes.rows[:, _CHILD_VISITS], state.child_visits).astype(jnp.int32),
        children_rewards=of_child(whole(nodes.floats[:, _REWARD])),
        children_discounts=of_child(whole(nodes.floats[:, _DISCOUNT])),
        embeddings=jax.tree.map(whole, nodes.embedding),
        root_invalid_actions=jnp.zeros_like(root.prior_logits) if invalid_actions is None else invalid_actions,
        extra_data=extra_data,
    )
