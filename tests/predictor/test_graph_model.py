"""The typed graph and the attention network over it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest

from predictor import Hardware, Workload, hardware_rates, model, stack, stages
from predictor.graph import EDGE_TYPES, EDGE_WIDTH, EDGES, NODE_TYPES, NODE_WIDTH, NODES, make_graph

Family = Callable[[int, int], list[Workload]]

build = jax.jit(lambda workload, rates: make_graph(workload, rates, stages(workload, rates)))
apply = jax.jit(model.apply)


def graph_of(workload: Workload, hardware: Hardware) -> jraph.GraphsTuple:
    return build(workload, hardware_rates(hardware))


def random_network(seed: int, **sizes: int) -> model.Network:
    """Random everywhere, the last linear function too."""
    network = model.init(jax.random.key(seed), **sizes)
    leaves, structure = jax.tree.flatten(network)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    return jax.tree.unflatten(structure, [x + 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


def test_the_methods_components_and_their_interactions_are_there() -> None:
    names = [name for name, _ in NODES]
    assert {"replay_buffer", "selfplay_worker", "network", "training_loop"} <= {kind for _, kind in NODES}
    assert [name for name, kind in NODES if kind == "network"] == ["representation", "dynamics", "prediction"]
    pairs = {(sender, receiver) for sender, receiver, _ in EDGES}
    assert len(pairs) == len(EDGES)
    for worker in ("selfplay_worker", "training_loop", "reanalyze_worker"):
        for network in ("representation", "dynamics", "prediction"):
            assert {(worker, network), (network, worker)} <= pairs
    assert {("hardware", name) for name in names if name != "hardware"} <= pairs
    assert {kind for _, _, kind in EDGES} == set(EDGE_TYPES)


def test_features_stand_in_the_columns_of_their_type(family: Family, hardware: Hardware) -> None:
    graph = graph_of(stack(family(0, 3)), hardware)
    nodes = np.asarray(graph.nodes).reshape(3, len(NODES), len(NODE_TYPES), NODE_WIDTH + 1)
    edges = np.asarray(graph.edges).reshape(3, len(EDGES), len(EDGE_TYPES), EDGE_WIDTH + 1)
    for table, features, kinds in ((NODES, nodes, list(NODE_TYPES)), (EDGES, edges, list(EDGE_TYPES))):
        for row, entry in enumerate(table):
            own = kinds.index(entry[-1])
            np.testing.assert_array_equal(features[:, row, own, -1], 1.0)
            assert np.all(np.delete(features[:, row], own, axis=1) == 0.0)
    assert np.all(np.isfinite(nodes))
    assert np.all(np.isfinite(edges))


def test_a_batch_is_its_graphs_one_after_the_other(family: Family, hardware: Hardware) -> None:
    workloads = family(1, 3)
    batched = graph_of(stack(workloads), hardware)
    together = jraph.batch([graph_of(w, hardware) for w in workloads])
    for name in ("senders", "receivers", "n_node", "n_edge"):
        np.testing.assert_array_equal(np.asarray(getattr(batched, name)), np.asarray(getattr(together, name)))
    np.testing.assert_allclose(batched.nodes, together.nodes, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(batched.edges, together.edges, rtol=1e-5, atol=1e-5)
    owner = np.repeat(np.arange(3), len(EDGES))
    for ends in (batched.senders, batched.receivers):
        np.testing.assert_array_equal(np.asarray(ends) // len(NODES), owner)


def attention_by_loops(network: model.Network, graph: jraph.GraphsTuple) -> np.ndarray:
    """The network node by node, edge by edge and head by head, in float64."""
    net = jax.tree.map(lambda x: np.asarray(x, np.float64), network)
    nodes, edges = np.asarray(graph.nodes, np.float64) @ net["node_in"], np.asarray(graph.edges, np.float64) @ net["edge_in"]
    senders, receivers = np.asarray(graph.senders), np.asarray(graph.receivers)
    width = nodes.shape[1]
    size = width // model.NUM_HEADS

    def normalise(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + 1e-6)

    for layer in net["layers"]:
        query, received, key, value, sent = np.split(nodes @ layer["node"], 5, axis=1)
        edge_key, edge_value, edge_own = np.split(edges @ layer["edge"], 3, axis=1)
        attended = np.zeros_like(nodes)
        for node in range(len(nodes)):
            arriving = np.flatnonzero(receivers == node)
            for head in range(model.NUM_HEADS):
                part = slice(head * size, (head + 1) * size)
                scores = [query[node, part] @ (key[senders[e]] + edge_key[e])[part] / np.sqrt(size) for e in arriving]
                raised = np.exp(np.array(scores) - np.max(scores, initial=-np.inf))
                weights = raised / np.sum(raised)
                for weight, e in zip(weights, arriving, strict=True):
                    attended[node, part] += weight * (value[senders[e]] + edge_value[e])[part]
        updated = [edge_own[e] + sent[senders[e]] + received[receivers[e]] for e in range(len(edges))]
        nodes = np.stack([normalise(x) for x in nodes + np.maximum(attended @ layer["out"], 0)])
        edges = np.stack([normalise(x + np.maximum(y, 0)) for x, y in zip(edges, updated, strict=True)])
    outputs = []
    for n, e in zip(np.split(nodes, len(graph.n_node)), np.split(edges, len(graph.n_edge)), strict=True):
        outputs.append(n.mean(0) @ net["node_out"] + e.mean(0) @ net["edge_out"] + net["bias"])
    return np.array(outputs)


def test_attention_equals_loops_over_nodes_edges_and_heads(family: Family, hardware: Hardware) -> None:
    graph = graph_of(stack(family(2, 3)), hardware)
    network = random_network(0)
    np.testing.assert_allclose(apply(network, graph), attention_by_loops(network, graph), rtol=1e-4, atol=1e-4)


def test_the_order_of_edges_does_not_matter(family: Family, hardware: Hardware) -> None:
    graph = graph_of(stack(family(3, 3)), hardware)
    network = random_network(1)
    order = np.concatenate([i * len(EDGES) + np.random.default_rng(i).permutation(len(EDGES)) for i in range(3)])
    shuffled = graph._replace(edges=graph.edges[order], senders=graph.senders[order], receivers=graph.receivers[order])
    np.testing.assert_allclose(apply(network, graph), apply(network, shuffled), rtol=1e-4, atol=1e-5)


def test_it_starts_as_nothing_and_depends_on_every_type(family: Family, hardware: Hardware) -> None:
    graph = graph_of(stack(family(4, 3)), hardware)
    assert np.all(np.asarray(apply(model.init(jax.random.key(5)), graph)) == 0.0)
    network = random_network(2)
    gradient = jax.jit(jax.grad(lambda net: jnp.sum(model.apply(net, graph))))(network)
    for name, width in (("node_in", NODE_WIDTH), ("edge_in", EDGE_WIDTH)):
        by_type = np.abs(np.asarray(gradient[name])).reshape(-1, width + 1, 32).sum((1, 2))
        assert np.all(by_type > 0)


COMMON = ("observation_bytes", "num_envs", "num_simulations", "capacity", "batch_size", "loop_count", "host_step_seconds")
THREADS = (
    "selfplay_workers",
    "cpu_actors",
    "search_queue_size",
    "batch_queue_size",
    "acting_devices",
    "searching_devices",
    "learning_devices",
    "role_threads",
    "step_in_process",
)


@pytest.mark.parametrize("field", [*COMMON, *THREADS, "sebulba"])
def test_every_feature_of_threads_changes_the_output(
    make_threaded: Callable[..., Workload], hardware: Hardware, field: str
) -> None:
    w = make_threaded()
    other = make_threaded(**{field: getattr(w, field) * 3.0 + 1.0 if field != "sebulba" else 0.0})
    graph = graph_of(stack([w, other]), hardware)
    first, second = np.asarray(apply(random_network(4), graph))
    assert abs(first - second) > 1e-4


def test_queues_are_edges_with_room_that_carry_nothing_in_one_program(
    make_workload: Callable[..., Workload], make_threaded: Callable[..., Workload], hardware: Hardware
) -> None:
    w = make_threaded(search_queue_size=4.0, batch_queue_size=7.0)
    queues = {
        "context_queue": ("context_worker", "reanalyze_worker", 4.0),
        "batch_queue": ("reanalyze_worker", "training_loop", 7.0),
    }
    graph = graph_of(stack([w, make_workload()]), hardware)
    edges = np.asarray(graph.edges).reshape(2, len(EDGES), len(EDGE_TYPES), EDGE_WIDTH + 1)
    nothing = np.float32(np.log(1e-6))
    for kind, (sender, receiver, room) in queues.items():
        assert EDGE_TYPES[kind]
        row, own = EDGES.index((sender, receiver, kind)), list(EDGE_TYPES).index(kind)
        bytes_a_step, rows, calls, capacity, blocking = edges[0, row, own, :-1]
        assert capacity == pytest.approx(np.log(room), rel=1e-6)
        assert (rows, blocking) == pytest.approx((np.log(256.0), 0.0), rel=1e-5)
        assert calls == pytest.approx(np.log(4 / 256), rel=1e-5)
        assert bytes_a_step > 0.0
        np.testing.assert_allclose(edges[1, row, own, :4], nothing, rtol=1e-5)
    for index, (_, _, kind) in enumerate(EDGES):
        own = list(EDGE_TYPES).index(kind)
        if kind in ("draw", "publish"):
            assert edges[0, index, own, 0] > nothing
            assert edges[1, index, own, 0] == pytest.approx(nothing, rel=1e-5)
        if kind == "sample":
            assert edges[0, index, own, 0] == pytest.approx(nothing, rel=1e-5)
            assert edges[1, index, own, 0] > nothing


def test_parameters_are_published_once_a_dispatch(make_threaded: Callable[..., Workload], hardware: Hardware) -> None:
    graph = graph_of(stack([make_threaded(loop_count=4.0), make_threaded(loop_count=16.0)]), hardware)
    edges = np.asarray(graph.edges).reshape(2, len(EDGES), len(EDGE_TYPES), EDGE_WIDTH + 1)
    own = list(EDGE_TYPES).index("publish")
    for receiver in ("selfplay_worker", "reanalyze_worker"):
        calls = edges[:, EDGES.index(("training_loop", receiver, "publish")), own, 2]
        assert calls[0] - calls[1] == pytest.approx(np.log(4.0), rel=1e-4)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width = 30: must be a multiple of 4"):
        model.init(jax.random.key(0), width=30)
