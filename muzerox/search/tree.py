"""How the trees of a batch lie in memory, while they grow, and as an ``mctx.Tree`` afterwards.

Nodes of the same number lie side by side: what all trees expand at once is one slice. Statistics of an edge are those of the node
it leads to; only visits and Q of children are kept twice, side by side, so that a selection reads them at once. The rest of an
``mctx.Tree`` is put together at the end, and only if somebody reads it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mctx
import numpy as np
from flax import struct

from muzerox.errors import ConfigError

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


# With up to so many actions a reduction over them is one over trees side by side, which vectorises, and the transposition
# is the cheaper of the two.
_FEW = 32

# What is gathered and scattered together lies together.
END, PARENT, ACTION, DEPTH = range(4)  # end: the edge n A + a where a descent from here ends
VALUE, RAW_VALUE, REWARD, DISCOUNT = range(4)  # reward and discount are of the step that led here
Q, CHILD_VISITS = range(2)


class Nodes(NamedTuple):
    """Nodes of all trees: tree b's node n is at n B + b, its edges from (n B + b) A on. The root's own are in ``Root``."""

    ints: jax.Array  # [N B, 4] int32
    floats: jax.Array  # [N B, 4]
    edges: jax.Array  # [N B A, 2] Q and visits
    prior: jax.Array  # [N B, A]
    prior_logits: jax.Array  # [N B, A]
    child: jax.Array  # [N B, A] int32, node of the same tree
    embedding: Any  # [N B, ...]


class Root(NamedTuple):
    """What changes at the root: every simulation passes it, so nothing of it needs gathering."""

    value: jax.Array  # [B]
    child: jax.Array  # [B|A] int32
    child_visits: jax.Array  # [B|A]
    q: jax.Array  # [B|A]


def get_at(x: jax.Array, *index: Any) -> jax.Array:
    """``x[index]`` for indices that are known to be inside."""
    return x.at[index].get(mode="promise_in_bounds")


def set_at(x: jax.Array, *index: Any, value: jax.Array, unique: bool = True) -> jax.Array:
    """``x`` with ``value`` at ``index``; indices are inside, and no two are the same if ``unique``."""
    return x.at[index].set(value, mode="promise_in_bounds", unique_indices=unique)


def prior_of(logits: jax.Array, dtype: Any) -> jax.Array:
    """The softmax of logits [B, A], nowhere 0."""
    return jnp.maximum(jax.nn.softmax(logits), jnp.finfo(logits.dtype).tiny).astype(dtype)


def action_axis(actions: int) -> int:
    """The axis of actions in what a selection reads: 0 if they are few."""
    return 0 if actions <= _FEW else 1


def turned(x: jax.Array, axis: int) -> jax.Array:
    """[B, A] as a selection reads it, and back."""
    return x.T if axis == 0 else x


# A reduction is an operation of its own to XLA. Over so few actions of so few trees it is written out: part of whatever reads
# it, so that there are fewer operations. Of more trees the operations weigh more than their number: PUCT of 256 roots with 2
# actions took a tenth longer.
_WRITTEN_OUT = 4
_WRITTEN_OUT_SIZE = 64


def written_out(x: jax.Array, axis: int) -> bool:
    """Whether a reduction along the axis of actions is best written out."""
    return x.shape[axis] <= _WRITTEN_OUT and x.size <= _WRITTEN_OUT_SIZE


def each(x: jax.Array, axis: int) -> list[jax.Array]:
    """Of every action what there is of it, without the axis of actions."""
    return [jax.lax.index_in_dim(x, action, axis, keepdims=False) for action in range(x.shape[axis])]


def total(x: jax.Array, axis: int) -> jax.Array:
    """The sum along the axis of actions."""
    return functools.reduce(jnp.add, each(x, axis)) if written_out(x, axis) else jnp.sum(x, axis=axis, dtype=x.dtype)


def most(x: jax.Array, axis: int) -> jax.Array:
    """The most along the axis of actions. With :func:`largest` instead, XLA 0.10.2 crashes compiling some programs."""
    return largest(x, axis) if written_out(x, axis) else jnp.max(x, axis=axis)


# XLA gives the reductions it knows to a library on CPUs, which works a row at a time: dear where rows are short, or where
# the result is spread over the row again. Written as a comparison, a reduction stays in XLA's own loops.
_SHORT = 20


def largest(x: jax.Array, axis: int) -> jax.Array:
    """The largest along an axis [B]."""
    if written_out(x, axis):
        return functools.reduce(lambda a, b: jnp.where(a > b, a, b), each(x, axis))
    return jax.lax.reduce(x, np.array(-np.inf, x.dtype), lambda a, b: jnp.where(a > b, a, b), (axis,))


def extremes(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest along an axis [B]."""
    if x.shape[axis] <= _SHORT:
        return -largest(-x, axis), largest(x, axis)
    return jnp.min(x, axis=axis), jnp.max(x, axis=axis)


