"""What the pipeline tells of itself: failures, starts that were overwritten, updates that were skipped."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest
from pipelines import HOST, make, pipeline_config

from muzerox.errors import RunFailed
from muzerox.runtimes.sebulba.meter import Meter
from muzerox.types import HostBatch, HostEnvironment, Skips


@pytest.mark.parametrize(
    ("hangs", "said"),
    [
        (False, "ValueError: the simulator broke"),
        (True, r"its environments took longer than 0\.3 seconds to close, after ValueError\('the simulator broke'\)"),
    ],
)
def test_a_failing_close_does_not_hide_what_had_failed(hangs: bool, said: str) -> None:
    released = threading.Event()

    def build(num_envs: int, seed: int) -> HostBatch:
        def step(_: Any) -> Any:
            raise ValueError("the simulator broke")

        def close() -> None:
            if hangs:
                released.wait(60)
            raise OSError("and cannot be closed")

        return HOST.make(num_envs, seed)._replace(step=step, close=close)

    runtime = make(pipeline_config(runtime__max_failures=2, runtime__step_timeout=0.3), HostEnvironment(HOST.spec, build))
    with pytest.raises(RunFailed, match=f"failed 2 times in a row; the last: {said}$"):
        runtime.run(runtime.init(jax.random.key(0)), 1)
    released.set()
    runtime.close()


def test_warming_up_counts_no_overwritten_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search worker compiles by reading rows that a ring which has gone round has no more."""
    config = pipeline_config(train__max_env_steps=10_000, train__reanalyze_fraction=0.5, replay__capacity=256)
    runtime = make(config)
    state, report = runtime.run(runtime.init(jax.random.key(0)), 100)
    saved = jax.tree.map(np.asarray, runtime.snapshot(state).replace(key=None)).replace(key=state.key)
    runtime.close()
    assert (saved.replay.count > 32).all()
    counted, add = [], Meter.add

    def watch(meter: Meter, name: str, amount: float = 1.0) -> None:
        add(meter, name, amount)
        counted.append((name, amount))

    monkeypatch.setattr(Meter, "add", watch)
    again = make(config)
    _, resumed = again.run(saved, 1)
    again.close()
    assert resumed.updates == report.updates + 3
    assert ("overwritten_starts", config.train.batch_size) not in counted  # of a batch that was drawn never all are late
    assert any(name == "bytes_batches" for name, _ in counted)


def test_skipped_updates_are_counted_and_those_in_a_row() -> None:
    """A dynamic scale that starts far too high: the first updates overflow, however they are portioned out."""
    config = pipeline_config(precision__level="O1_float16", precision__initial_loss_scale=2.0**40, train__max_env_steps=10_000)
    runtime = make(config)
    state, skips, reports = runtime.init(jax.random.key(0)), Skips(), []
    for n, count in ((1, 1), (2, 3), (1, 2), (10, 3)):
        state, report = runtime.run(state, n, count)
        skips = skips.then(report.skips)
        reports.append(report)
    runtime.close()
    assert skips.updates == report.updates == 39
    assert 10 <= skips.first == skips.longest <= skips.total
    assert [bool(r.metrics) for r in reports] == [False, False, False, True]
