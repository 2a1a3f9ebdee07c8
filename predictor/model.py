"""A heterogeneous graph attention network over the training program's graph.

Each type of node and of edge has a projection of its own into one hidden space; nodes then attend to their neighbours with
several heads, edge features in scores and messages alike; all nodes and all edges are averaged into a global node feature and
a global edge feature, and the output is linear in both. After the heterogeneous graph transformer (Hu et al.,
arXiv:2003.01332) and graph attention networks (Velickovic et al., arXiv:1710.10903), on jraph's segment operations.
Parameters are a plain dictionary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from predictor.graph import EDGE_TYPES, EDGE_WIDTH, NODE_TYPES, NODE_WIDTH

Network = dict[str, Any]

NUM_HEADS = 4


def init(key: jax.Array, *, width: int = 32, num_layers: int = 2) -> Network:
    """Parameters whose output is exactly 0: the last linear function starts at zero.

    ``width`` must be a multiple of ``NUM_HEADS``.
    """
    if width % NUM_HEADS:
        raise ValueError(f"width = {width}: must be a multiple of {NUM_HEADS}")

    def matrix(index: int, inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, index), (inputs, outputs)) / np.sqrt(inputs)

    # A type has WIDTH features and a bias of its own; the columns of the other types are zeros and do not count.
    node_scale, edge_scale = np.sqrt(len(NODE_TYPES)), np.sqrt(len(EDGE_TYPES))
    layers = [
        {
            "node": matrix(3 * i + 2, width, 5 * width),  # query, bias of edges received; key, value, bias of edges sent
            "edge": matrix(3 * i + 3, width, 3 * width),  # in the key, in the value, of the edge itself
            "out": matrix(3 * i + 4, width, width),
        }
        for i in range(num_layers)
    ]
    return {
        "node_in": matrix(0, len(NODE_TYPES) * (NODE_WIDTH + 1), width) * node_scale,
        "edge_in": matrix(1, len(EDGE_TYPES) * (EDGE_WIDTH + 1), width) * edge_scale,
        "layers": layers,
        "node_out": jnp.zeros(width),
        "edge_out": jnp.zeros(width),
        "bias": jnp.zeros(()),
    }


def pool(network: Network, graph: jraph.GraphsTuple) -> jax.Array:
    """Global node features and global edge features of each of C graphs, side by side: float32 [C, 2 D]."""
    nodes, edges = graph.nodes @ network["node_in"], graph.edges @ network["edge_in"]
    for layer in network["layers"]:
        nodes, edges = _attend(layer, nodes, edges, graph.senders, graph.receivers)
    return jnp.concatenate([_mean(nodes, graph.n_node), _mean(edges, graph.n_edge)], axis=1)


def apply(network: Network, graph: jraph.GraphsTuple) -> jax.Array:
    """The linear function of the global features of each of C graphs: float32 [C]."""
    return pool(network, graph) @ jnp.concatenate([network["node_out"], network["edge_out"]]) + network["bias"]


def _attend(
    layer: Network, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One layer: nodes [N, D] attend to the nodes that send to them, edges [E, D] are updated from both ends."""
    width = nodes.shape[1]
    # One product for all that nodes give, and one gather at each end: both are bound by memory, not arithmetic.
    projected = nodes @ layer["node"]
    query, received = _split(projected[:, : 2 * width][receivers], 2)
    key, value, sent = _split(projected[:, 2 * width :][senders], 3)
    edge_key, edge_value, edge_own = _split(edges @ layer["edge"], 3)

    heads = _head_sums(width)
    scores = ((query * (key + edge_key)) @ heads) / np.sqrt(width // NUM_HEADS)  # [E, H]
    weights = jraph.segment_softmax(scores, receivers, nodes.shape[0])
    messages = (value + edge_value) * (weights @ heads.T)
    attended = jraph.segment_sum(messages, receivers, nodes.shape[0])

    nodes = _normalise(nodes + jax.nn.relu(attended @ layer["out"]))
    edges = _normalise(edges + jax.nn.relu(edge_own + sent + received))
    return nodes, edges


def _head_sums(width: int) -> np.ndarray:
    """[D, H] of ones that sums the features of each head; a product with it is faster than a sum over a short axis."""
    return np.kron(np.eye(NUM_HEADS, dtype=np.float32), np.ones((width // NUM_HEADS, 1), np.float32))


def _split(x: jax.Array, parts: int) -> list[jax.Array]:
    return jnp.split(x, parts, axis=-1)


def _normalise(x: jax.Array) -> jax.Array:
    """By the root mean square of each row."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def _mean(x: jax.Array, counts: jax.Array) -> jax.Array:
    """Mean over the rows of each graph: [sum(counts), D] -> [C, D]."""
    graphs = counts.shape[0]
    owner = jnp.repeat(jnp.arange(graphs), counts, total_repeat_length=x.shape[0])
    return jraph.segment_sum(x, owner, graphs) / counts[:, None].astype(x.dtype)
