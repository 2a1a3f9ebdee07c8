"""The search loop: one tree an element of the batch, all grown in step, in O(B A) a level.

mctx (DeepMind) is the reference for every number here. Five facts make the same answers cheaper:

- What a node would select changes only when a backup passes through it. So the backup, which has the node's statistics at
  hand, also notes where a descent from that node would end; the next descent is one lookup below the root.
- A level of the backup touches one node of every tree. Its loop is one over the batch, as long as the deepest leaf is deep;
  a tree that has come to its root goes on in a place that nobody reads. A condition of each tree's own would make XLA select
  over whole trees, once a level.
- Nodes of the same number lie side by side: what all trees expand at once is written as one slice.
- Simulations that leave the root by different edges meet nowhere below it. Where it is known beforehand that several edges come
  next (a round of sequential halving), they go side by side, as one simulation of so many trees more: lanes. Networks see a batch
  as many times as large, as many times less often.
- Statistics of an edge are those of the node it leads to: only visits and Q of children are kept twice, side by side, so that a
  selection reads them at once; the rest of an ``mctx.Tree`` is put together at the end, and only if somebody reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
from flax import struct

ROOT = mctx.Tree.ROOT_INDEX
UNVISITED = mctx.Tree.UNVISITED
NO_PARENT = mctx.Tree.NO_PARENT


class Node(struct.PyTreeNode):
    """One node of every tree: all that a selection may depend on. Unvisited children have q 0.

    What there is of every action has an axis of actions and one of trees, in the order of ``axis``; written [B|A] here.
    """

    number: jax.Array  # [B] int32, of the node in its tree
    depth: jax.Array  # [B] int32, 0 at the root
    visits: jax.Array  # [B] int32, one more than those of its children
    value: jax.Array  # [B] mean of what was backed up
    raw_value: jax.Array  # [B] the network's
    prior_logits: jax.Array  # [B|A]
    prior: jax.Array  # [B|A] their softmax, nowhere 0
    seen_prior: jax.Array  # [B] its sum over visited children
    most_visits: jax.Array  # [B] int32, of a child
    child_visits: jax.Array  # [B|A] whole numbers
    q: jax.Array  # [B|A] reward and discounted value of the child
    axis: int = struct.field(pytree_node=False)  # of the actions: 0 or 1

    def spread(self, x: jax.Array) -> jax.Array:
        """The same for every action, of [B]."""
        return jnp.expand_dims(x, self.axis)


Select = Callable[[Node], jax.Array]  # the action [B] int32
SelectRoot = Callable[[Node, int], jax.Array]  # so many different actions [W, B] int32

# With up to so many actions a reduction over them is one over trees side by side, which vectorises, and the transposition
# is the cheaper of the two.
_FEW = 32

# What is gathered and scattered together lies together.
_END, _PARENT, _ACTION, _DEPTH = range(4)  # end: the edge n A + a where a descent from here ends
_VALUE, _RAW_VALUE, _REWARD, _DISCOUNT = range(4)  # reward and discount are of the step that led here
_Q, _CHILD_VISITS = range(2)


class _Nodes(NamedTuple):
    """Nodes of all trees: tree b's node n is at n B + b, its edges from (n B + b) A on. The root's own are in ``_Root``."""

    ints: jax.Array  # [N B, 4] int32
    floats: jax.Array  # [N B, 4]
    edges: jax.Array  # [N B A, 2] Q and visits
    prior: jax.Array  # [N B, A]
    prior_logits: jax.Array  # [N B, A]
    child: jax.Array  # [N B, A] int32, node of the same tree
    embedding: Any  # [N B, ...]


class _Root(NamedTuple):
    """What changes at the root: every simulation passes it, so nothing of it needs gathering."""

    value: jax.Array  # [B]
    child: jax.Array  # [B|A] int32
    child_visits: jax.Array  # [B|A]
    q: jax.Array  # [B|A]


def search(
    params: Any,
    key: jax.Array,
    *,
    root: mctx.RootFnOutput,
    recurrent_fn: Any,
    select_root: SelectRoot,
    select: Select,
    rounds: Sequence[int],
    max_depth: int | None = None,
    invalid_actions: jax.Array | None = None,
    extra_data: Any = None,
    loop_fn: Any = jax.lax.fori_loop,
) -> tuple[mctx.Tree, Node]:
    """Grows a tree of ``sum(rounds)`` expansions below each root.

    Args:
      root: prior logits [B, A], value [B], embedding [B, ...].
      recurrent_fn: ``(params, key, action [L], embedding [L, ...]) -> (mctx.RecurrentFnOutput, embedding)``; L is B times the
        simulations side by side.
      select_root: ``(node, width) -> actions``, different ones, at the root.
      select: the action at any other node. It must depend on nothing but the node: it is asked once, when the node changed.
      rounds: how many simulations go side by side, in turn.
      max_depth: edges from the root to the farthest leaf; default no limit.
      invalid_actions: [B, A], 1 where an action is illegal; kept in the tree for whoever reads it.

    Returns:
      The tree mctx would have grown, statistics at least float32; and its root.

    Raises:
      ValueError: the trees have 2^31 edges or more.
    """
    batch, actions = root.prior_logits.shape
    num_simulations = sum(rounds)
    limit = num_simulations if max_depth is None else max_depth
    cut = limit < num_simulations  # whether a descent may end at a node that is there already
    axis = action_axis(actions)
    nodes, root_state = _init(root, num_simulations)
    keys = _expansion_keys(key, num_simulations)
    dtype = root_state.value.dtype
    root_logits, root_prior = turned(root.prior_logits, axis), turned(_prior(root.prior_logits, dtype), axis)
    zero = jnp.zeros(batch, jnp.int32)

    def root_node(state: _Root, visits: jax.Array) -> Node:
        return Node(
            number=zero,
            depth=zero,
            visits=zero + visits,
            value=state.value,
            raw_value=root.value.astype(dtype),
            prior_logits=root_logits,
            prior=root_prior,
            seen_prior=jnp.sum(jnp.where(state.child_visits > 0, root_prior, 0.0), axis=axis),
            most_visits=jnp.max(state.child_visits, axis=axis).astype(jnp.int32),
            child_visits=state.child_visits,
            q=state.q,
            axis=axis,
        )

    def simulate(sim: jax.Array, carry: tuple[_Nodes, _Root], width: int) -> tuple[_Nodes, _Root]:
        nodes, state = carry
        new = jnp.asarray(sim, jnp.int32) + 1  # the number of the first lane's node, and the root's visits
        lanes = width * batch  # lane w B + b is of tree b
        lane = jnp.arange(lanes, dtype=jnp.int32)
        trees = lane % batch
        none = jnp.zeros(lanes, jnp.int32)

        # Descend.
        root_action = select_root(root_node(state, new), width)  # [W, B]
        child = jax.vmap(lambda action: _pick(state.child, action, axis))(root_action).reshape(lanes)
        stops = (child == UNVISITED) | (limit <= 1)
        end = jnp.where(stops, root_action.reshape(lanes), _at(nodes.ints, jnp.maximum(child, 0) * batch + trees, _END))
        parent, action = end // actions, end % actions
        at_parent = parent * batch + trees
        leaf = lane // batch + new
        if cut:
            seen = jnp.where(stops, child, _at(nodes.child, at_parent, action))
            leaf = jnp.where(seen == UNVISITED, leaf, seen)

        at_leaf = leaf * batch + trees

        # Expand.
        step, embedding = recurrent_fn(params, keys[sim], action, jax.tree.map(lambda x: _at(x, at_parent), nodes.embedding))
        logits, value = step.prior_logits.astype(nodes.prior_logits.dtype), step.value.astype(dtype)
        prior = _prior(logits, dtype)
        nothing = jnp.zeros_like(turned(prior, axis))
        fresh = Node(
            number=leaf,
            depth=_at(nodes.ints, at_parent, _DEPTH) + 1,
            visits=none + 1,
            value=value,
            raw_value=value,
            prior_logits=turned(logits, axis),
            prior=turned(prior, axis),
            seen_prior=jnp.zeros(lanes, dtype),
            most_visits=none,
            child_visits=nothing,
            q=nothing,
            axis=axis,
        )
        reward, discount = step.reward.astype(dtype), step.discount.astype(dtype)
        ints = (leaf * actions + select(fresh), parent, action, fresh.depth)
        floats = (value, value, reward, discount)

        def write(x: jax.Array, y: jax.Array) -> jax.Array:
            y = y.astype(x.dtype)
            return _set(x, at_leaf, value=y) if cut else jax.lax.dynamic_update_slice_in_dim(x, y, new * batch, axis=0)

        nodes = _Nodes(
            ints=write(nodes.ints, jnp.stack(ints, axis=1)),
            floats=write(nodes.floats, jnp.stack(floats, axis=1)),
            edges=nodes.edges,
            prior=write(nodes.prior, prior),
            prior_logits=write(nodes.prior_logits, logits),
            child=_set(nodes.child, at_parent, action, value=leaf),
            embedding=jax.tree.map(write, nodes.embedding, embedding),
        )

        # Back up: below the root level by level, then the root, where all trees arrive.
        level = _Level(leaf, value, value, parent, action, reward, discount)
        nodes, returned = _backup(nodes, trees, level, fresh.depth, select, limit=limit, batch=batch)
        number = jnp.where(stops, leaf, child)
        top = _at(nodes.floats, number * batch + trees)
        returned = top[:, _REWARD] + top[:, _DISCOUNT] * returned
        q = top[:, _REWARD] + top[:, _DISCOUNT] * top[:, _VALUE]
        here = jax.vmap(lambda action: _one_hot(action, actions, axis))(root_action)  # [W, B|A]

        def at_root(old: jax.Array, lane: jax.Array) -> jax.Array:
            """What every lane has [L], at its action."""
            lane = jnp.expand_dims(lane.reshape(width, batch), axis + 1)
            return jnp.where(here.any(0), jnp.sum(jnp.where(here, lane, 0), axis=0, dtype=old.dtype), old)

        state = _Root(
            value=(state.value * new + returned.reshape(width, batch).sum(0)) / (new + width),
            child=at_root(state.child, number),
            child_visits=state.child_visits + here.any(0),
            q=at_root(state.q, q),
        )
        return nodes, state

    carry, done = (nodes, root_state), 0
    for width, group in itertools.groupby(rounds):
        count = len(list(group))
        carry = loop_fn(0, count, lambda i, carry, done=done, width=width: simulate(done + i * width, carry, width), carry)
        done += count * width
    nodes, root_state = carry
    tree = _as_mctx(nodes, root_state, root, num_simulations, invalid_actions, extra_data)
    return tree, root_node(root_state, jnp.int32(num_simulations + 1))


class _Level(NamedTuple):
    """How far the backup of every lane has come: the node that was brought up to date last, [L]."""

    number: jax.Array  # int32, of the node in its tree
    value: jax.Array  # of the node
    returned: jax.Array  # what is backed up from it
    parent: jax.Array  # int32
    action: jax.Array  # int32, that led to it
    reward: jax.Array
    discount: jax.Array


def _backup(
    nodes: _Nodes, trees: jax.Array, level: _Level, depth: jax.Array, select: Select, *, limit: int, batch: int
) -> tuple[_Nodes, jax.Array]:
    """Brings the nodes between a leaf and the root up to date, and says what is backed up from the root's children [L].

    ``depth`` [L] is the leaf's. A lane that has come to its root goes on updating the root's place, which nobody reads.
    """
    lanes, actions = trees.shape[0], nodes.child.shape[1]
    axis, alone = action_axis(actions), lanes == batch  # in its tree: lanes that have arrived write to one place

    def climb(height: jax.Array, carry: tuple[_Nodes, _Level, jax.Array]) -> tuple[_Nodes, _Level, jax.Array]:
        nodes, level, top = carry
        at = level.parent * batch + trees
        ints, floats, prior = _at(nodes.ints, at), _at(nodes.floats, at), turned(_at(nodes.prior, at), axis)
        edges = _at(nodes.edges.reshape(-1, 2 * actions), at).reshape(lanes, actions, 2)
        old_q, old_visits = turned(edges[..., _Q], axis), turned(edges[..., _CHILD_VISITS], axis)
        returned = level.reward + level.discount * level.returned
        q = level.reward + level.discount * level.value
        here = _one_hot(level.action, actions, axis)
        # Every value that is written depends on all that was read there before: without that, XLA copies whole trees first.
        times = _pick(old_visits, level.action, axis) + 1.0
        child_visits = old_visits + here
        visits = jnp.sum(child_visits, axis=axis)
        node = Node(
            number=level.parent,
            depth=ints[:, _DEPTH],
            visits=visits.astype(jnp.int32) + 1,
            value=(floats[:, _VALUE] * visits + returned) / (visits + 1.0),
            raw_value=floats[:, _RAW_VALUE],
            prior_logits=turned(_at(nodes.prior_logits, at), axis),
            prior=prior,
            seen_prior=jnp.sum(jnp.where(child_visits > 0, prior, 0.0), axis=axis),
            most_visits=jnp.max(child_visits, axis=axis).astype(jnp.int32),
            child_visits=child_visits,
            q=jnp.where(here, jnp.expand_dims(q, axis), old_q),
            axis=axis,
        )
        best = select(node)
        child = _at(nodes.child, at, best)
        stops = (child == UNVISITED) | (node.depth + 1 >= limit)
        end = jnp.where(stops, level.parent * actions + best, _at(nodes.ints, jnp.maximum(child, 0) * batch + trees, _END))
        nodes = nodes._replace(
            ints=_set(nodes.ints, at, _END, value=end, unique=alone),
            floats=_set(nodes.floats, at, _VALUE, value=node.value, unique=alone),
            edges=_set(nodes.edges, at * actions + level.action, value=jnp.stack([q, times], axis=1), unique=alone),
        )
        step = floats[:, _REWARD], floats[:, _DISCOUNT]
        above = _Level(level.parent, node.value, returned, ints[:, _PARENT], ints[:, _ACTION], *step)
        return nodes, above, jnp.where(height < depth - 1, returned, top)

    nodes, _, top = jax.lax.fori_loop(0, jnp.max(depth) - 1, climb, (nodes, level, level.returned))
    return nodes, top


def _at(x: jax.Array, *index: Any) -> jax.Array:
    """``x[index]`` for indices that are known to be inside."""
    return x.at[index].get(mode="promise_in_bounds")


def _set(x: jax.Array, *index: Any, value: jax.Array, unique: bool = True) -> jax.Array:
    """``x`` with ``value`` at ``index``; indices are inside, and no two are the same if ``unique``."""
    return x.at[index].set(value, mode="promise_in_bounds", unique_indices=unique)


def _expansion_keys(key: jax.Array, num_simulations: int) -> jax.Array:
    """The keys mctx gives to the recurrent function; ahead of the search, so that one that uses none costs none."""

    def split(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        key, _, expand = jax.random.split(key, 3)
        return key, expand

    return jax.lax.scan(split, key, length=num_simulations)[1]


def _prior(logits: jax.Array, dtype: Any) -> jax.Array:
    return jnp.maximum(jax.nn.softmax(logits), jnp.finfo(logits.dtype).tiny).astype(dtype)


def action_axis(actions: int) -> int:
    """The axis of actions in what a selection reads: 0 if they are few."""
    return 0 if actions <= _FEW else 1


def turned(x: jax.Array, axis: int) -> jax.Array:
    """[B, A] as a selection reads it, and back."""
    return x.T if axis == 0 else x


def _pick(x: jax.Array, action: jax.Array, axis: int) -> jax.Array:
    """The action's element [B] of what there is of every action."""
    return jnp.take_along_axis(x, jnp.expand_dims(action, axis), axis=axis, mode="promise_in_bounds").squeeze(axis)


