"""Measuring in subprocesses: real runs, under their allocation, failures recorded."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from muzerox import usage
from muzerox.compilation import cache_use
from predictor import Hardware, Measurement, Outcome, Workload
from tuner.bridge import Config, concrete
from tuner.measuring.measure import (
    HOPELESS_BURSTS,
    Timing,
    measure_beside,
    measure_config,
    measure_in_alternation,
    paired_ratio,
)
from tuner.measuring.worker_client import Worker, WorkerFailed, started_ahead
from tuner.measuring.workload import describe

FIRST, CORES = min(os.sched_getaffinity(0)), len(os.sched_getaffinity(0))


def state_of(pid: int) -> str:
    """A letter: what the process is at. Raises FileNotFoundError when it is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_measurement_says_what_a_run_costs(tiny: Config, machine: Hardware) -> None:
    config = tiny.replace("allocation.cores", 1)
    first, other = measure_config(config, hardware=machine, repeats=3, seconds=0.05, loop_counts=[8])
    assert (first.outcome, other.outcome) == (Outcome.OK, Outcome.OK)
    assert (first.workload.loop_count, other.workload.loop_count) == (2.0, 8.0)
    for measurement in (first, other):
        assert len(measurement.repeats) == 3
        assert measurement.seconds_per_env_step == sorted(measurement.repeats)[1]
        assert measurement.env_steps_per_second == pytest.approx(1.0 / measurement.seconds_per_env_step)
        # Four sequences a step, sixteen an update: an update every four steps.
        assert measurement.updates_per_second == pytest.approx(measurement.env_steps_per_second / 4.0, rel=1e-6)
        assert measurement.compile_seconds > 0
        assert measurement.warmup_seconds > 0
        assert 100e6 < measurement.peak_bytes < 4e9
        assert 0.1 < measurement.cpu_use < 1.2  # it was given one core
        assert measurement.wall_seconds > measurement.compile_seconds
        assert Measurement.from_dict(json.loads(json.dumps(measurement.to_dict()))) == measurement
    assert first.workload == describe(concrete(config, "cpu"))


def test_a_run_that_would_outgrow_its_allocation_when_it_saves_has_failed(tiny: Config, machine: Hardware) -> None:
    timing = Timing(tiny.replace("allocation.memory_gib", 4.0), hardware=machine, timeout=120.0)
    try:
        timing.wait()
        timing.burst(0.05)
        assert timing.measurement().outcome is Outcome.OK
        (bursts,) = timing.bursts.values()
        bursts[0]["peak_bytes"] = 4.5 * 2**30  # with the copy of its state
        short = timing.measurement()
    finally:
        timing.worker.stop()
    assert short.workload.memory_bytes == 4 * 2**30
    assert (short.outcome, short.error) == (Outcome.OUT_OF_MEMORY, "saving needs 4.50 GiB of 4.00")
    assert short.peak_bytes == 4.5 * 2**30
    assert (short.seconds_per_env_step, short.env_steps_per_second, short.repeats) == (None, None, ()), "nothing may choose it"


_TAKES_ITS_ALLOCATION = """
from tuner.bridge import Config, allocated, enable_cache, measure_drift
from tuner.measuring.session import Session
import jax, json
from jax._src import xla_bridge

def threads():
    return {int(thread): open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")}

early = xla_bridge.backends_are_initialized()
with allocated(Config().replace({"allocation.cores": 1, "allocation.device_memory": 0.5})):
    jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))).block_until_ready()
    pool = sum(name.startswith("tf_XLAEigen") for name in threads().values())
    cores = {core for thread in threads() for core in os.sched_getaffinity(thread)}
    print(json.dumps([early, len(cores), os.environ["XLA_CLIENT_MEM_FRACTION"], pool]))
"""


def test_who_was_started_ahead_takes_its_allocation_before_a_device_is_touched() -> None:
    """XLA makes as many threads as there are cores then, and takes its share of an accelerator's memory."""
    late, born_with_it = (
        json.loads(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=120).stdout)
        for text in (f"import os{_TAKES_ITS_ALLOCATION}", f"import os; os.sched_setaffinity(0, [{FIRST}]){_TAKES_ITS_ALLOCATION}")
    )
    assert late == born_with_it
    assert late[:3] == [False, 1, "0.5"]


