"""The typed graph and the attention network over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import pytest

from predictor import Hardware, Workload, hardware_rates, model, stack, stages
from predictor.analytic import Rates, stack_rates
from predictor.graph import EDGE_TYPES, EDGE_WIDTH, EDGES, NODE_TYPES, NODE_WIDTH, NODES, Rows, make_graph
from predictor.pretrain import WIDTH, load

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


def test_rows_have_their_types(family: Family, hardware: Hardware) -> None:
    graph = graph_of(stack(family(0, 3)), hardware)
    for rows, table, kinds, width in ((graph.nodes, NODES, NODE_TYPES, NODE_WIDTH), (graph.edges, EDGES, EDGE_TYPES, EDGE_WIDTH)):
        assert rows.features.shape == (len(table), width, 3)
        assert np.all(np.isfinite(rows.features))
        assert [list(kinds)[kind] for kind in rows.kind] == [entry[-1] for entry in table]
    ends = [(NODES[s][0], NODES[r][0]) for s, r in zip(graph.senders, graph.receivers, strict=True)]
    assert ends == [(sender, receiver) for sender, receiver, _ in EDGES]
    assert (graph.n_node, graph.n_edge) == (len(NODES), len(EDGES))


def test_candidates_are_side_by_side(family: Family, hardware: Hardware) -> None:
    workloads = family(1, 3)
    together = graph_of(stack(workloads), hardware)
    for column, workload in enumerate(workloads):
        alone = graph_of(workload, hardware)
        for rows, own in ((together.nodes, alone.nodes), (together.edges, alone.edges)):
            np.testing.assert_allclose(rows.features[..., column], own.features[..., 0], rtol=1e-5, atol=1e-5)


def attention_by_loops(network: model.Network, graph: jraph.GraphsTuple) -> np.ndarray:
    """The network candidate by candidate, node by node, edge by edge and head by head, in float64."""
    return np.array([candidate_by_loops(network, graph, column) for column in range(graph.nodes.features.shape[-1])])


def candidate_by_loops(network: model.Network, graph: jraph.GraphsTuple, column: int) -> float:
    net = jax.tree.map(lambda x: np.asarray(x, np.float64), network)

    def project(rows: Rows, matrices: np.ndarray) -> np.ndarray:
        features = np.asarray(rows.features, np.float64)[..., column]
        return np.stack([np.append(x, 1.0) @ matrices[kind] for x, kind in zip(features, rows.kind, strict=True)])

    nodes, edges = project(graph.nodes, net["node_in"]), project(graph.edges, net["edge_in"])
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
    return float(nodes.mean(0) @ net["node_out"] + edges.mean(0) @ net["edge_out"] + net["bias"])


def test_attention_equals_loops_over_nodes_edges_and_heads(family: Family, hardware: Hardware) -> None:
    graph = graph_of(stack(family(2, 3)), hardware)
    network = random_network(0)
    np.testing.assert_allclose(apply(network, graph), attention_by_loops(network, graph), rtol=1e-4, atol=1e-4)


def test_the_order_of_edges_does_not_matter(family: Family, hardware: Hardware) -> None:
    graph = graph_of(stack(family(3, 3)), hardware)
    network = random_network(1)
    order = np.random.default_rng(0).permutation(len(EDGES))
    rows = jax.tree.map(lambda x: x[order], graph.edges)
    shuffled = graph._replace(edges=rows, senders=graph.senders[order], receivers=graph.receivers[order])
    np.testing.assert_allclose(apply(network, graph), apply(network, shuffled), rtol=1e-4, atol=1e-5)


def test_it_starts_as_nothing_and_depends_on_every_type(family: Family, hardware: Hardware) -> None:
    graph = graph_of(stack(family(4, 3)), hardware)
    assert np.all(np.asarray(apply(model.init(jax.random.key(5)), graph)) == 0.0)
    network = random_network(2)
    gradient = jax.jit(jax.grad(lambda net: jnp.sum(model.apply(net, graph))))(network)
    for name in ("node_in", "edge_in"):
        assert np.all(np.abs(np.asarray(gradient[name])).sum((1, 2)) > 0)


FLAGS = ("puct", "search_engine", "prioritized", "replay_on_host", "step_in_process", "sebulba")
# What threads pay for: no other runtime's answer counts for these.
OF_THREADS = {
    *("observation_bytes", "num_envs", "num_simulations", "capacity", "batch_size", "loop_count", "host_step_seconds"),
    *("selfplay_workers", "cpu_actors", "search_queue_size", "batch_queue_size", "role_threads", "step_in_process", "sebulba"),
    *("acting_devices", "searching_devices", "learning_devices"),
}
# They limit what memory there is: they decide whether a training runs, not how long it takes.
LIMITS = {"memory_bytes", "device_memory_bytes", "device_share"}


def changed(workload: Workload, field: str) -> Workload:
    """A flag the other way, 16 bits for 32, three times as much of anything else."""
    value = getattr(workload, field)
    other = 1.0 - value if field in FLAGS else 48.0 - value if field.endswith("_bits") else 3.0 * value + 1.0
    return dataclasses.replace(workload, **{field: other})


def sensitivity(workloads: list[Workload], rates: Rates) -> np.ndarray:
    """[C - 1], how far each candidate's output is from the first's, at the most of three drawings of the heads."""
    batch = stack(workloads)
    graph = build(batch, rates)
    found = []
    for seed in (4, 5, 6):  # one drawing of a head may weigh a feature by next to nothing
        heads = random_network(seed, width=WIDTH)
        outputs = np.asarray(apply(load() | {name: heads[name] for name in ("node_out", "edge_out")}, graph))
        found.append(np.abs(outputs[1:] - outputs[0]))
    return np.max(found, axis=0)


def test_every_quantity_of_a_workload_can_change_the_output(
    make_workload: Callable[..., Workload], make_threaded: Callable[..., Workload], hardware: Hardware
) -> None:
    """Under one program, of vectors or images, or with threads: each has what the others do not."""
    fields = [field.name for field in dataclasses.fields(Workload)]
    most = np.zeros(len(fields))
    images = {"represent_moved": 2e4, "dynamics_moved": 2e5, "predict_moved": 2e4, "cores": 1.0, "cached_rows": 8.0}
    for make, changes in ((make_workload, {}), (make_workload, images), (make_threaded, {})):
        base = make(reanalyze_fraction=0.25, **changes)
        candidates = [base, *(changed(base, field) for field in fields)]
        most = np.maximum(most, sensitivity(candidates, stack_rates([hardware] * len(candidates))))
    assert {field for field, change in zip(fields, most, strict=True) if change < 1e-3} == LIMITS & set(fields)


def test_every_quantity_of_threads_changes_their_output(make_threaded: Callable[..., Workload], hardware: Hardware) -> None:
    fields, base = sorted(OF_THREADS), make_threaded()
    candidates = [base, *(changed(base, field) for field in fields)]
    most = sensitivity(candidates, stack_rates([hardware] * len(candidates)))
    assert not [field for field, change in zip(fields, most, strict=True) if change <= 1e-3]


def test_every_rate_of_a_machine_can_change_the_output(make_workload: Callable[..., Workload], hardware: Hardware) -> None:
    workload, rates = make_workload(compute_bits=16.0), hardware_rates(dataclasses.replace(hardware, narrowing_seconds=1e-10))
    fields = list(Rates._fields)
    others = {"on_host": rates.on_host * 0}
    machines = [rates, *(rates._replace(**{field: others.get(field, 3 * getattr(rates, field))}) for field in fields)]
    stacked = Rates(*(np.asarray(column, np.float32) for column in zip(*machines, strict=True)))
    most = sensitivity([workload] * len(machines), stacked)
    assert {field for field, change in zip(fields, most, strict=True) if change < 1e-3} == LIMITS & set(fields)


def test_queues_are_edges_with_room_that_carry_nothing_in_one_program(
    make_workload: Callable[..., Workload], make_threaded: Callable[..., Workload], hardware: Hardware
) -> None:
    w = make_threaded(search_queue_size=4.0, batch_queue_size=7.0)
    queues = {
        "context_queue": ("context_worker", "reanalyze_worker", 4.0),
        "batch_queue": ("reanalyze_worker", "training_loop", 7.0),
    }
    graph = graph_of(stack([w, make_workload()]), hardware)
    edges = np.asarray(graph.edges.features)
    nothing = np.float32(np.log(1e-6))
    for kind, (sender, receiver, room) in queues.items():
        assert EDGE_TYPES[kind]
        row = EDGES.index((sender, receiver, kind))
        bytes_a_step, rows, calls, capacity, blocking = edges[row, :, 0]
        assert capacity == pytest.approx(np.log(room), rel=1e-6)
        assert (rows, blocking) == pytest.approx((np.log(256.0), 0.0), rel=1e-5)
        assert calls == pytest.approx(np.log(4 / 256), rel=1e-5)
        assert bytes_a_step > 0.0
        np.testing.assert_allclose(edges[row, :4, 1], nothing, rtol=1e-5)
    for index, (_, _, kind) in enumerate(EDGES):
        if kind in ("draw", "publish"):
            assert edges[index, 0, 0] > nothing
            assert edges[index, 0, 1] == pytest.approx(nothing, rel=1e-5)
        if kind == "sample":
            assert edges[index, 0, 0] == pytest.approx(nothing, rel=1e-5)
            assert edges[index, 0, 1] > nothing


def test_parameters_are_published_once_a_dispatch(make_threaded: Callable[..., Workload], hardware: Hardware) -> None:
    graph = graph_of(stack([make_threaded(loop_count=4.0), make_threaded(loop_count=16.0)]), hardware)
    edges = np.asarray(graph.edges.features)
    for receiver in ("selfplay_worker", "reanalyze_worker"):
        calls = edges[EDGES.index(("training_loop", receiver, "publish")), 2]
        assert calls[0] - calls[1] == pytest.approx(np.log(4.0), rel=1e-4)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="width = 30: must be a multiple of 4"):
        model.init(jax.random.key(0), width=30)


def test_gradients_are_those_of_differences(family: Family, hardware: Hardware) -> None:
    graph, network = graph_of(stack(family(5, 3)), hardware), random_network(6)
    direction = jax.tree.map(lambda x: jax.random.normal(jax.random.key(7), x.shape), network)

    def output(network: model.Network) -> jax.Array:
        return jnp.sum(model.apply(network, graph))

    slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: jnp.sum(g * d), jax.jit(jax.grad(output))(network), direction)))
    step = 1e-6
    ends = [
        attention_by_loops(
            jax.tree.map(
                lambda x, d: np.asarray(x, np.float64) + s * np.asarray(d, np.float64),  # noqa: B023
                network,
                direction,
            ),
            graph,
        ).sum()
        for s in (step, -step)
    ]
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / (2.0 * step), rel=1e-3)