def _one_hot(action: jax.Array, actions: int, axis: int) -> jax.Array:
    return jnp.expand_dims(action, axis) == jnp.expand_dims(jnp.arange(actions, dtype=jnp.int32), 1 - axis)


def _init(root: mctx.RootFnOutput, num_simulations: int) -> tuple[_Nodes, _Root]:
    batch, actions = root.prior_logits.shape
    count = batch * (num_simulations + 1)
    if count * actions >= 2**31:  # edges are counted in int32
        raise ValueError(f"{batch} roots, {num_simulations} simulations, {actions} actions: 2^31 edges or more; use fewer roots")
    dtype = jnp.promote_types(root.value.dtype, jnp.float32)  # averages in less are wrong

    def room(x: jax.Array) -> jax.Array:
        return jnp.zeros((count, *x.shape[1:]), x.dtype).at[:batch].set(x)

    nodes = _Nodes(
        ints=jnp.zeros((count, 4), jnp.int32),
        floats=jnp.zeros((count, 4), dtype),
        edges=jnp.zeros((count * actions, 2), dtype),
        prior=jnp.zeros((count, actions), dtype),
        prior_logits=jnp.zeros((count, actions), root.prior_logits.dtype),
        child=jnp.full((count, actions), UNVISITED, jnp.int32),
        embedding=jax.tree.map(room, root.embedding),
    )
    per_action = turned(root.prior_logits, action_axis(actions)).shape
    state = _Root(
        value=root.value.astype(dtype),
        child=jnp.full(per_action, UNVISITED, jnp.int32),
        child_visits=jnp.zeros(per_action, dtype),
        q=jnp.zeros(per_action, dtype),
    )
    return nodes, state


