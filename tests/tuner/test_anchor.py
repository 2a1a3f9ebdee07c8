"""The process that a tuning measures its trials beside: what they are told as of, and when it is of no use."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from predictor import Hardware, Measurement, Outcome, Workload
from tuner.bridge import Config
from tuner.measuring.anchor import Anchor
from tuner.measuring.measure import HOPELESS_BURSTS, measure_config


def known(machine: Hardware, workload: Workload, seconds: float, **fields: object) -> Measurement:
    measured = Measurement(hardware=machine, workload=workload, outcome=Outcome.OK, seconds_per_env_step=seconds, peak_bytes=1e8)
    return dataclasses.replace(measured, **fields)


def test_trials_are_told_as_of_when_the_start_was_measured(tiny: Config, machine: Hardware, workload: Workload) -> None:
    said: list[str] = []
    with Anchor(hardware=machine, say=said.append) as anchor:
        # Another process found the machine to be a million times as slow as it is now.
        start = tiny, known(machine, workload, 1e3), 120.0
        reference = anchor.beside(*start)
        assert reference is not None
        bursts = {"hardware": machine, "repeats": 4, "seconds": 0.05, "reference": reference}
        for found in measure_config(tiny, loop_counts=[8], hopeless=3e3, **bursts):
            assert found.seconds_per_env_step is not None
            assert 1e2 < found.seconds_per_env_step < 1e4
            assert found.env_steps_per_second == pytest.approx(1.0 / found.seconds_per_env_step)
            # A step of environments in so many updates, whatever seconds are told.
            steps_an_update = tiny.train.batch_size / float(tiny.replay_ratio)
            assert found.updates_per_second == pytest.approx(found.env_steps_per_second / steps_an_update, rel=0.3)
            assert len(found.repeats) == 4
        # As many times as hopeless: what is hopeless is told as of then, too.
        (slow,) = measure_config(tiny, hopeless=1.0, **bursts)
        assert len(slow.repeats) == HOPELESS_BURSTS
        # It is gone in the middle of a trial: which is told as it was measured, and the next has none.
        reference.timing.worker.kill(signal.SIGKILL)
        (alone,) = measure_config(tiny, **bursts)
        assert alone.outcome == Outcome.OK
        assert alone.seconds_per_env_step < 1.0
        assert said == []
        assert anchor.beside(*start) is None
        assert len(said) == 1
        assert "SIGKILL" in said[0]
        assert anchor.beside(*start) is None
        assert len(said) == 1


def nothing_ended(text: str) -> None:
    """Of the start's process nothing is said; other programs may be at work beside the tests."""
    assert text.startswith("other programs take "), text


BURSTS = {"seconds": 0.05, "enough": 60.0, "timeout": 120.0}
NO_USE = [{"peak_bytes": 1e18}, {"outcome": Outcome.CRASHED}, {"peak_bytes": None}]


@pytest.mark.parametrize("fields", NO_USE, ids=["it holds much memory", "it failed", "nobody knows what it holds"])
def test_what_would_stand_in_the_way_is_no_anchor(
    tiny: Config, machine: Hardware, workload: Workload, fields: dict[str, object]
) -> None:
    with Anchor(hardware=machine, say=nothing_ended) as anchor:
        assert anchor.beside(tiny, known(machine, workload, 1e3, **fields), 120.0) is None
        assert anchor._timing is None, "nobody waits for it"


def test_threads_are_an_anchor_too(tiny_threads: Config, machine: Hardware) -> None:
    with Anchor(hardware=machine, say=nothing_ended) as anchor:
        (first,) = anchor.measure(tiny_threads, **BURSTS, loop_counts=[])
        assert first.outcome == Outcome.OK
        reference = anchor.beside(tiny_threads, first, 120.0)
        assert reference is not None
        (other,) = measure_config(tiny_threads, hardware=machine, repeats=3, seconds=0.05, reference=reference)
        assert other.outcome == Outcome.OK
        assert first.seconds_per_env_step / 3 < other.seconds_per_env_step < first.seconds_per_env_step * 3


def test_whose_bursts_are_long_is_not_kept(tiny: Config, machine: Hardware, workload: Workload) -> None:
    with Anchor(hardware=machine, say=nothing_ended) as anchor:
        timing = anchor._start(tiny, 120.0)
        timing.ready["shortest_burst"] = 2.0
        anchor._keep(timing, known(machine, workload, 1e-3))
        assert anchor.beside(tiny, known(machine, workload, 1e-3), 120.0) is None
        assert not timing.worker.is_alive


def test_the_anchor_is_what_the_start_is_measured_in(tiny: Config, machine: Hardware) -> None:
    with Anchor(hardware=machine, say=nothing_ended) as anchor:
        first, other = anchor.measure(tiny, **BURSTS, loop_counts=[8])
        assert (first.workload.loop_count, other.workload.loop_count) == (float(tiny.runtime.loop_count), 8.0)
        reference = anchor.beside(tiny, first, 120.0)
        assert reference is not None
        assert reference.then == first.seconds_per_env_step
        assert reference.timing.burst(0.05) is not None  # it is alive
    assert anchor.beside(tiny, first, 120.0) is None
    assert not reference.timing.worker.is_alive
