"""Random pipelines, what a network learns from them, and what ships."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from predictor import STAGES, Hardware, RuntimePredictor, Workload, artifact, model, stages
from predictor.fit import train_network
from predictor.graph import make_graph
from predictor.overlap import BOUNDS
from predictor.pretrain import LAYERS, SHIPPED, WIDTH, Task, features, load, make_task, population, pretrain
from predictor.runtime_predictor import schema_hash
from predictor.simulator import MOST
from predictor.synthetic import draw_pipelines


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task(0, 256)


def test_pipelines_are_drawn_once_and_for_all() -> None:
    one, again, other = draw_pipelines(3, 50), draw_pipelines(3, 50), draw_pipelines(4, 50)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(again), strict=True))
    assert not np.array_equal(one.coefficients, other.coefficients)
    assert all(leaf.dtype == np.float32 and np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(one))


def test_pipelines_are_such_as_can_be_run() -> None:
    w, hardware, _ = draw_pipelines(0, 2000)
    threads = w.sebulba > 0
    assert 0.6 < threads.mean() < 0.72
    assert np.all(w.cores <= hardware.cores)
    assert np.all(w.role_threads <= hardware.cores)
    apart = threads & (w.acting_devices + w.searching_devices + w.learning_devices > 3)
    assert np.all((w.acting_devices + w.searching_devices + w.learning_devices)[apart] <= hardware.devices[apart])
    for name, most in zip(("selfplay_workers", "cpu_actors", "searching_devices"), MOST, strict=False):
        assert np.max(getattr(w, name)) <= most
    assert np.all(w.num_envs % w.search_split == 0)
    for name in ("cpu_actors", "search_queue_size", "batch_queue_size", "host_step_seconds", "role_threads"):
        assert np.all(getattr(w, name)[~threads] == 0), name


def test_targets_say_what_the_simulator_and_arithmetic_say(task: Task) -> None:
    threads = np.asarray(task.workload.sebulba) > 0
    simulated = task.targets.shape[1] - len(BOUNDS) - len(STAGES)
    assert np.all(task.targets[~threads, :simulated] == 0.0)
    assert np.std(task.targets[threads, 0]) > 0.05  # the base does not say all of it
    np.testing.assert_allclose(task.targets[:, -len(STAGES) :].sum(1), 1.0, rtol=1e-4)
    serial = task.targets[~threads][:, simulated : simulated + len(BOUNDS)]
    np.testing.assert_allclose(serial.sum(1), 1.0, rtol=1e-4)  # one bound, the sum


def test_training_teaches_features_what_is_asked(task: Task) -> None:
    """By the share of targets that a linear function of the features explains, on the other half of the pipelines."""

    def explained(steps: int) -> float:
        found = features(pretrain(jax.random.key(0), task, steps=steps), task)
        found = (found - found.mean(0)) / found.std(0).clip(1e-3)
        design, target = np.concatenate([np.ones((256, 1)), found], axis=1), task.targets - task.targets.mean(0)
        target = target / np.maximum(target.std(0), 1e-3)
        weights = np.linalg.solve(design[:128].T @ design[:128] + 3.0 * np.eye(design.shape[1]), design[:128].T @ target[:128])
        return float(1.0 - np.mean((target[128:] - design[128:] @ weights) ** 2) / np.mean(target[128:] ** 2))

    assert explained(300) > explained(0) + 0.1


def unread(network: model.Network, task: Task) -> list[np.ndarray]:
    """Weights of features that never vary, of nodes and of edges."""
    (_, of_nodes), (_, of_edges) = population(task)
    return [network["node_in"][:, :-1][of_nodes == 0.0], network["edge_in"][:, :-1][of_edges == 0.0]]


def test_what_never_varied_is_never_heard(task: Task) -> None:
    """Neither by pipelines that teach nothing of it, nor by runs that look alike in it: it would be one more bias, of -14."""
    network = pretrain(jax.random.key(0), task, steps=20)
    graph = jax.jit(make_graph)(*task[:3])
    weights = np.ones((1, len(task.targets)), np.float32)
    start = {**network, "node_out": np.ones(WIDTH, np.float32)}  # or no gradient would reach the input
    trained, _ = train_network(start, graph, task.targets[:, 0], weights)
    for found in (network, jax.tree.map(lambda x: np.asarray(x)[0], trained)):
        assert all(len(weights) > 10 and not np.any(weights) for weights in unread(found, task))


def test_what_ships_hears_nothing_that_never_varied() -> None:
    drawn = draw_pipelines(0, 16_000)
    seconds = np.asarray(jax.jit(stages)(drawn.workload, drawn.hardware)) * drawn.coefficients
    task = Task(drawn.workload, drawn.hardware, seconds, np.zeros((16_000, 0), np.float32))
    assert not any(np.any(weights) for weights in unread(load(), task))


def test_what_ships_loads_and_is_small() -> None:
    network = load()
    assert network["node_in"].shape[2] == WIDTH
    assert len(network["layers"]) == LAYERS
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(network))
    assert not np.any(network["node_out"])  # nothing measured is in it
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()) < 400_000


def test_the_predictor_that_ships_knows_more_than_none(make_workload: type[Workload], hardware: Hardware) -> None:
    shipped, none = RuntimePredictor.pretrained(), RuntimePredictor()
    assert shipped.report is not None
    assert shipped.report.measurements >= 150
    assert shipped.report.residual_mape < 0.4  # of configurations that were left out
    assert len(shipped.machines) >= 1
    meta = json.loads((SHIPPED / "predictor" / "meta.json").read_text())
    assert meta["schema"] == schema_hash()
    assert meta["card"]["configurations"] == shipped.report.measurements
    found, before = shipped.predict(make_workload(), hardware), none.predict(make_workload(), hardware)
    low, high = found.interval
    assert low < found.seconds_per_env_step < high
    assert sum(found.shares.values()) == pytest.approx(1.0, abs=1e-3)
    assert high / low < before.interval[1] / before.interval[0]
    offsets = shipped.params.offsets
    # That memory ran out elsewhere says nothing of here.
    assert np.isinf([offsets.feasible_bytes, offsets.feasible_device_bytes]).all()


def test_a_network_of_another_version_is_refused(tmp_path: str) -> None:
    artifact.save(tmp_path, {**load(), "node_in": np.zeros((3, WIDTH), np.float32)}, {})
    with pytest.raises(artifact.ArtifactError, match="another shape"):
        artifact.load(tmp_path, load())
    assert model.NUM_HEADS * (WIDTH // model.NUM_HEADS) == WIDTH