def test_a_worker_is_started_ahead_and_ends_with_the_block(tiny: Config) -> None:
    request, others = {"kind": "train", "config": tiny.to_dict(), "compile_cores": None}, set(usage.descendants())
    with started_ahead():
        (ahead,) = set(usage.descendants()) - others
        with Worker(request, timeout=120.0) as worker:
            assert worker.pid == ahead
            worker.answer()
            (spare,) = set(usage.descendants()) - others - {ahead}
            until = time.monotonic() + 10.0  # a busy machine takes a while to stop what runs
            while state_of(spare) != "T" and time.monotonic() < until:
                time.sleep(0.01)
            assert state_of(spare) == "T", "it could disturb who is timed"
            assert worker.ask(seconds=0.05, loop_count=1)["finite"]
            os.kill(spare, signal.SIGKILL)
            os.waitid(os.P_PID, spare, os.WEXITED | os.WNOWAIT)
        with Worker(request, timeout=120.0) as worker:
            assert worker.pid not in (ahead, spare), "it had ended"
            worker.answer()
    assert set(usage.descendants()) == others


def test_alternation_pairs_the_rounds(tiny: Config, machine: Hardware) -> None:
    slow = tiny.replace("search.num_simulations", 64)
    fast, slower = measure_in_alternation([tiny, slow], hardware=machine, rounds=5, seconds=0.05)
    assert len(fast.repeats) == len(slower.repeats) == 5
    ratios = sorted(b / a for a, b in zip(fast.repeats, slower.repeats, strict=True))
    assert paired_ratio(fast, slower) == ratios[2]
    assert paired_ratio(slower, fast) == pytest.approx(1.0 / ratios[2])


def test_alternation_ends_in_time_but_for_the_fewest_rounds(tiny: Config, machine: Hardware) -> None:
    began = time.monotonic()
    (late,) = measure_in_alternation([tiny], hardware=machine, rounds=5, fewest=2, until=began, seconds=0.05)
    assert len(late.repeats) == 2
    until = time.monotonic() + 600.0
    (early,) = measure_in_alternation([tiny], hardware=machine, rounds=5, fewest=2, until=until, seconds=0.05)
    assert len(early.repeats) == 5


def test_what_is_measured_beside_a_known_one_is_told_as_of_then(tiny: Config, machine: Hardware, workload: Workload) -> None:
    def known(seconds: float | None) -> Measurement:
        outcome = Outcome.CRASHED if seconds is None else Outcome.OK
        return Measurement(hardware=machine, workload=workload, outcome=outcome, seconds_per_env_step=seconds)

    # Beside itself, on a machine that is a million times as fast as it was then.
    then, now = (measure_beside(tiny, tiny, known(x), hardware=machine, rounds=3, seconds=0.05) for x in (1e3, None))
    assert 1e2 < then.seconds_per_env_step < 1e4
    assert then.seconds_per_env_step == pytest.approx(sorted(then.repeats)[1])
    assert then.env_steps_per_second == pytest.approx(1.0 / then.seconds_per_env_step)
    assert now.seconds_per_env_step < 1.0
    long = measure_beside(tiny, tiny, known(1e3), hardware=machine, rounds=3, seconds=0.05, enough=1e-6)
    assert len(long.repeats) == 1
    assert 1e2 < long.seconds_per_env_step < 1e4


def test_long_bursts_are_not_repeated_for_longer_than_is_enough(tiny: Config, machine: Hardware) -> None:
    alone = {"hardware": machine, "seconds": 0.05, "loop_counts": [8]}
    for found in measure_config(tiny, repeats=4, enough=1e-6, **alone):
        assert (found.outcome, len(found.repeats)) == (Outcome.OK, 1)
    assert [len(found.repeats) for found in measure_config(tiny, repeats=4, enough=60.0, **alone)] == [4, 4]


def test_a_run_beyond_its_memory_is_a_row(tiny: Config, machine: Hardware) -> None:
    config = tiny.replace({"replay.capacity": 40_000_000, "allocation.memory_gib": 0.75})
    (measurement,) = measure_config(config, hardware=machine, repeats=1)
    assert measurement.outcome == Outcome.OUT_OF_MEMORY
    assert "memory" in (measurement.error or "")
    assert measurement.seconds_per_env_step is None