def _as_mctx(
    nodes: _Nodes, state: _Root, root: mctx.RootFnOutput, num_simulations: int, invalid_actions: Any, extra_data: Any
) -> mctx.Tree:
    """The tree in mctx's fields, [B, N, ...]. What nobody reads of it is never computed under jit."""
    batch, actions = root.prior_logits.shape
    axis = action_axis(actions)

    def whole(x: jax.Array, at_root: jax.Array | int) -> jax.Array:
        """[N B, ...] as [B, N, ...]."""
        return jnp.swapaxes(x.at[:batch].set(at_root).reshape((num_simulations + 1, batch, *x.shape[1:])), 0, 1)

    child = whole(nodes.child, turned(state.child, axis))
    value = whole(nodes.floats[:, _VALUE], state.value)
    child_visits = nodes.edges[:, _CHILD_VISITS].reshape(-1, actions)
    child_visits = whole(child_visits, turned(state.child_visits, axis)).astype(jnp.int32)
    below_root = whole(nodes.ints[:, _DEPTH], 0) > 0  # where there is a node at all
    parent, action = (jnp.where(below_root, whole(nodes.ints[:, i], 0), NO_PARENT) for i in (_PARENT, _ACTION))
    visits = jax.vmap(lambda of, n, a: of[n, a])(child_visits, parent, action)  # a node's are those of the edge to it

    def of_child(x: jax.Array) -> jax.Array:
        """What is known of the node that an edge leads to [B, N, A]; 0 where it leads nowhere."""
        found = jax.vmap(lambda node, index: node[jnp.maximum(index, 0)])(x, child)
        return jnp.where(child == UNVISITED, 0, found)

    return mctx.Tree(
        node_visits=jnp.where(below_root, visits, 0).at[:, ROOT].set(num_simulations + 1),
        raw_values=whole(nodes.floats[:, _RAW_VALUE], root.value.astype(value.dtype)),
        node_values=value,
        parents=parent,
        action_from_parent=action,
        children_index=child,
        children_prior_logits=whole(nodes.prior_logits, root.prior_logits),
        children_values=of_child(value),
        children_visits=child_visits,
        children_rewards=of_child(whole(nodes.floats[:, _REWARD], 0)),
        children_discounts=of_child(whole(nodes.floats[:, _DISCOUNT], 0)),
        embeddings=jax.tree.map(whole, nodes.embedding, root.embedding),
        root_invalid_actions=jnp.zeros_like(root.prior_logits) if invalid_actions is None else invalid_actions,
        extra_data=extra_data,
    )
