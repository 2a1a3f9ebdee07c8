"""Tuning and measuring under sebulba: sessions in bursts, the prices of staleness and memory, stores of other versions."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import tuner
from muzerox import UserError, usage
from predictor import Hardware, Measurement, Outcome, RuntimePredictor, Store, Workload, hardware_rates
from tuner import comparison
from tuner.bridge import Config, concrete, make_window
from tuner.history import TuneDir, shared_measurements
from tuner.measuring.measure import Timing, measure_config, paired_ratio
from tuner.measuring.session import Session, cycle_of
from tuner.measuring.workload import describe
from tuner.neighbourhood import space_around
from tuner.objective import ANY, NO_POINT, STALENESS_PRICE, Limits, energy, excluded, price
from tuner.reporting.tables import pipeline_row, wait_rows
from tuner.residual import make_residual


def test_a_process_does_not_inherit_the_peak_of_who_started_it() -> None:
    child = "from muzerox import usage; print(usage.peak_bytes())"
    parent = f"""
import subprocess, sys
held = bytearray(1_500_000_000)
held[::4096] = b"x" * len(held[::4096])
print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True, check=True).stdout)
"""
    found = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True).stdout
    assert 10e6 < float(found) < 1.2e9


def test_a_measurement_says_what_threads_waited_for(tiny_threads: Config, machine: Hardware) -> None:
    (found,) = measure_config(tiny_threads, hardware=machine, repeats=3, seconds=0.1)
    assert found.outcome == Outcome.OK, found.error
    assert found.workload == describe(concrete(tiny_threads, "cpu"))
    assert (found.workload.sebulba, found.workload.selfplay_workers) == (1.0, 2.0)
    assert len(found.repeats) == 3
    assert found.updates_per_second == pytest.approx(found.env_steps_per_second / 4.0, rel=1e-6)
    assert {"action", "environment", "step_put", "search_get", "batch_get", "learner"} <= set(found.waits)
    assert all(0.0 <= share < 8.0 for share in found.waits.values())  # threads, on average
    assert found.batch_staleness is not None
    assert 0.0 <= found.batch_staleness < 30.0
    assert found.acting_staleness is not None
    assert 100e6 < found.peak_bytes < 4e9
    assert Measurement.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_environments_in_processes_are_counted_too(tiny_threads: Config) -> None:
    session = Session(concrete(tiny_threads.replace("runtime.step_in", "process"), "cpu"))
    try:
        alone = float(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
        told = session.burst(0.1, tiny_threads.runtime.loop_count)
        assert told["finite"]
        assert told["peak_bytes"] > alone + 20e6  # two interpreters more
    finally:
        session.close()
    assert usage.peak_bytes() < alone + 20e6  # they are gone


def test_processor_seconds_of_children_count() -> None:
    before = usage.cpu_seconds()
    program = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    used = usage.cpu_seconds() - before
    child.kill()
    child.communicate()
    assert 0.45 < used < 5.0


def test_who_is_not_asked_is_stopped(tiny_threads: Config, machine: Hardware) -> None:
    """Else its threads would disturb what is timed in alternation with it; and that they stood still is none of their waits."""
    timing = Timing(tiny_threads, hardware=machine, timeout=120.0)
    try:
        timing.wait()
        stat = Path(f"/proc/{timing.worker.pid}/stat")

        def state() -> str:
            return stat.read_text().rpartition(")")[2].split()[0]

        for _ in range(6):
            time.sleep(0.05)
            assert state() == "T"
            used = stat.read_text().rpartition(")")[2].split()[11:13]
            time.sleep(0.4)
            assert stat.read_text().rpartition(")")[2].split()[11:13] == used
            assert timing.burst(0.05) is not None, timing.failure
        found = timing.measurement()
    finally:
        timing.worker.stop()
    assert found.outcome == Outcome.OK
    threads = tiny_threads.runtime.selfplay_workers + tiny_threads.runtime.cpu_actors
    assert found.waits
    assert all(0.0 <= share <= threads + 0.01 for share in found.waits.values()), found.waits


def test_a_burst_has_a_dispatch_before_it(tiny_threads: Config) -> None:
    session = Session(concrete(tiny_threads, "cpu"))
    made: list[int] = []
    run = session._run

    def counted(n: int, loop_count: int) -> None:
        made.append(n * loop_count)
        run(n, loop_count)

    session._run = counted  # type: ignore[method-assign]
    try:
        found = [session.burst(0.05, tiny_threads.runtime.loop_count) for _ in range(3)]
    finally:
        session.close()
    assert session.config.runtime.step_timeout > 1e5, "the process may be stopped within a step"
    assert made[::2] == [tiny_threads.runtime.loop_count] * 3
    timed = made[1::2]
    dispatch = tiny_threads.runtime.loop_count
    assert all(updates % dispatch == 0 and updates >= max(session._cycle, 4 * dispatch) for updates in timed)
    for updates, burst in zip(timed, found, strict=True):
        assert burst["updates_per_second"] == pytest.approx(updates / burst["wall_seconds"])


def test_what_threads_waited_for_is_counted_in_all_of_a_burst(tiny_threads: Config) -> None:
    session = Session(concrete(tiny_threads, "cpu"))
    waited: list[float] = []
    run = session._run

    def counted(n: int, loop_count: int) -> None:
        run(n, loop_count)
        waited.append(session._report.pipeline["wait_learner_seconds"])

    session._run = counted  # type: ignore[method-assign]
    try:
        told = session.burst(1.6, tiny_threads.runtime.loop_count)
    finally:
        session.close()
    assert len(waited) >= 4, "a dispatch before it, and of the burst half a second each"
    assert min(waited) > 0.0
    assert told["waits"]["learner"] == pytest.approx(sum(waited[1:]) / told["wall_seconds"], rel=0.02)


class Paced(Session):
    """Threads whose learner takes so many seconds an update, next to which self-play makes so large a share of its steps.

    ``ahead``: the share of what self-play may be ahead that it is when the program has been compiled.
    """

    def __init__(self, config: Config, seconds: float, share: float, ahead: float):
        self.config, self._threaded, self._cycle = config, True, cycle_of(config)
        self.seconds, self.share, self.made, self.ahead = seconds, share, [0], ahead * make_window(config)
        self._seconds_an_update = self._catch_up()

    def _run(self, n: int, loop_count: int) -> None:
        self.made.append(n * loop_count)
        time.sleep(self.seconds * n * loop_count)
        ahead = self.ahead + (self.share - 1.0) * n * loop_count
        self.ahead = min(max(0.0, ahead), make_window(self.config))

    def _ahead(self) -> int:
        return round(self.ahead)


@pytest.mark.parametrize(
    ("share", "ahead", "settles"),
    [
        (1.0, 1.0, True),
        (0.99, 1.0, True),
        (1.5, 1.0, True),
        (0.5, 0.0, True),
        (0.5, 1.0, False),
        (1.5, 0.0, False),
    ],
    ids=["in step", "nearly", "held back", "waited for", "using up its lead", "building it"],
)
def test_threads_are_warm_once_self_play_is_as_far_ahead_as_it_will_be(share: float, ahead: float, settles: bool) -> None:
    """Whatever the loop count: a training whose updates take long makes shorter dispatches, and so does what times it."""
    changes = {"runtime.loop_count": 256, "runtime.num_envs": 8, "train.batch_size": 128}
    session = Paced(Config.preset("gymnasium:CartPole-v1").replace(changes), 0.004, share, ahead)
    window = make_window(session.config)
    assert 512 < window < 530
    assert max(session.made) <= 0.5 / 0.004, "no longer than a training's"
    assert (sum(session.made) < window) == settles
    assert sum(session.made) <= window + 4 * 256 + 0.5 / 0.004
    assert session._seconds_an_update == pytest.approx(0.004, rel=0.2)
    ((n, count),) = session._portions(0.3, 256)
    assert n == 1
    assert 0.7 * 0.5 / 0.004 < count <= 0.5 / 0.004
    assert session.shortest_burst == pytest.approx(0.5, rel=0.1)


def test_bursts_of_threads_are_whole_dispatches_and_hold_a_row(tiny_threads: Config) -> None:
    session = Session.__new__(Session)
    session.config, session._threaded, session._cycle = tiny_threads.replace("runtime.loop_count", 8), True, 20

    def portions(seconds: float, an_update: float) -> list[tuple[int, int]]:
        session._seconds_an_update = an_update
        return session._portions(seconds, 8)

    assert portions(0.0, 0.001) == [(4, 8)]  # several dispatches, where they are quick
    assert portions(0.4, 0.001) == [(50, 8)]
    assert portions(1.2, 0.001) == [(62, 8), (62, 8), (26, 8)]  # half a second each
    assert portions(0.0, 0.05) == [(1, 8), (1, 8), (1, 8)]  # a row of all environments
    assert portions(0.0, 0.1) == [(1, 5)] * 4  # shorter ones, as in a training
    assert portions(1.1, 0.3) == [(1, 1)] * 20


def test_staleness_has_a_price_and_ties_go_to_small_queues(threaded: Workload, machine: Hardware) -> None:
    rates = hardware_rates(machine)
    an_update = STALENESS_PRICE / 20
    more = dataclasses.replace(threaded, batch_queue_size=threaded.batch_queue_size + 10.0)
    difference = float(price(more, rates, an_update) - price(threaded, rates, an_update))
    assert difference == pytest.approx(10 * an_update, rel=0.05)  # and a little memory
    assert difference > 10 * an_update
    same = dataclasses.replace(threaded, sebulba=0.0)
    assert float(price(same, rates, 1e9)) < 0.01  # one program learns from nothing old


def test_the_annealers_energy_prefers_fresher_of_two_that_are_as_fast(machine: Hardware) -> None:
    start = concrete(Config.preset("gymnasium:CartPole-v1").replace("train.target_period", 200), "cpu")
    space = space_around(start, "neutral", "cpu")
    sizes = space.options("runtime.search_queue_size")
    points = np.array([space.encode({**space.decode(space.start), "runtime.search_queue_size": n}) for n in sizes], np.int32)

    def energies(staleness_price: float) -> np.ndarray:
        limits = Limits(*map(jnp.float32, (space.max_num_envs, space.max_staleness, staleness_price)))
        nothing = jnp.full((1, points.shape[1]), NO_POINT)
        params = RuntimePredictor().params
        fitted = params, hardware_rates(machine), space.base, space.tables()
        return np.asarray(energy(jnp.asarray(points), *fitted, limits, nothing, make_residual(space, (), ())))

    free, paid = energies(0.0), energies(STALENESS_PRICE / 20)
    assert np.ptp(free) < 0.02  # they matter little for speed
    assert sizes[int(np.argmin(paid))] <= 8
    assert paid[-1] - paid[0] > 0.05
    assert np.isfinite(paid).all()


def test_fine_knobs_are_covered_by_two_trials() -> None:
    space = space_around(concrete(Config.preset("gymnasium:CartPole-v1"), "cpu"), "neutral", "cpu")
    paths = [knob.path for knob in space.knobs]
    queue, envs = paths.index("runtime.batch_queue_size"), paths.index("runtime.num_envs")

    def moved(column: int, by: int) -> list[int]:
        return [x + by * (index == column) for index, x in enumerate(space.start)]

    once = np.asarray(excluded(space, [space.start, moved(envs, 1)]))
    assert once.shape == (16, len(paths))
    assert list(once[0]) == list(space.start)
    assert np.all(once[2:] == NO_POINT)
    twice = np.asarray(excluded(space, [space.start, moved(envs, 1), moved(queue, 1)]))
    assert twice[0, queue] == twice[2, queue] == ANY
    assert twice[0, envs] == space.start[envs]
    assert list(twice[1]) == moved(envs, 1)
    assert excluded(space, []).shape == (16, len(paths))
    live = space_around(concrete(Config.preset("gymnax:CartPole-v1"), "cpu"), "neutral", "cpu")
    row = np.asarray(excluded(live, [live.start]))[0]
    assert [knob.path for knob, x in zip(live.knobs, row, strict=True) if x == ANY] == ["runtime.loop_count"]


TINY = {"replay.min_size": 64, "replay.capacity": 8192, "runtime.num_envs": 8, "runtime.loop_count": 2, "network.width": 8}
TINY |= {"network.depth": 1, "train.batch_size": 16, "search.num_simulations": 2, "train.td_steps": 4, "train.target_period": 50}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuner.TuneResult:
    config = Config.preset("gymnasium:CartPole-v1").replace(TINY)
    return tuner.tune(config, budget="10m", max_trials=2, out=tmp_path_factory.mktemp("t") / "t", burst=0.1, quiet=True)


def test_a_budget_for_the_start_alone_compares_it_with_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config.preset("gymnasium:CartPole-v1").replace(TINY)
    alone = tuner.tune(config, budget="10m", max_trials=1, out=tmp_path / "t", burst=0.05)
    assert alone.finished
    assert [trial.role for trial in alone.history] == ["baseline"]
    assert (alone.speedup, alone.gain) == (1.0, 1.0)
    assert alone.measurement == alone.start_measurement == alone.history[0].measurement
    assert "nothing ran beside the start" in capsys.readouterr().err


def test_a_tuning_of_threads_is_never_worse_than_the_start(tuned: tuner.TuneResult) -> None:
    assert tuned.finished
    assert len(tuned.history) == 2
    ran = [
        (t.measurement.outcome, t.measurement.error, t.changes, t.config["allocation"], t.predicted_use) for t in tuned.history
    ]
    assert {outcome for outcome, *_ in ran} == {Outcome.OK}, ran
    base, ours = tuned.start_measurement, tuned.measurement
    assert base is not None
    assert ours is not None
    assert tuned.speedup == pytest.approx(paired_ratio(ours, base))
    pays = STALENESS_PRICE / tuned.start.train.target_period
    paid = [float(price(m.workload, hardware_rates(tuned.hardware), pays)) for m in (base, ours)]
    assert ours == base or tuned.speedup * math.exp(paid[0] - paid[1]) >= comparison.MIN_GAIN
    assert tuned.config.runtime.kind == tuned.start.runtime.kind == "sebulba"
    assert tuned.history[0].changes["runtime.batch_queue_size"] == 2
    assert "runtime.loop_count" in tuned.history[0].changes
    assert all(float(trial.measurement.workload.loop_count) == trial.changes["runtime.loop_count"] for trial in tuned.history)
    before, after = tuned.start.to_dict(), tuned.config.to_dict()
    assert all(before[name] == after[name] for name in ("network", "train", "env", "seed"))
    assert tuned.predicted["batch_staleness"] is not None


def test_measurements_of_other_versions_are_set_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Hardware, workload: Workload
) -> None:
    monkeypatch.setenv("MUZEROX_HOME", str(tmp_path))
    store = Store(tmp_path / "measurements" / machine.id)
    run = Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, seconds_per_env_step=1e-4)
    old = run.to_dict()
    del old["schema"], old["waits"], old["workload"]["sebulba"]
    for row in (old, run.to_dict(), old):
        store.append(row)
    said: list[str] = []
    assert shared_measurements(machine.id, said.append) == [run]
    assert len(said) == 1
    assert "2 measurements in" in said[0]
    assert "another version" in said[0]
    store.append({**run.to_dict(), "hardware": dataclasses.replace(machine, cpu="a colleague's").to_dict()})
    assert shared_measurements(machine.id, said.append) == [run]
    assert "1 measurements in" in said[-1]
    assert "another machine" in said[-1]


def test_a_tuning_of_another_version_is_refused_in_one_line(tuned: tuner.TuneResult, tmp_path: Path) -> None:
    folder = TuneDir(tmp_path)
    row = tuned.history[0].to_dict()
    row["measurement"]["schema"] = 1
    Store(tmp_path / "trials").append(row)
    with pytest.raises(UserError, match="by another version; give another --out"):
        folder.trials()


def test_tables_show_the_threads(tiny_threads: Config, tiny: Config) -> None:
    shown = pipeline_row(concrete(tiny_threads, "cpu"))["pipeline"]
    assert "self-play 2 x 8 environments" in shown
    assert "search queue 2" in shown
    assert pipeline_row(concrete(tiny, "cpu")) == {}
    assert wait_rows({"a": 0.1, "b": 2.0}) == {"threads waiting": "b 2.00, a 0.10"}
    assert wait_rows({}) == {}