def test_a_run_that_hangs_is_a_row(tiny: Config, machine: Hardware) -> None:
    before = time.monotonic()
    (measurement,) = measure_config(tiny, hardware=machine, timeout=0.5)  # importing JAX alone takes longer
    assert measurement.outcome == Outcome.TIMEOUT
    assert time.monotonic() - before < 30.0
    assert measurement.error == "no answer within 0.5 s"


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGSEGV, Outcome.CRASHED), (signal.SIGKILL, Outcome.OUT_OF_MEMORY)], ids=["crash", "killed"]
)
def test_a_run_that_dies_is_a_row(tiny: Config, machine: Hardware, number: int, expected: Outcome) -> None:
    timing = Timing(tiny, hardware=machine, timeout=120.0)
    with timing.worker:
        timing.wait()
        timing.burst(0.05)
        timing.worker.kill(number)
        timing.burst(0.05)
        measurement = timing.measurement()
    assert measurement.outcome == expected
    assert signal.Signals(number).name in (measurement.error or "")


def test_a_scheduler_that_ends_a_job_fails_no_trial(tiny: Config, machine: Hardware) -> None:
    """It tells every process. The tuner stops by itself, and what it was measuring has not failed."""
    timing = Timing(tiny, hardware=machine, timeout=120.0)
    with timing.worker:
        timing.wait()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            timing.worker.kill(number)
        timing.burst(0.05)
        measurement = timing.measurement()
    assert measurement.outcome == Outcome.OK, measurement.error


def test_an_exception_in_a_run_is_a_row(tiny: Config) -> None:
    request = {"kind": "train", "config": {**tiny.to_dict(), "env": "gymnax:NoSuch-v0"}, "compile_cores": None}
    with Worker(request, timeout=120.0) as worker, pytest.raises(WorkerFailed) as caught:
        worker.answer()
    assert caught.value.outcome == Outcome.CRASHED
    assert "NoSuch-v0" in caught.value.error


@pytest.mark.parametrize("said", ["garbage", "[1, 2]", "{'outcome': 'ok'", chr(0) * 100])
def test_what_prints_garbage_is_a_row(said: str) -> None:
    class Garbled(Worker):
        command = ("-c", f"input()\nprint({said!r})")  # not before it was asked: it would be gone by then

    with Garbled({}) as worker, pytest.raises(WorkerFailed, match="its answer is none") as caught:
        worker.answer()
    assert caught.value.outcome == Outcome.CRASHED
    assert "\n" not in str(caught.value)


