"""Simulators in processes of their own: the same numbers, and what hangs, dies or is left behind."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from muzerox.envs import in_process, make_env, on_host
from muzerox.envs import process as process_module
from muzerox.envs.process import SimulatorError
from muzerox.errors import EnvironmentUnavailable
from muzerox.types import HostBatch, TimeStep

HOSTILE = "gymnasium:host_simulators:Hostile-v0"
HERE = Path(__file__).parent


def goes(pid: int, seconds: float = 5.0) -> bool:
    """Whether the process is gone within so many seconds; one that waits to be reaped is not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def act(action: int) -> np.ndarray:
    return np.array([action], np.int32)


@pytest.fixture
def hostile() -> Iterator[tuple[HostBatch, int]]:
    """One hostile simulator and the id of its process."""
    batch = in_process(HOSTILE, 1, 0, timeout=1.0)
    yield batch, int(batch.reset().observation[0, 0])
    batch.close()


def same(one: TimeStep, other: TimeStep) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("env_id", ["gymnasium:CartPole-v1", "gymnasium:host_simulators:Both-v0", "ale:Breakout?threads=1"])
def test_plays_as_in_this_process(env_id: str) -> None:
    env = make_env(env_id)
    generator = np.random.default_rng(0)
    here, there = env.make(3, 7), in_process(env_id, 3, 7, timeout=20.0)
    same(here.reset(), there.reset())
    kept = []
    for _ in range(40):
        action = generator.integers(0, env.spec.num_actions, 3).astype(np.int32)
        kept.append((here.step(action), there.step(action)))
    for one, other in kept:  # all at the end: later steps leave the arrays alone
        same(one, other)
    same(here.reset(), there.reset())
    here.close()
    there.close()


def test_a_game_in_jax() -> None:
    """Legal moves, turns and dtypes come through; the child compiles before it says that it is ready."""
    env_id = "pgx:tic_tac_toe"
    here, there = on_host(make_env(env_id)).make(2, 0), in_process(env_id, 2, 0, timeout=5.0)
    same(here.reset(), there.reset())
    for action in ([0, 4], [1, 4], [2, 0]):
        same(here.step(np.array(action)), there.step(np.array(action)))
    there.close()


def test_evaluation_environments() -> None:
    env_id = "ale:Assault?threads=1"
    env = make_env(env_id)
    assert env.make_evaluation is not None
    here, there = env.make_evaluation(1, 0), in_process(env_id, 1, 0, timeout=20.0, evaluation=True)
    same(here.reset(), there.reset())
    rewards, generator = [], np.random.default_rng(0)
    for _ in range(16):
        action = act(generator.integers(env.spec.num_actions))
        one, other = here.step(action), there.step(action)
        same(one, other)
        rewards.append(float(one.reward[0]))
    assert max(rewards) > 1.0  # as the game scores
    there.close()


def test_a_process_without_jax(hostile: tuple[HostBatch, int]) -> None:
    batch, pid = hostile
    assert pid != os.getpid()
    assert batch.step(act(0)).observation[0, 1] == 0.0


@pytest.mark.parametrize("action", [1, 2], ids=["asleep", "with the lock of the interpreter"])
def test_a_hanging_step_times_out(hostile: tuple[HostBatch, int], action: int) -> None:
    batch, pid = hostile
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"Hostile-v0 \(1 environments\): step took longer than 1 seconds"):
        batch.step(act(action))
    assert time.monotonic() - start < 5.0
    assert goes(pid)
    with pytest.raises(RuntimeError, match="closed"):
        batch.step(act(0))
    with pytest.raises(RuntimeError, match="closed"):
        batch.reset()
    batch.close()


def test_a_hanging_reset_times_out() -> None:
    batch = in_process("gymnasium:host_simulators:HostileReset-v0", 1, 0, timeout=0.3)
    with pytest.raises(TimeoutError, match=r"reset took longer than 0\.3 seconds"):
        batch.reset()


