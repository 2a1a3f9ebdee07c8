"""Random models to search with, and what two searches must agree on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mctx
import numpy as np
import numpy_search

from muzerox.compilation import ONCE

Score = Callable[[numpy_search.Node], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A search problem: shapes, and what makes its trees deep, lopsided, two-sided or noisy."""

    batch: int = 8
    simulations: int = 16
    actions: int = 4
    seed: int = 0
    sharpness: float = 1.0  # of priors
    spread: float = 1.0  # of values
    discount: float = 0.97  # negative for two players
    noisy: bool = False  # the recurrent function uses its key
    masked: bool = False  # illegal actions, other ones in every element
    max_depth: int | None = None

    def random(self, dtype: Any) -> tuple[dict[str, jax.Array], mctx.RootFnOutput, jax.Array | None]:
        """Weights, root and mask."""
        rng = np.random.default_rng(self.seed)
        hidden = 6

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape), dtype)

        params = {
            "hidden": normal(hidden, hidden) * 0.8,
            "action": normal(self.actions, hidden),
            "prior": normal(hidden, self.actions) * self.sharpness,
            "value": normal(hidden) * self.spread,
            "reward": normal(hidden) * 0.3 * self.spread,
        }
        root = mctx.RootFnOutput(
            prior_logits=normal(self.batch, self.actions) * self.sharpness,
            value=normal(self.batch) * self.spread,
            embedding=normal(self.batch, hidden),
        )
        mask = None
        if self.masked:
            mask = rng.random((self.batch, self.actions)) < 0.4
            mask[np.arange(self.batch), rng.integers(0, self.actions, self.batch)] = False
        return params, root, None if mask is None else jnp.asarray(mask, jnp.int32)

    def recurrent(self, params: dict[str, jax.Array], key: jax.Array, action: jax.Array, hidden: jax.Array) -> tuple:
        """One step of the model."""
        hidden = jnp.tanh(hidden @ params["hidden"] + params["action"][action])
        value = hidden @ params["value"]
        if self.noisy:
            value = value + 0.3 * jax.random.normal(key, value.shape, value.dtype)
        output = mctx.RecurrentFnOutput(
            reward=hidden @ params["reward"],
            discount=jnp.full_like(value, self.discount),
            prior_logits=hidden @ params["prior"],
            value=value,
        )
        return output, hidden

    def run(self, policy: Any, dtype: Any = jnp.float32, **options: Any) -> mctx.PolicyOutput:
        """What ``policy`` answers."""
        # What matters here is decided before LLVM: its passes take nearly half of the time to compile.
        return jax.jit(self.search(policy, **options), compiler_options=ONCE)(*self.arguments(dtype))

    def arguments(self, dtype: Any = jnp.float32) -> tuple[Any, ...]:
        """What the function that :meth:`search` returns takes."""
        params, root, mask = self.random(dtype)
        return params, jax.random.key(self.seed), root, mask

    def search(self, policy: Any, **options: Any) -> Callable[..., mctx.PolicyOutput]:
        """``policy`` with this model and these simulations, not compiled yet."""
        limits = {"num_simulations": self.simulations, "max_depth": self.max_depth}
        search = functools.partial(policy, recurrent_fn=self.recurrent, **limits, **options)
        return lambda params, key, root, mask: search(params, key, root, invalid_actions=mask)


def renumbered(tree: mctx.Tree) -> mctx.Tree:
    """The tree with its nodes in depth-first order, by actions: two that differ in nothing but numbers become the same."""
    tree = jax.tree.map(np.asarray, tree)
    order, new = [], []
    for children in tree.children_index:
        there, waiting = [], [mctx.Tree.ROOT_INDEX]
        while waiting:
            there.append(waiting.pop())
            waiting += [child for child in children[there[-1]][::-1].tolist() if child != mctx.Tree.UNVISITED]
        there += sorted(set(range(len(children))) - set(there))  # rooms of simulations that ended at a node that was there
        order.append(np.array(there))
        new.append(np.argsort(there))

    def moved(x: np.ndarray) -> np.ndarray:
        return np.stack([of[at] for of, at in zip(x, order, strict=True)])

    def called(x: np.ndarray) -> np.ndarray:
        return np.stack([np.where(of >= 0, names[np.maximum(of, 0)], of) for of, names in zip(moved(x), new, strict=True)])

    kept = {"root_invalid_actions": tree.root_invalid_actions, "extra_data": tree.extra_data}
    numbers = {"children_index": called(tree.children_index), "parents": called(tree.parents)}
    return jax.tree.map(moved, tree.replace(**dict.fromkeys(kept))).replace(**numbers, **kept)


def differing(ours: mctx.PolicyOutput, theirs: mctx.PolicyOutput) -> np.ndarray:
    """bool [B]: the action, or a visit count of the root, is another."""
    visits = [np.asarray(output.search_tree.children_visits[:, 0]) for output in (ours, theirs)]
    return (np.asarray(ours.action) != np.asarray(theirs.action)) | (visits[0] != visits[1]).any(axis=-1)


def gap_where_they_part(ours: mctx.PolicyOutput, theirs: mctx.PolicyOutput, b: int, score_root: Score, score: Score) -> float:
    """By how much the scores of two searches differed when root ``b`` first chose another edge, in float64.

    The nodes both expanded alike are replayed in NumPy, and the scores of the node where their paths part taken there.
    Where no node was expanded differently, it is the final choice at the root that parts them.
    """
    trees = [jax.tree.map(lambda x: np.asarray(x[b]), output.search_tree) for output in (ours, theirs)]
    edges = [list(zip(tree.parents[1:].tolist(), tree.action_from_parent[1:].tolist(), strict=True)) for tree in trees]
    tree = trees[1]

    def node(index: int) -> numpy_search.Node:
        parent, action = tree.parents[index], tree.action_from_parent[index]
        edge = (tree.children_rewards[parent, action], tree.children_discounts[parent, action]) if index else (0.0, 1.0)
        reward, discount = (float(x) for x in edge)
        return numpy_search.Node(tree.children_prior_logits[index], float(tree.raw_values[index]), None, reward, discount)

    nodes, paths = [node(0)], [[0]]
    for index, (mine, other) in enumerate(zip(*edges, strict=True), start=1):
        if mine != other:
            ways = [[*zip(paths[p], [edges[0][n - 1][1] for n in paths[p][1:]] + [a], strict=True)] for p, a in (mine, other)]
            at = next(i for i, (x, y) in enumerate(zip(*ways, strict=False)) if x != y)
            where = nodes[ways[0][at][0]]
            scores = (score_root if at == 0 else score)(where)
            return abs(float(scores[ways[0][at][1]] - scores[ways[1][at][1]]))
        parent, action = mine
        nodes.append(node(index))
        paths.append([*paths[parent], index])
        numpy_search.expand([nodes[n] for n in paths[parent]], action, nodes[-1])
    scores = score_root(nodes[0])
    return abs(float(scores[int(ours.action[b])] - scores[int(theirs.action[b])]))


def assert_same_trees(ours: mctx.Tree, theirs: mctx.Tree, *, rtol: float) -> None:
    """Every field of two trees, node for node."""
    for field in dataclasses.fields(theirs):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.shape == y.shape, field.name
            assert x.dtype == y.dtype, field.name
            if np.issubdtype(np.asarray(y).dtype, np.integer):
                np.testing.assert_array_equal(x, y, err_msg=field.name)
            else:
                np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol, err_msg=field.name)
