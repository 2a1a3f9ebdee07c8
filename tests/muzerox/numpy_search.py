"""Tree search for one root in plain NumPy, a node a dictionary: written from the papers, for tests to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# (action, embedding) -> reward, discount, prior logits, value, embedding
Model = Callable[[int, Any], tuple[float, float, np.ndarray, float, Any]]


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


class Node:
    """A state, what was found below it, and how it was reached."""

    def __init__(self, prior: np.ndarray, value: float, embedding: Any, reward: float = 0.0, discount: float = 1.0):
        self.prior, self.raw, self.embedding, self.reward, self.discount = (
            np.asarray(prior, float),
            value,
            embedding,
            reward,
            discount,
        )
        self.children: dict[int, Node] = {}
        self.returns = [value]  # its own value, and every return that was backed up through it

    @property
    def value(self) -> float:
        return float(np.mean(self.returns))

    @property
    def visits(self) -> np.ndarray:
        return np.array([len(self.children[a].returns) if a in self.children else 0 for a in range(len(self.prior))])

    @property
    def q(self) -> np.ndarray:
        found = [self.children.get(a) for a in range(len(self.prior))]
        return np.array([0.0 if child is None else child.reward + child.discount * child.value for child in found])


def completed_q(node: Node, value_scale: float = 0.1, maxvisit_init: float = 50.0) -> np.ndarray:
    """Q of visited actions, the mixed value of the others, scaled: appendix D of Danihelka et al."""
    visits, q, seen = node.visits, node.q, node.visits > 0
    probs = _softmax(node.prior)
    weighted = np.sum(probs[seen] * q[seen]) / np.sum(probs[seen]) if seen.any() else 0.0
    mixed = (node.raw + visits.sum() * weighted) / (visits.sum() + 1)
    q = np.where(seen, q, mixed)
    q = (q - q.min()) / max(q.max() - q.min(), 1e-8)
    return (maxvisit_init + visits.max()) * value_scale * q


def gumbel_interior(node: Node, qtransform: Callable[[Node], np.ndarray] = completed_q) -> np.ndarray:
    """Scores of actions: section 5 of Danihelka et al."""
    return _softmax(node.prior + qtransform(node)) - node.visits / (1 + node.visits.sum())


def puct(node: Node, pb_c_init: float = 1.25, pb_c_base: float = 19652.0) -> np.ndarray:
    """Scores of actions: appendix B of Schrittwieser et al., without noise."""
    total, visits, q = len(node.returns), node.visits, node.q
    known = np.where(visits > 0, q, node.value)
    low, high = min(node.value, known.min()), max(node.value, known.max())
    normalized = (np.where(visits > 0, q, low) - low) / max(high - low, 1e-8)
    weight = pb_c_init + math.log((total + pb_c_base + 1) / pb_c_base)
    return normalized + math.sqrt(total) * weight * _softmax(node.prior) / (visits + 1)


def halving_visits(considered: int, simulations: int) -> list[int]:
    """How often each visited action of the root was visited before, simulation by simulation: sequential halving."""
    if considered <= 1:
        return list(range(simulations))
    phases, sequence, visits, left = math.ceil(math.log2(considered)), [], [0] * considered, considered
    while len(sequence) < simulations:
        for _ in range(max(1, simulations // (phases * left))):
            sequence += visits[:left]
            visits[:left] = [v + 1 for v in visits[:left]]
        left = max(2, left // 2)
    return sequence[:simulations]


def gumbel_root(gumbel: np.ndarray, considered: int, simulations: int) -> Callable[[Node], np.ndarray]:
    """Scores of the root's actions: sequential halving among those of highest gumbel + logits; at the end, the most visited."""
    wanted = halving_visits(min(considered, len(gumbel)), simulations)

    def score(node: Node) -> np.ndarray:
        visits, total = node.visits, int(node.visits.sum())
        among = visits == (wanted[total] if total < simulations else visits.max())
        return np.where(among, gumbel + node.prior - node.prior.max() + completed_q(node), -np.inf)

    return score


def expand(path: list[Node], action: int, leaf: Node) -> None:
    """Puts ``leaf`` below the last node of ``path`` (from the root), and backs its value up."""
    path[-1].children[action] = leaf
    returned, node = leaf.raw, leaf
    for parent in reversed(path):
        returned = node.reward + node.discount * returned
        parent.returns.append(returned)
        node = parent


def search(
    root: Node, model: Model, score_root: Callable[[Node], np.ndarray], score: Callable[[Node], np.ndarray], simulations: int
) -> Node:
    """Grows ``root`` by so many expansions."""
    for _ in range(simulations):
        path, action = [root], int(np.argmax(score_root(root)))
        while action in path[-1].children:
            path.append(path[-1].children[action])
            action = int(np.argmax(score(path[-1])))
        reward, discount, prior, value, embedding = model(action, path[-1].embedding)
        expand(path, action, Node(prior, value, embedding, reward, discount))
    return root