@pytest.mark.parametrize(("action", "how"), [(3, "ended with exit code 7"), (4, "was ended by signal SIGKILL")])
def test_a_process_that_dies(hostile: tuple[HostBatch, int], action: int, how: str) -> None:
    batch, pid = hostile
    with pytest.raises(RuntimeError, match=f"its process {how} during step"):
        batch.step(act(action))
    assert goes(pid)


def test_killed_from_outside(hostile: tuple[HostBatch, int]) -> None:
    batch, pid = hostile
    os.kill(pid, signal.SIGSEGV)
    with pytest.raises(RuntimeError, match="was ended by signal SIGSEGV"):
        batch.step(act(0))


def test_an_exception_comes_with_its_traceback(hostile: tuple[HostBatch, int]) -> None:
    batch, pid = hostile
    with pytest.raises(SimulatorError, match="ValueError: the simulator broke") as caught:
        batch.step(act(5))
    assert 'raise ValueError("the simulator broke")' in str(caught.value)
    assert "host_simulators.py" in str(caught.value)
    assert goes(pid)


def test_a_connection_of_the_simulators_own_that_breaks_is_told(hostile: tuple[HostBatch, int]) -> None:
    """It is not ours that was closed."""
    batch, pid = hostile
    with pytest.raises(SimulatorError, match="ConnectionResetError: its server hung up"):
        batch.step(act(7))
    assert goes(pid)


def test_a_failing_close_does_not_hide_what_had_failed() -> None:
    batch = in_process("gymnasium:host_simulators:Brittle-v0", 2, 0, timeout=20.0)
    batch.reset()
    with pytest.raises(SimulatorError, match=r"^[^\n]*\(2 environments\): ValueError: the simulator broke"):
        batch.step(act(2))  # its actions begin with 1


def test_an_interrupt_is_left_to_the_parent(hostile: tuple[HostBatch, int]) -> None:
    batch, pid = hostile
    batch.step(act(6))
    os.kill(pid, signal.SIGINT)
    assert batch.step(act(0)).observation[0, 0] == pid


def test_an_interrupted_step_ends_the_process(hostile: tuple[HostBatch, int]) -> None:
    """Otherwise the answer to it would be taken for that to the next."""
    batch, pid = hostile
    main = threading.get_ident()
    timer = threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            batch.step(act(1))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert goes(pid)


@pytest.mark.parametrize("env_id", ["gymnasium:Nothing-v0", "gymnasium:host_simulators:Tuple-v0", "ale:Pong?threads=-1"])
def test_ids_are_refused_in_the_same_words(env_id: str) -> None:
    with pytest.raises(EnvironmentUnavailable) as here:
        make_env(env_id)
    with pytest.raises(EnvironmentUnavailable) as there:
        in_process(env_id, 1, 0, timeout=1.0)
    assert str(there.value) == str(here.value)


def test_a_step_before_reset_and_actions_of_another_shape() -> None:
    batch = in_process("gymnasium:CartPole-v1", 2, 0, timeout=5.0)
    with pytest.raises(RuntimeError, match="step before reset"):
        batch.step(np.zeros(2, np.int32))
    batch.reset()
    with pytest.raises(ValueError, match="could not broadcast"):
        batch.step(np.zeros(3, np.int32))
    batch.step(np.zeros(2, np.int32))
    batch.close()


# Nothing is left behind


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_close_ends_the_process(hostile: tuple[HostBatch, int]) -> None:
    batch, pid = hostile
    batch.close()
    assert goes(pid, 0.1)  # reaped too
    batch.close()
    with pytest.raises(RuntimeError, match="closed"):
        batch.step(act(0))


def test_close_from_another_thread_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_GRACE_SECONDS", 0.3)
    batch = in_process(HOSTILE, 1, 0, timeout=60.0)
    pid = int(batch.reset().observation[0, 0])
    timer = threading.Timer(0.2, batch.close)
    timer.start()
    with pytest.raises(RuntimeError, match="closed"):
        batch.step(act(1))
    timer.join()
    assert goes(pid, 0.1)


