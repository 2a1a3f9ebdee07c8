"""What XLA is told of the programs that train and play, and what is traced to make them."""

from __future__ import annotations

import collections
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pipelines import HOST, pipeline_config
from toys import counting_env, idle_algorithm, small_config

from muzerox.compilation import compiler_options
from muzerox.config import Config
from muzerox.runtimes import make_runtime

LEAVE = """
import sys, time
from muzerox.compilation import compile_beside, leave

class Slow:
    def lower(self):
        return self

    def compile(self):
        time.sleep(float(sys.argv[1]))

wait = compile_beside(Slow())
if len(sys.argv) > 2:
    wait()
print("left")  # not flushed
leave(3)
"""


@pytest.mark.parametrize("arguments", [["300"], ["0", "wait"]])
def test_leaving_waits_for_no_compilation(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "left\n", "")


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_nothing_but_a_device_of_one_thread_is_told_anything(backend: str) -> None:
    assert compiler_options(None, backend) is None
    assert compiler_options(2, backend) is None
    assert compiler_options(1, backend) is not None


@pytest.mark.parametrize("options", [compiler_options(1), compiler_options(None, "gpu")], ids=["one thread", "gpu"])
def test_xla_knows_the_options(options: dict[str, object]) -> None:
    """XLA has those of every device everywhere, and refuses what it does not know."""
    program = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: 2.0 * x, x), compiler_options=options)
    assert program(jnp.float32(1.0)) == 8.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={name + "s": value for name, value in options.items()})(1.0)


def test_a_gpu_runs_loops_as_graphs_unless_the_user_says_what_graphs_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    options = compiler_options(None, "gpu")
    assert options is not None
    assert "WHILE" in options["xla_gpu_enable_command_buffer"].split(",")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    assert compiler_options(None, "gpu") is None


ANAKIN = small_config("toy:counting", runtime__kind="anakin")


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(ANAKIN, id="anakin"),
        pytest.param(ANAKIN.replace({"runtime.num_devices": 2}), id="two devices"),
        pytest.param(ANAKIN.replace({"replay.placement": "host"}), id="replay on the host"),
        pytest.param(pipeline_config(), id="sebulba"),
    ],
)
def test_searches_and_losses_are_traced_once(config: Config) -> None:
    """A trace takes half a second or more of every start."""
    traced: collections.Counter[str] = collections.Counter()
    env: Any = HOST if config.runtime.kind == "sebulba" else counting_env()
    algorithm = idle_algorithm(config)

    def counted(name: str) -> Any:
        def call(*args: Any) -> Any:
            traced[name] += 1
            return getattr(algorithm, name)(*args)

        return call

    runtime = make_runtime(config, env, algorithm._replace(act=counted("act"), loss=counted("loss")))
    try:
        runtime.run(runtime.init(jax.random.key(0)), 1)
    finally:
        runtime.close()
    assert traced == {"act": 1, "loss": 1}
