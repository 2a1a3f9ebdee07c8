"""The search loop: one tree an element of the batch, all grown in step, in O(B A) a level.

mctx (DeepMind) is the reference for every number here. What makes the same answers cheaper, beside how trees lie
in memory (:mod:`muzerox.search.tree`):

- What a node would select changes only when a backup passes through it. So the backup, which has the node's statistics at
  hand, also notes where a descent from that node would end; the next descent is one lookup below the root.
- A level of the backup touches one node of every tree. Its loop is one over the batch, as long as the deepest leaf is deep;
  a tree that has come to its root goes on in a place that nobody reads. A condition of each tree's own would make XLA select
  over whole trees, once a level.
- Simulations that leave the root by different edges meet nowhere below it. Where it is known beforehand that several edges come
  next (a round of sequential halving), they go side by side, as one simulation of so many trees more: lanes. Networks see a batch
  as many times as large, as many times less often.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import numpy as np

from muzerox.search import tree
from muzerox.search.tree import (
    ACTION,
    CHILD_VISITS,
    DEPTH,
    DISCOUNT,
    END,
    PARENT,
    RAW_VALUE,
    REWARD,
    UNVISITED,
    VALUE,
    Node,
    Nodes,
    Q,
    Root,
    action_axis,
    get_at,
    most,
    one_hot,
    prior_of,
    set_at,
    total,
    turned,
)

Select = Callable[[Node], jax.Array]  # the action [B] int32
SelectRoot = Callable[[Node, int], Any]  # so many different actions [W, B] int32; in NumPy where they are known beforehand


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
      ConfigError: the trees have 2^31 edges or more.
    """
    batch, actions = root.prior_logits.shape
    num_simulations = sum(rounds)
    limit = num_simulations if max_depth is None else max_depth
    cut = limit < num_simulations  # whether a descent may end at a node that is there already
    axis = action_axis(actions)
    nodes, root_state = tree.init(root, num_simulations)
    keys = _expansion_keys(key, num_simulations)
    dtype = root_state.value.dtype
    root_logits, root_prior = turned(root.prior_logits, axis), turned(prior_of(root.prior_logits, dtype), axis)
    zero = np.zeros(batch, np.int32)

    def root_node(state: Root, visits: jax.Array) -> Node:
        return Node(
            number=jnp.asarray(zero),
            depth=jnp.asarray(zero),
            visits=zero + visits,
            value=state.value,
            raw_value=root.value.astype(dtype),
            prior_logits=root_logits,
            prior=root_prior,
            seen_prior=total(jnp.where(state.child_visits > 0, root_prior, 0.0), axis),
            most_visits=most(state.child_visits, axis).astype(jnp.int32),
            child_visits=state.child_visits,
            q=state.q,
            axis=axis,
        )

    def simulate(sim: jax.Array, carry: tuple[Nodes, Root], width: int) -> tuple[Nodes, Root]:
        nodes, state = carry
        new = jnp.asarray(sim, jnp.int32) + 1  # the number of the first lane's node, and the root's visits
        lanes = width * batch  # lane w B + b is of tree b
        # What is known beforehand is NumPy's: a constant of the program, and no operation of it.
        lane = np.arange(lanes, dtype=np.int32)
        trees = lane % batch
        none = np.zeros(lanes, np.int32)

        # Descend.
        root_action = select_root(root_node(state, new), width)  # [W, B]
        here = one_hot(root_action, actions, axis)  # [W, B|A]
        child = total(jnp.where(here, state.child[None], 0), axis + 1).reshape(lanes)
        stops = (child == UNVISITED) | (limit <= 1)
        end = jnp.where(stops, root_action.reshape(lanes), get_at(nodes.ints, jnp.maximum(child, 0) * batch + trees, END))
        parent, action = jax.lax.div(end, jnp.int32(actions)), jax.lax.rem(end, jnp.int32(actions))
        at_parent = parent * batch + trees
        leaf = lane // batch + new
        if cut:
            seen = jnp.where(stops, child, get_at(nodes.child, at_parent, action))
            leaf = jnp.where(seen == UNVISITED, leaf, seen)

        at_leaf = leaf * batch + trees

        # Expand.
        step, embedding = recurrent_fn(params, keys[sim], action, jax.tree.map(lambda x: get_at(x, at_parent), nodes.embedding))
        logits, value = step.prior_logits.astype(nodes.prior_logits.dtype), step.value.astype(dtype)
        prior = prior_of(logits, dtype)
        nothing = jnp.zeros_like(turned(prior, axis))
        fresh = Node(
            number=leaf,
            depth=get_at(nodes.ints, at_parent, DEPTH) + 1,
            visits=jnp.asarray(none + 1),
            value=value,
            raw_value=value,
            prior_logits=turned(logits, axis),
            prior=turned(prior, axis),
            seen_prior=jnp.zeros(lanes, dtype),
            most_visits=jnp.asarray(none),
            child_visits=nothing,
            q=nothing,
            axis=axis,
        )
        reward, discount = step.reward.astype(dtype), step.discount.astype(dtype)
        ints = jnp.stack((leaf * actions + select(fresh), parent, action, fresh.depth), axis=1)
        floats = jnp.stack((value, value, reward, discount), axis=1)

        def write(x: jax.Array, y: jax.Array) -> jax.Array:
            y = y.astype(x.dtype)
            return set_at(x, at_leaf, value=y) if cut else jax.lax.dynamic_update_slice_in_dim(x, y, new * batch, axis=0)

        nodes = Nodes(
            ints=write(nodes.ints, ints),
            floats=write(nodes.floats, floats),
            edges=nodes.edges,
            prior=write(nodes.prior, prior),
            prior_logits=write(nodes.prior_logits, logits),
            child=set_at(nodes.child, at_parent, action, value=leaf),
            embedding=jax.tree.map(write, nodes.embedding, embedding),
        )

        # Back up: below the root level by level, then the root, where all trees arrive.
        level = _Level(value, value, ints, floats)
        nodes, returned = _backup(nodes, trees, level, fresh.depth, select, limit=limit, batch=batch)
        number = jnp.where(stops, leaf, child)
        top = get_at(nodes.floats, number * batch + trees)
        returned = top[:, REWARD] + top[:, DISCOUNT] * returned
        q = top[:, REWARD] + top[:, DISCOUNT] * top[:, VALUE]

        def at_root(old: jax.Array, lane: jax.Array) -> jax.Array:
            """What every lane has [L], at its action."""
            lane = jnp.expand_dims(lane.reshape(width, batch), axis + 1)
            return jnp.where(here.any(0), jnp.sum(jnp.where(here, lane, 0), axis=0, dtype=old.dtype), old)

        state = Root(
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
    grown = tree.as_mctx(nodes, root_state, root, num_simulations, invalid_actions, extra_data)
    return grown, root_node(root_state, jnp.int32(num_simulations + 1))


class _Level(NamedTuple):
    """How far the backup of every lane has come: the node that was brought up to date last, [L]."""

    value: jax.Array  # of the node
    returned: jax.Array  # what is backed up from it
    ints: jax.Array  # [L, 4] of the node, and
    floats: jax.Array  # [L, 4]: whole rows, as slices would be operations of every level


def _backup(
    nodes: Nodes, trees: np.ndarray, level: _Level, depth: jax.Array, select: Select, *, limit: int, batch: int
) -> tuple[Nodes, jax.Array]:
    """Brings the nodes between a leaf and the root up to date, and says what is backed up from the root's children [L].

    ``depth`` [L] is the leaf's. A lane that has come to its root goes on updating the root's place, which nobody reads.
    """
    lanes, actions = trees.shape[0], nodes.child.shape[1]
    axis, alone = action_axis(actions), lanes == batch  # in its tree: lanes that have arrived write to one place

    def climb(height: jax.Array, carry: tuple[Nodes, _Level, jax.Array]) -> tuple[Nodes, _Level, jax.Array]:
        nodes, level, top = carry
        parent, action = level.ints[:, PARENT], level.ints[:, ACTION]
        at = parent * batch + trees
        ints, floats, prior = get_at(nodes.ints, at), get_at(nodes.floats, at), turned(get_at(nodes.prior, at), axis)
        edges = get_at(nodes.edges.reshape(-1, 2 * actions), at).reshape(lanes, actions, 2)
        old_q, old_visits = turned(edges[..., Q], axis), turned(edges[..., CHILD_VISITS], axis)
        reward, discount = level.floats[:, REWARD], level.floats[:, DISCOUNT]
        returned, q = reward + discount * level.returned, reward + discount * level.value
        here = one_hot(action, actions, axis)
        # Every value that is written depends on all that was read there before: without that, XLA copies whole trees first.
        times = total(jnp.where(here, old_visits, 0.0), axis) + 1.0
        child_visits = old_visits + here
        visits = total(child_visits, axis)
        node = Node(
            number=parent,
            depth=ints[:, DEPTH],
            visits=visits.astype(jnp.int32) + 1,
            value=(floats[:, VALUE] * visits + returned) / (visits + 1.0),
            raw_value=floats[:, RAW_VALUE],
            prior_logits=turned(get_at(nodes.prior_logits, at), axis),
            prior=prior,
            seen_prior=total(jnp.where(child_visits > 0, prior, 0.0), axis),
            most_visits=most(child_visits, axis).astype(jnp.int32),
            child_visits=child_visits,
            q=jnp.where(here, jnp.expand_dims(q, axis), old_q),
            axis=axis,
        )
        best = select(node)
        child = get_at(nodes.child, at, best)
        stops = (child == UNVISITED) | (node.depth + 1 >= limit)
        end = jnp.where(stops, parent * actions + best, get_at(nodes.ints, jnp.maximum(child, 0) * batch + trees, END))
        nodes = nodes._replace(
            ints=set_at(nodes.ints, at, END, value=end, unique=alone),
            floats=set_at(nodes.floats, at, VALUE, value=node.value, unique=alone),
            edges=set_at(nodes.edges, at * actions + action, value=jnp.stack([q, times], axis=1), unique=alone),
        )
        above = _Level(node.value, returned, ints, floats)
        return nodes, above, jnp.where(height < depth - 1, returned, top)

    nodes, _, top = jax.lax.fori_loop(0, jnp.max(depth) - 1, climb, (nodes, level, level.returned))
    return nodes, top


def _expansion_keys(key: jax.Array, num_simulations: int) -> jax.Array:
    """The keys mctx gives to the recurrent function; ahead of the search, so that one that uses none costs none."""

    def split(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        key, _, expand = jax.random.split(key, 3)
        return key, expand

    return jax.lax.scan(split, key, length=num_simulations)[1]