def one_hot(action: Any, actions: int, axis: int) -> Any:
    """Bool [..., B|A], true at the action [..., B]; in NumPy where that is NumPy's."""
    of_one = (actions, 1) if axis == 0 else (1, actions)
    numbers = np.arange(actions, dtype=np.int32).reshape((1,) * (action.ndim - 1) + of_one)
    return (action[..., None, :] if axis == 0 else action[..., None]) == numbers


def check_room(roots: int, num_simulations: int, actions: int) -> None:
    """Raises ConfigError when so many trees have 2^31 edges or more, which are counted in int32."""
    most = (2**31 - 1) // (roots * actions) - 1
    if num_simulations > most:
        rule = f"{roots} roots of {actions} actions make trees of 2^31 edges or more; search fewer at a time"
        raise ConfigError("search.num_simulations", num_simulations, rule, most if most > 0 else None)


def init(root: mctx.RootFnOutput, num_simulations: int) -> tuple[Nodes, Root]:
    """Trees that are roots alone, with room for a node a simulation. Raises ConfigError as :func:`check_room`."""
    batch, actions = root.prior_logits.shape
    check_room(batch, num_simulations, actions)
    count = batch * (num_simulations + 1)
    dtype = jnp.promote_types(root.value.dtype, jnp.float32)  # averages in less are wrong

    def room(x: jax.Array) -> jax.Array:
        return jnp.zeros((count, *x.shape[1:]), x.dtype).at[:batch].set(x)

    nodes = Nodes(
        ints=jnp.zeros((count, 4), jnp.int32),
        floats=jnp.zeros((count, 4), dtype),
        edges=jnp.zeros((count * actions, 2), dtype),
        prior=jnp.zeros((count, actions), dtype),
        prior_logits=jnp.zeros((count, actions), root.prior_logits.dtype),
        child=jnp.full((count, actions), UNVISITED, jnp.int32),
        embedding=jax.tree.map(room, root.embedding),
    )
    per_action = turned(root.prior_logits, action_axis(actions)).shape
    state = Root(
        value=root.value.astype(dtype),
        child=jnp.full(per_action, UNVISITED, jnp.int32),
        child_visits=jnp.zeros(per_action, dtype),
        q=jnp.zeros(per_action, dtype),
    )
    return nodes, state


def as_mctx(
    nodes: Nodes, state: Root, root: mctx.RootFnOutput, num_simulations: int, invalid_actions: Any, extra_data: Any
) -> mctx.Tree:
    """The tree in mctx's fields, [B, N, ...]. What nobody reads of it is never computed under jit."""
    batch, actions = root.prior_logits.shape
    axis = action_axis(actions)

    def whole(x: jax.Array, at_root: jax.Array | int) -> jax.Array:
        """[N B, ...] as [B, N, ...]."""
        return jnp.swapaxes(x.at[:batch].set(at_root).reshape((num_simulations + 1, batch, *x.shape[1:])), 0, 1)

    child = whole(nodes.child, turned(state.child, axis))
    value = whole(nodes.floats[:, VALUE], state.value)
    child_visits = nodes.edges[:, CHILD_VISITS].reshape(-1, actions)
    child_visits = whole(child_visits, turned(state.child_visits, axis)).astype(jnp.int32)
    below_root = whole(nodes.ints[:, DEPTH], 0) > 0  # where there is a node at all
    parent, action = (jnp.where(below_root, whole(nodes.ints[:, i], 0), NO_PARENT) for i in (PARENT, ACTION))
    visits = jax.vmap(lambda of, n, a: of[n, a])(child_visits, parent, action)  # a node's are those of the edge to it

    def of_child(x: jax.Array) -> jax.Array:
        """What is known of the node that an edge leads to [B, N, A]; 0 where it leads nowhere."""
        found = jax.vmap(lambda node, index: node[jnp.maximum(index, 0)])(x, child)
        return jnp.where(child == UNVISITED, 0, found)

    return mctx.Tree(
        node_visits=jnp.where(below_root, visits, 0).at[:, ROOT].set(num_simulations + 1),
        raw_values=whole(nodes.floats[:, RAW_VALUE], root.value.astype(value.dtype)),
        node_values=value,
        parents=parent,
        action_from_parent=action,
        children_index=child,
        children_prior_logits=whole(nodes.prior_logits, root.prior_logits),
        children_values=of_child(value),
        children_visits=child_visits,
        children_rewards=of_child(whole(nodes.floats[:, REWARD], 0)),
        children_discounts=of_child(whole(nodes.floats[:, DISCOUNT], 0)),
        embeddings=jax.tree.map(whole, nodes.embedding, root.embedding),
        root_invalid_actions=jnp.zeros_like(root.prior_logits) if invalid_actions is None else invalid_actions,
        extra_data=extra_data,
    )
