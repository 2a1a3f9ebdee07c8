"""A heterogeneous graph attention network over the training program's graph.

Each type of node and of edge has a projection of its own into one hidden space; nodes then attend to their neighbours with
several heads, edge features in scores and messages alike; all nodes and all edges are averaged into a global node feature and
a global edge feature, and the output is linear in both. After the heterogeneous graph transformer (Hu et al.,
arXiv:2003.01332) and graph attention networks (Velickovic et al., arXiv:1710.10903), on jraph's segment operations.
Parameters are a plain dictionary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from predictor.graph import EDGE_TYPES, EDGE_WIDTH, NODE_TYPES, NODE_WIDTH, Rows

Network = dict[str, Any]

NUM_HEADS = 4


def init(key: jax.Array, *, width: int = 32, num_layers: int = 2) -> Network:
    """Parameters whose output is exactly 0: the last linear function starts at zero.

    ``width`` must be a multiple of ``NUM_HEADS``.
    """
    if width % NUM_HEADS:
        raise ValueError(f"width = {width}: must be a multiple of {NUM_HEADS}")

    def matrix(index: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, index), shape) / np.sqrt(shape[-2])

    layers = [
        {
            "node": matrix(3 * i + 2, width, 5 * width),  # query, bias of edges received; key, value, bias of edges sent
            "edge": matrix(3 * i + 3, width, 3 * width),  # in the key, in the value, of the edge itself
            "out": matrix(3 * i + 4, width, width),
        }
        for i in range(num_layers)
    ]
    return {
        "node_in": matrix(0, len(NODE_TYPES), NODE_WIDTH + 1, width),  # the last row of each is a bias
        "edge_in": matrix(1, len(EDGE_TYPES), EDGE_WIDTH + 1, width),
        "layers": layers,
        "node_out": jnp.zeros(width),
        "edge_out": jnp.zeros(width),
        "bias": jnp.zeros(()),
    }


def pool(network: Network, graph: jraph.GraphsTuple) -> jax.Array:
    """Global node features and global edge features of C candidates, one above the other: float32 [2 D, C]."""
    nodes, edges = _project_by_type(graph.nodes, network["node_in"]), _project_by_type(graph.edges, network["edge_in"])
    for number, layer in enumerate(network["layers"]):
        if number == 0:  # still linear in the features, of which there are fewer
            given = _project_by_type(graph.edges, network["edge_in"] @ layer["edge"])
        else:
            given = _project(edges, layer["edge"][None])
        nodes, edges = _attend(layer, nodes, edges, given, graph.senders, graph.receivers)
    return jnp.concatenate([_sum(nodes, 0) / nodes.shape[0], _sum(edges, 0) / edges.shape[0]])


def apply(network: Network, graph: jraph.GraphsTuple) -> jax.Array:
    """The linear function of the global features of C candidates: float32 [C]."""
    return jnp.concatenate([network["node_out"], network["edge_out"]]) @ pool(network, graph) + network["bias"]


def of_what_is_read(updates: Network, network: Network) -> Network:
    """Updates without those of weights of exactly 0 in the input projections: features that are not read stay so.

    As a number that never varied in training would otherwise be learnt as one more bias, and surprise where it does vary.
    """
    read = {name: jnp.where(network[name] == 0.0, 0.0, updates[name]) for name in ("node_in", "edge_in")}
    return {**updates, **read}


def _attend(
    layer: Network, nodes: jax.Array, edges: jax.Array, given: jax.Array, senders: jax.Array, receivers: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One layer: nodes [N, D, C] attend to the nodes that send to them, edges [E, D, C] are updated from both ends.

    ``given`` [E, 3 D, C] is what edges add to keys, to values and to themselves.
    """
    count, width = nodes.shape[:2]
    projected = _product(nodes, layer["node"])
    query, received, key, value, sent = _split(projected, 5)
    query, received, key, value, sent = query[receivers], received[receivers], key[senders], value[senders], sent[senders]
    edge_key, edge_value, edge_own = _split(given, 3)

    scores = _sum(_heads(query * (key + edge_key)), 2) / np.sqrt(width // NUM_HEADS)  # [E, H, C]
    largest = jax.lax.stop_gradient(jraph.segment_max(scores, receivers, count))  # it cancels out
    raised = jnp.exp(scores - largest[receivers])
    messages = _heads(value + edge_value) * raised[:, :, None]
    # Softmax: sums of messages over sums of weights. A node that receives nothing attends to nothing.
    weights = jraph.segment_sum(raised, receivers, count)[:, :, None]
    attended = jraph.segment_sum(messages, receivers, count) / jnp.maximum(weights, 1e-30)

    nodes = _normalise(nodes + jax.nn.relu(_product(attended.reshape(nodes.shape), layer["out"])))
    edges = _normalise(edges + jax.nn.relu(edge_own + sent + received))
    return nodes, edges


# Candidates are side by side in memory, and sums over features are short. Written out term by term, they are compiled into
# the loops around them and stay in registers; as XLA's sums and products each would be a call, with a result in memory. What
# XLA derives from terms is slow: gradients are given as sums and products.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(x: jax.Array, axis: int) -> jax.Array:
    return functools.reduce(jnp.add, (jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])))


_sum.defvjp(
    lambda x, axis: (_sum(x, axis), x),
    lambda axis, x, slope: (jnp.broadcast_to(jnp.expand_dims(slope, axis), x.shape),),
)


@jax.custom_vjp
def _project(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """[n, F, C] by [n, F, D], row by row, or all by [1, F, D]: [n, D, C]."""
    return functools.reduce(jnp.add, (matrix[:, i, :, None] * x[:, i, None, :] for i in range(x.shape[1])))


def _project_gradient(given: tuple[jax.Array, jax.Array], slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, matrix = given
    own = jnp.broadcast_to(matrix, (x.shape[0], *matrix.shape[1:]))
    by_row = jnp.einsum("nfc,ndc->nfd", x, slope)
    return jnp.einsum("nfd,ndc->nfc", own, slope), by_row if len(matrix) == len(x) else jnp.sum(by_row, axis=0, keepdims=True)


_project.defvjp(lambda x, matrix: (_project(x, matrix), (x, matrix)), _project_gradient)


def _project_by_type(rows: Rows, matrices: jax.Array) -> jax.Array:
    """[n, F, C] features by the matrix of each row's type, of [types, F + 1, D]: [n, D, C]."""
    own = matrices[rows.kind]
    return _project(rows.features, own[:, :-1]) + own[:, -1, :, None]


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """[n, F, C] by [F, D]: [n, D, C]. Of nodes: inside the loop that gathers it, it would be computed anew for every edge."""
    return jnp.einsum("ndf,nfc->ndc", jnp.broadcast_to(matrix.T, (x.shape[0], *matrix.T.shape)), x)


def _heads(x: jax.Array) -> jax.Array:
    """[n, D, C] -> [n, H, D / H, C]."""
    return x.reshape(x.shape[0], NUM_HEADS, -1, x.shape[2])


def _split(x: jax.Array, parts: int) -> list[jax.Array]:
    return jnp.split(x, parts, axis=1)


def _normalise(x: jax.Array) -> jax.Array:
    """By the root mean square of each row's features."""
    return x * jax.lax.rsqrt(_sum(jnp.square(x), 1)[:, None] / x.shape[1] + 1e-6)
