"""The simulated pipeline against closed forms, against one made of generators, and against the analytic bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_by_hand import Pipeline

from predictor import STAGES, Hardware, Rates, Workload, hardware_rates, stack
from predictor.overlap import staleness, total
from predictor.simulator import Simulated, simulate

MakeThreaded = Callable[..., Workload]

PLENTY = Rates(
    cores=np.float32(64.0),
    memory_bytes=np.float32(2.0**40),
    device_memory_bytes=np.float32(2.0**36),
    float32_flops=np.float32(1e13),
    bfloat16_flops=np.float32(1e14),
    one_core_flops=np.float32(1e13),
    copy_bytes_per_second=np.float32(1e12),
    dispatch_seconds=np.float32(1e-5),
    operation_seconds=np.float32(1e-6),
    narrowing_seconds=np.float32(0.0),
    devices=np.float32(64.0),
    on_host=np.float32(0.0),
)


def run(workloads: list[Workload], seconds: list[dict[str, float]], rates: Rates, **options: Any) -> Simulated:
    """Pipelines of made-up stages, seconds an environment step."""
    rows = np.zeros((len(workloads), len(STAGES)), np.float32)
    for row, stages in zip(rows, seconds, strict=True):
        for name, value in stages.items():
            row[STAGES.index(name)] = value
    return simulate(jnp.asarray(rows), stack(workloads), rates, **options)


@pytest.mark.parametrize(
    ("stages", "fields", "expected"),
    [
        ({"learner_flops": 3e-5, "acting_flops": 1e-5}, {}, 3e-5),
        ({"learner_flops": 1e-5, "acting_bytes": 9e-5}, {"selfplay_workers": 3.0, "acting_devices": 3.0}, 3e-5),
        # More workers than devices to act with: they take turns.
        ({"learner_flops": 1e-5, "acting_bytes": 9e-5}, {"selfplay_workers": 6.0, "acting_devices": 3.0}, 3e-5),
        # Who holds Python's lock keeps the others out, however many cores there are.
        ({"host_rows": 2e-5, "contexts": 5e-6, "ready": 5e-6, "dispatch": 1e-5}, {"selfplay_workers": 4.0}, 4e-5),
        ({"host_steps": 8e-5, "learner_flops": 1e-6}, {"selfplay_workers": 4.0, "step_in_process": 0.0}, 8e-5),
        ({"host_steps": 8e-5, "learner_flops": 1e-6}, {"selfplay_workers": 4.0, "step_in_process": 1.0}, 2e-5),
        ({"replay_bytes": 8e-5, "learner_flops": 1e-6}, {"searching_devices": 4.0, "cpu_actors": 4.0}, 2e-5),
    ],
)
def test_what_is_short_sets_the_pace(
    make_threaded: MakeThreaded, stages: dict[str, float], fields: dict[str, float], expected: float
) -> None:
    found = run([make_threaded(cores=64.0, **fields)], [stages], PLENTY, jitter=0.0)
    assert float(found.seconds_per_env_step[0]) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("fields", [{}, {"selfplay_workers": 32.0}, {"loop_count": 64.0}, {"num_envs": 4.0}])
def test_queues_fill_before_the_pace_is_told(make_threaded: MakeThreaded, fields: dict[str, float]) -> None:
    """Self-play in short rounds may be far ahead of large dispatches; until it is, it takes the lock from all others."""
    ahead = {"batch_size": 512.0, "replay_ratio": 4.0, "num_envs": 16.0, "selfplay_workers": 16.0, "loop_count": 32.0}
    queues = {"cpu_actors": 8.0, "search_queue_size": 1.0, "batch_queue_size": 1.0, "step_in_process": 1.0}
    stages = {"host_rows": 1.4e-5, "host_steps": 5e-6, "acting_flops": 1e-6, "acting_bytes": 2e-6, "ready": 6e-6}
    workload = make_threaded(**{"cores": 64.0, **ahead, **queues, **fields})
    found = run([workload], [{**stages, "learner_flops": 1e-6}], PLENTY)
    assert float(found.seconds_per_env_step[0]) == pytest.approx(2e-5, rel=0.03)


def test_one_device_for_all_runs_one_program_after_the_other(make_threaded: MakeThreaded) -> None:
    stages = {"learner_flops": 2e-5, "acting_bytes": 3e-5, "reanalysis_bytes": 1e-5}
    one = PLENTY._replace(devices=np.float32(1.0))
    shared, apart = (run([make_threaded(cores=64.0)], [stages], rates, jitter=0.0) for rates in (one, PLENTY))
    assert float(shared.seconds_per_env_step[0]) == pytest.approx(6e-5, rel=0.03)
    assert float(apart.seconds_per_env_step[0]) == pytest.approx(3e-5, rel=0.03)
    assert float(apart.learner_use[0]) == pytest.approx(2.0 / 3.0, abs=0.03)


def test_of_two_devices_learning_has_one_to_itself(make_threaded: MakeThreaded) -> None:
    """Acting and searching, on the other, take turns: 4 of the 6 units that one device takes for all."""
    stages = {"learner_flops": 2e-5, "acting_bytes": 3e-5, "reanalysis_bytes": 1e-5}
    two = PLENTY._replace(devices=np.float32(2.0))
    found = run([make_threaded(cores=64.0)], [stages], two, jitter=0.0)
    assert float(found.seconds_per_env_step[0]) == pytest.approx(4e-5, rel=0.03)


def test_cores_are_shared(make_threaded: MakeThreaded, hardware: Hardware) -> None:
    """Narrow programs of three kinds of thread on two cores: a third each, and both cores busy."""
    stages = {"learner_bytes": 4e-5, "acting_bytes": 4e-5, "reanalysis_bytes": 4e-5}
    workload = make_threaded(cores=2.0, selfplay_workers=1.0, batch_queue_size=8.0, search_queue_size=8.0)
    found = run([workload], [stages], hardware_rates(hardware), jitter=0.0)
    assert float(found.seconds_per_env_step[0]) == pytest.approx(6e-5, rel=0.05)
    assert float(found.cpu_use[0]) == pytest.approx(2.0, rel=0.07)


@pytest.mark.parametrize("seed", range(6))
def test_it_equals_threads_as_generators(make_threaded: MakeThreaded, seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = {"selfplay": rng.integers(1, 5), "context": rng.integers(1, 3), "search": rng.integers(1, 4)}
    fields = {
        "num_envs": float(2 ** rng.integers(3, 8)),
        "batch_size": 256.0,
        "replay_ratio": float(rng.choice([1.0, 4.0])),
        "loop_count": float(rng.integers(1, 6)),
        "search_queue_size": float(rng.integers(1, 5)),
        "batch_queue_size": float(rng.integers(1, 5)),
        "acting_devices": float(rng.integers(1, 3)),
        "selfplay_workers": float(counts["selfplay"]),
        "cpu_actors": float(counts["context"]),
        "searching_devices": float(counts["search"]),
        "step_in_process": 1.0,
        "cores": 64.0,
    }
    workload = make_threaded(**fields)
    names = ("host_rows", "host_steps", "acting_bytes", "contexts", "ready", "reanalysis_bytes", "dispatch", "learner_bytes")
    stages = {name: float(rng.lognormal(-11.0, 0.7)) for name in names}
    steps = workload.batch_size / workload.replay_ratio
    row = workload.num_envs / steps
    unit = row * max(1.0, round(0.125 / row))
    of = {name: value * steps for name, value in stages.items()}  # seconds an update
    python, loop = {"lock": 1.0}, int(workload.loop_count)
    by_hand = Pipeline(
        {
            "selfplay": [
                (of["host_rows"] * unit, python),
                (of["host_steps"] * unit, {"cores": 1.0}),
                (of["acting_bytes"] * unit, {"acting": 1.0}),
            ],
            "context": [(of["contexts"], python)],
            "search": [(of["ready"], python), (of["reanalysis_bytes"], {"searching": 1.0})],
            "learner": [(of["dispatch"] * loop, python)],
            "update": [(of["learner_bytes"] * loop, {"learning": 1.0})],
        },
        {**counts, "learner": 1, "update": 1},
        {"lock": 1.0, "cores": 64.0, "acting": workload.acting_devices, "searching": workload.searching_devices, "learning": 1.0},
        unit=unit,
        window=float(staleness(workload)),
        loop_count=loop,
        queues=(int(workload.search_queue_size), int(workload.batch_queue_size)),
    )
    found = run([workload], [stages], PLENTY, jitter=0.0)
    expected = by_hand.seconds_an_update(400 * loop // max(1, loop // 2)) / steps
    assert float(found.seconds_per_env_step[0]) == pytest.approx(expected, rel=0.02)


def test_where_rounds_vary_room_in_queues_pays_and_never_costs(make_threaded: MakeThreaded) -> None:
    sizes = [1.0, 2.0, 4.0, 8.0, 16.0]
    stages = {"learner_flops": 3e-5, "acting_bytes": 3e-5, "reanalysis_bytes": 3e-5}
    workloads = [make_threaded(cores=64.0, loop_count=1.0, search_queue_size=n, batch_queue_size=n) for n in sizes]
    found = np.asarray(run(workloads, [stages] * len(sizes), PLENTY, jitter=0.5).seconds_per_env_step)
    assert np.all(np.diff(found) < 0.01 * found[:-1])
    assert found[-1] < 0.98 * found[0]
    assert found[-1] >= 3e-5 * 0.98


def test_no_pipeline_is_much_faster_than_its_bounds(make_threaded: MakeThreaded, hardware: Hardware) -> None:
    """The p-norm lies between the largest bound and their sum; so, but for its own approximations, does the simulation."""
    from predictor import stages
    from predictor.overlap import bounds

    rng = np.random.default_rng(0)
    workloads = [
        make_threaded(
            num_envs=float(2 ** rng.integers(2, 7)),
            selfplay_workers=float(rng.integers(1, 5)),
            loop_count=float(2 ** rng.integers(0, 5)),
            batch_queue_size=float(2 ** rng.integers(0, 5)),
            role_threads=float(rng.integers(0, 2)),
            reanalyze_fraction=float(rng.choice([0.0, 0.25, 1.0])),
            cores=float(rng.choice([1, 2])),
        )
        for _ in range(32)
    ]
    batch, rates = stack(workloads), hardware_rates(hardware)
    seconds = stages(batch, rates)
    found = np.asarray(simulate(seconds, batch, rates).seconds_per_env_step)
    largest = np.max(np.asarray(bounds(seconds, batch, rates)), axis=1)
    assert np.all(found > 0.8 * largest)  # the bounds allow for jitter by a rule of thumb
    assert np.all(found < 2.0 * np.asarray(total(seconds, batch, rates)))


def test_it_is_deterministic_and_a_pipeline_does_not_depend_on_its_neighbours(make_threaded: MakeThreaded) -> None:
    workloads = [make_threaded(cores=64.0, loop_count=float(n)) for n in (1, 2, 4)]
    stages = [{"learner_flops": 3e-5, "acting_bytes": 2e-5}] * 3
    together, again = run(workloads, stages, PLENTY), run(workloads, stages, PLENTY)
    alone = run(workloads[1:2], stages[:1], PLENTY)
    np.testing.assert_array_equal(together.seconds_per_env_step, again.seconds_per_env_step)
    np.testing.assert_allclose(together.seconds_per_env_step[1], alone.seconds_per_env_step[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        ({"sebulba": 0.0}, {}, "must be 1 everywhere"),
        ({"selfplay_workers": 33.0}, {}, "workload.selfplay_workers = 33: at most 32 are simulated"),
        ({"searching_devices": 17.0}, {}, "workload.searching_devices = 17: at most 16"),
        ({}, {"jitter": 0.6}, "jitter = 0.6: must be between 0 and 0.5"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    make_threaded: MakeThreaded, fields: dict[str, float], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run([make_threaded(), make_threaded(**fields)], [{"learner_flops": 1e-5}] * 2, PLENTY, **options)