def test_close_ends_a_process_that_does_not_want_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "_GRACE_SECONDS", 0.3)
    batch = in_process("gymnasium:host_simulators:Stubborn-v0", 1, 0, timeout=5.0)
    pid = int(batch.reset().observation[0, 0])
    batch.close()
    assert goes(pid, 0.1)


def test_a_batch_that_is_dropped_takes_its_process_along() -> None:
    batch = in_process(HOSTILE, 1, 0, timeout=5.0)
    pid = int(batch.reset().observation[0, 0])
    del batch
    gc.collect()
    assert goes(pid)


def test_no_file_stays_open() -> None:
    def once(end: Callable[[HostBatch], Any]) -> None:
        batch = in_process(HOSTILE, 1, 0, timeout=1.0)
        batch.reset()
        end(batch)

    def hang(batch: HostBatch) -> None:
        with pytest.raises(TimeoutError):
            batch.step(act(1))

    def die(batch: HostBatch) -> None:
        with pytest.raises(RuntimeError):
            batch.step(act(3))

    once(lambda batch: batch.close())
    gc.collect()
    before, shared = open_files(), os.listdir("/dev/shm")
    for end in (lambda batch: batch.close(), hang, die):
        once(end)
    with pytest.raises(EnvironmentUnavailable):
        in_process("gymnasium:Nothing-v0", 1, 0, timeout=1.0)
    gc.collect()
    assert open_files() == before
    assert os.listdir("/dev/shm") == shared


def test_outlives_the_thread_that_made_it() -> None:
    """Batches are made in threads and may be handed on when a thread ends."""
    made: list[HostBatch] = []
    threads = [threading.Thread(target=lambda: made.append(in_process(HOSTILE, 1, 0, timeout=5.0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = {int(batch.reset().observation[0, 0]) for batch in made}
    assert len(pids) == 2
    for batch in made:
        batch.step(act(0))
        batch.close()
    assert all(goes(pid) for pid in pids)


PARENT = f"""
import sys, threading
sys.path.insert(0, {str(HERE)!r})
import numpy as np
from muzerox.envs import in_process
batch = in_process({HOSTILE!r}, 1, 0, timeout=60.0)
print(int(batch.reset().observation[0, 0]), flush=True)
if sys.argv[1] != "leave":
    batch.step(np.array([int(sys.argv[1])]))
"""


def parent(what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PARENT, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("action", ["1", "2"], ids=["asleep", "with the lock of the interpreter"])
def test_dies_with_a_parent_that_is_killed(action: str) -> None:
    with parent(action) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        time.sleep(0.2)
        assert not goes(pid, 0.1)
        process.kill()
        assert goes(pid)


def test_a_parent_that_ends_without_close_says_nothing() -> None:
    with parent("leave") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert goes(int(out))


PLAY = """
from muzerox.envs import in_process, make_env

assert make_env("gymnasium:corridor:Corridor-v0").spec.num_actions == 2
batch = in_process("gymnasium:corridor:Corridor-v0", 2, 0, 60.0)
print(batch.reset().observation.shape)
batch.close()
"""


def test_a_simulator_may_lie_in_the_working_directory(tmp_path: Path) -> None:
    """The one that docs/howto.md shows."""
    howto = (Path(__file__).parents[2] / "docs" / "howto.md").read_text()
    shown = re.search(r"<!-- corridor.py -->\s*```python\n(.*?)```", howto, re.S)
    assert shown is not None
    (tmp_path / "corridor.py").write_text(shown[1])
    (tmp_path / "numpy.py").write_text("raise SystemExit('what lies here hides what is installed')")
    # -P: without the folder of the script, or the working directory, as the installed command is.
    done = subprocess.run([sys.executable, "-P", "-c", PLAY], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "(2, 10)\n"), done.stderr
