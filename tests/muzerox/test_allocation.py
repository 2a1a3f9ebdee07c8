"""An allocation is really applied, and one beyond the machine is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

from muzerox import allocation
from muzerox.config import AllocationConfig
from muzerox.errors import ConfigError, RunFailed

CORES = len(allocation.available_cores())


def affinities() -> set[frozenset[int]]:
    """The cores of every thread of this process."""
    return {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")}


def test_every_thread_keeps_to_the_cores_and_gets_them_back() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        before = allocation.available_cores()
        with allocation.applied(AllocationConfig(cores=1)):
            assert affinities() == {frozenset(before[:1])}
        assert affinities() == {frozenset(before)}
    finally:
        stop.set()
        thread.join()


def test_what_is_lent_is_taken_back() -> None:
    """From threads that were there before, and from those that began meanwhile."""
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(2)]
    threads[0].start()
    try:
        before = allocation.available_cores()
        with allocation.applied(AllocationConfig(cores=1)):
            with allocation.lent(before):
                assert affinities() == {frozenset(before)}
                threads[1].start()
            assert affinities() == {frozenset(before[:1])}
        assert affinities() == {frozenset(before)}
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_nothing_is_limited_without_an_allocation() -> None:
    before = affinities()
    with allocation.applied(AllocationConfig()):
        assert affinities() == before


MEMORY = """
import time
from muzerox import allocation
from muzerox.config import AllocationConfig
import jax, jax.numpy as jnp
with allocation.applied(AllocationConfig(memory_gib=1.0)):
    jax.block_until_ready(jnp.ones(2**20))
print("within", flush=True)
beyond = jax.block_until_ready(jnp.ones(2**29))  # 2 GiB, not limited any more
time.sleep(0.5)
print("not limited", flush=True)
with allocation.applied(AllocationConfig(memory_gib=1.0)):
    time.sleep(60)
print("never")
"""


def test_a_process_beyond_its_memory_ends_with_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["within", "not limited"]
    assert done.stderr.startswith("out of memory: the process holds 2.")
    assert done.stderr.endswith("its allocation is 1.00 (allocation.memory_gib)\n")
    assert len(done.stderr.splitlines()) == 1


DEVICE = """
import os
from muzerox import allocation
from muzerox.config import AllocationConfig
import jax
with allocation.applied(AllocationConfig(device_memory=0.25)):
    print(os.environ["XLA_CLIENT_MEM_FRACTION"], jax.device_count())
with allocation.applied(AllocationConfig(device_memory=0.25)):
    print("the same again")
try:
    with allocation.applied(AllocationConfig(device_memory=0.5)):
        print("never")
except ValueError as error:
    print("JAX has already started" in str(error))
"""


def test_a_share_of_the_accelerator_is_taken_before_jax_starts_or_refused() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-c", DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert done.stdout.splitlines() == ["0.25 1", "the same again", "True"]


@pytest.mark.parametrize(
    ("named", "there", "visible"),
    [
        (None, 3, ["0", "1", "2"]),
        ("2,0", 3, ["2", "0"]),
        ("GPU-8932f937", 3, ["GPU-8932f937"]),
        ("", 3, []),
        ("-1", 3, []),
        ("0", 0, []),
        (None, 11, [str(n) for n in range(11)]),  # in the order of numbers
    ],
)
def test_gpus_are_those_of_the_machine_or_of_them_those_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str | None, there: int, visible: list[str]
) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{n}" for n in range(there))):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert allocation.visible_gpus(str(tmp_path)) == visible


def test_a_container_numbers_the_gpus_that_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in (3, 5):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert allocation.visible_gpus(str(tmp_path)) == ["0", "1"]


VISIBLE = """
import functools, os, sys
from muzerox import allocation
from muzerox.config import AllocationConfig
allocation.visible_gpus = functools.partial(allocation.visible_gpus, sys.argv[1])  # the files of a machine with four
import jax
with allocation.applied(AllocationConfig(devices=2)):
    print(os.environ["CUDA_VISIBLE_DEVICES"], jax.device_count())
with allocation.applied(AllocationConfig(devices=2)):
    print("the same again")
for devices in (1, 3):
    try:
        with allocation.applied(AllocationConfig(devices=devices)):
            print("never")
    except ValueError as error:
        print(error)
"""


def test_gpus_are_hidden_before_jax_starts_or_it_is_refused(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"nvidia{number}").touch()
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES")}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-c", VISIBLE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    first, again, late, more = done.stdout.splitlines()
    assert (first, again) == ("0,1 1", "the same again")
    assert "JAX has already started" in late
    assert more == "allocation.devices = 3: this process may use 2 GPUs; nearest valid: 2"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"cores": CORES + 1}, "allocation.cores"),
        ({"memory_gib": 1e6}, "allocation.memory_gib"),
        ({"devices": 4096}, "allocation.devices"),
    ],
)
def test_more_than_the_machine_has_is_refused(given: dict[str, float], path: str) -> None:
    with pytest.raises(ConfigError, match="nearest valid") as caught, allocation.applied(AllocationConfig(**given)):
        pass
    assert caught.value.path == path


@pytest.mark.parametrize("env", ["gymnax:CartPole-v1", "gymnasium:CartPole-v1"])
def test_a_replay_that_its_memory_cannot_hold_is_refused_with_what_would_fit(
    tmp_path: Path, tiny_options: list[str], env: str
) -> None:
    command = [sys.executable, "-m", "muzerox", "train", "--env", env, *tiny_options, "--out", str(tmp_path / "run")]
    command += ["--set", "allocation.memory_gib=1.0", "--set", "replay.capacity=40000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "replay.capacity = 40000000: takes " in line
    assert "allocation.memory_gib" in line
    assert 10**6 < int(line.rpartition("nearest valid: ")[2]) < 15 * 10**6
    assert not (tmp_path / "run").exists()


def test_a_training_that_needs_more_than_its_memory_says_so_in_one_line(tmp_path: Path, tiny_options: list[str]) -> None:
    # Enough to start Python and JAX and for a replay of 0.8 GiB, not for both.
    command = [sys.executable, "-m", "muzerox", "train", *tiny_options, "--out", str(tmp_path / "run")]
    command += ["--set", "allocation.memory_gib=1.0", "--set", "replay.capacity=16000000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    assert "out of memory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_training_runs_on_its_cores(tmp_path: Path, tiny_options: list[str]) -> None:
    code = (
        "import sys, os, json, muzerox; from muzerox import training\n"
        "seen = []\n"
        "go = training._Session.go\n"
        "def spy(self, **options):\n"
        "    seen.append(len(os.sched_getaffinity(0)))\n"
        "    return go(self, **options)\n"
        "training._Session.go = spy\n"
        "from muzerox.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(json.dumps([code, seen, len(os.sched_getaffinity(0))]), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", code, "train", *tiny_options, "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run([*command, "--set", "allocation.cores=1"], capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(done.stderr.splitlines()[-1]) == [0, [1], CORES]


def test_a_device_that_runs_out_is_told_in_one_line() -> None:
    with (
        pytest.raises(RunFailed, match=r"^cpu is out of memory \(RESOURCE_EXHAUSTED: Out of memory\); play less$"),
        allocation.running_out("play less"),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nby allocating 1 TiB")
    with pytest.raises(jax.errors.JaxRuntimeError, match="another"), allocation.running_out("play less"):
        raise jax.errors.JaxRuntimeError("INTERNAL: another")