def test_who_was_suspended_hears_what_came_meanwhile() -> None:
    """Its time was over when it went on, and the answer was there."""
    script = """
import time
from tuner.measuring.worker_client import Worker
class Slow(Worker):
    command = ("-c", "import time; input(); time.sleep(0.5); print('{}', flush=True); input()")
with Slow({}, timeout=2.0) as worker:
    print("asked", flush=True)
    print(worker.answer(), flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "asked\n"
        time.sleep(0.1)  # until it waits
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "{}\n"


def test_who_has_ended_before_it_is_asked_leaves_nothing_open() -> None:
    class Gone(Worker):
        command = ("-c", "import sys; sys.exit(3)")

        def _send(self, request: dict[str, Any]) -> None:
            self._process.popen.wait()  # as where this process has no core for a while
            super()._send(request)

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerFailed, match="exit code 3"):
        Gone({})
    gc.collect()  # an unclosed file would be an error
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("seconds", [0.001, 0.05])  # of bursts of one update, and of many
def test_a_loss_that_is_not_finite_is_a_row(tiny: Config, machine: Hardware, seconds: float) -> None:
    overflow = {"precision.level": "O1_float16", "precision.loss_scale": "static", "precision.initial_loss_scale": 2.0**40}
    config = tiny.replace({**overflow, "runtime.loop_count": 1})
    (measurement,) = measure_config(config, hardware=machine, repeats=2, seconds=seconds)
    assert (measurement.outcome, measurement.seconds_per_env_step) == (Outcome.NONFINITE, None)
    assert measurement.error == "no gradient was finite, or none for more updates in a row than may be"


def test_a_loss_scale_that_is_yet_to_be_found_is_no_failure(tiny: Config, machine: Hardware) -> None:
    """It takes 30 updates that are left out, which cost what others do; bursts of one update have none but these."""
    found = {"precision.level": "O1_float16", "precision.initial_loss_scale": 2.0**30, "runtime.loop_count": 1}
    (measurement,) = measure_config(tiny.replace(found), hardware=machine, repeats=2, seconds=0.001)
    assert (measurement.outcome, measurement.error) == (Outcome.OK, None)


def test_a_worker_dies_with_its_parent(tiny: Config) -> None:
    request = json.dumps({"kind": "train", "config": tiny.to_dict(), "compile_cores": None})
    program = (
        "import sys, json, time\nfrom tuner.measuring.worker_client import Worker\n"
        f"worker = Worker(json.loads({request!r}))\n"
        "print(worker.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1.0)  # until it has asked to die with its parent
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        try:
            state = state_of(child)
        except FileNotFoundError:
            return
        if state == "Z":  # dead, and nobody has asked how
            return
        time.sleep(0.1)
    pytest.fail("the worker is still alive")


# Told by what compiling took: quick programs of a test are, on a busy machine, next to what is too small to be kept.
@pytest.mark.usefixtures("compiling_as_users_do")
def test_a_measurement_says_whether_its_programs_had_been_compiled(
    tiny: Config, machine: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    # Read when jax is imported: the worker's, which is another process.
    first, again = (measure_config(tiny, hardware=machine, repeats=1, seconds=0.05)[0] for _ in range(2))
    assert (first.from_cache, again.from_cache) == (False, True), (first.compile_seconds, again.compile_seconds)
    assert again.compile_seconds < first.compile_seconds


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_cores_are_lent_until_the_program_is_compiled(tiny_threads: Config, machine: Hardware) -> None:
    """And then every thread, of every process, is kept to its own."""
    narrow = tiny_threads.replace({"allocation.cores": 1, "runtime.step_in": "process"})
    timing = Timing(narrow, hardware=machine, timeout=120.0, compile_cores=2)
    with timing.worker:
        timing.wait()
        processes = [timing.worker.pid, *(pid for pid in usage.descendants() if pid != timing.worker.pid)]
        threads = [int(thread) for pid in processes for thread in os.listdir(f"/proc/{pid}/task")]
        cores = {core for thread in threads for core in os.sched_getaffinity(thread)}
        timing.burst(0.05)
        measurement = timing.measurement()
    assert len(processes) > 2  # simulators
    assert len(threads) > 8
    assert len(cores) == 1
    assert (measurement.outcome, measurement.compile_cores) == (Outcome.OK, 2)
    assert measurement.workload.cores == 1


def test_who_has_as_many_cores_is_lent_none(tiny: Config, machine: Hardware) -> None:
    (found,) = measure_config(tiny, hardware=machine, repeats=1, seconds=0.05, compile_cores=CORES)
    assert (found.outcome, found.compile_cores) == (Outcome.OK, None)


def test_what_is_hopeless_is_not_timed_to_the_end(tiny: Config, machine: Hardware) -> None:
    slow, *_ = measure_config(tiny, hardware=machine, repeats=4, seconds=0.05, hopeless=1e-9)
    assert slow.outcome == Outcome.OK
    assert len(slow.repeats) == HOPELESS_BURSTS
    fine, *_ = measure_config(tiny, hardware=machine, repeats=4, seconds=0.05, hopeless=1e3)
    assert len(fine.repeats) == 4


WARM = [(8.0, 0.9, True), (0.3, 6.0, False), (0.0, 0.0, False), (-0.1, 0.2, False)]


@pytest.mark.parametrize(("saved", "compiled", "warm"), WARM)
def test_a_start_is_warm_by_the_seconds_it_was_spared(saved: float, compiled: float, warm: bool) -> None:
    with cache_use() as spared_much:
        jax.monitoring.record_event_duration_secs("/jax/compilation_cache/compile_time_saved_sec", saved)
        jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", compiled)
        assert spared_much() is warm
