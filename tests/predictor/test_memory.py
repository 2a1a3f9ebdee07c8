"""What lies in whose memory, and what was learnt of either from runs that did not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from predictor import STAGES, Hardware, Measurement, Outcome, RuntimePredictor, Workload, hardware_rates, resident_bytes, stages
from predictor.memory import device_bytes, fits, host_bytes, replay_resident_bytes, saved_bytes

Make = Callable[..., Workload]
IMAGES = {"capacity": 1e6, "observation_bytes": 1600.0}
EXHAUSTED = "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."


@pytest.fixture(scope="module")
def gpu(hardware: Hardware) -> Hardware:
    return dataclasses.replace(hardware, platform="gpu", device_memory_bytes=32 * 2**30)


def test_a_ring_that_keeps_what_a_step_led_to_is_as_much_larger(make_workload: Make, hardware: Hardware) -> None:
    """Where episodes may be truncated, in one program too: the ring, its copy, and what is written a step."""
    once, twice = (make_workload(**IMAGES, stored_observations=n) for n in (1.0, 2.0))
    assert float(replay_resident_bytes(once)) == pytest.approx(1e6 * (1600 + 8 + 20), rel=1e-6)
    more = 1e6 * 1600.0
    for size in (replay_resident_bytes, resident_bytes, saved_bytes):
        assert float(size(twice)) - float(size(once)) == pytest.approx(more, rel=1e-3)
    written = [np.asarray(stages(w, hardware_rates(hardware)))[STAGES.index("replay_bytes")] for w in (once, twice)]
    assert written[1] - written[0] == pytest.approx(1600.0 / 5e10, rel=1e-2)


@pytest.mark.parametrize("placement", [0.0, 1.0])
def test_a_ring_lies_where_it_was_placed(make_workload: Make, hardware: Hardware, gpu: Hardware, placement: float) -> None:
    w = make_workload(**IMAGES, replay_on_host=placement)
    ring, everything, saved = (float(size(w)) for size in (replay_resident_bytes, resident_bytes, saved_bytes))
    there = hardware_rates(gpu)
    assert float(device_bytes(w, there)) == pytest.approx(everything - placement * ring, abs=1e3)  # float32
    assert float(host_bytes(w, there)) == pytest.approx(saved + placement * ring, rel=1e-5)
    # A processor has no other memory.
    here = hardware_rates(hardware)
    assert float(host_bytes(w, here)) == pytest.approx(saved + everything, rel=1e-5)
    assert float(device_bytes(w, here)) == pytest.approx(everything, rel=1e-5)


def test_a_ring_that_an_accelerator_cannot_hold_fits_beside_it(make_workload: Make, gpu: Hardware) -> None:
    small = dataclasses.replace(gpu, device_memory_bytes=2**30)
    there, beside = (make_workload(**IMAGES, replay_on_host=placement) for placement in (0.0, 1.0))
    model = RuntimePredictor()
    found = [model.predict(w, small) for w in (there, beside)]
    assert [one.outcome for one in found] == [Outcome.OUT_OF_MEMORY, Outcome.OK]
    assert found[1].peak_bytes > found[0].peak_bytes
    assert [bool(fits(w, hardware_rates(small), 1e9, np.inf)) for w in (there, beside)] == [False, True]
    # And one that the host cannot hold does not.
    poor = dataclasses.replace(gpu, memory_bytes=3 * 2**30)
    assert [model.predict(w, poor).outcome for w in (there, beside)] == [Outcome.OK, Outcome.OUT_OF_MEMORY]


@pytest.fixture
def run_out(measure: Callable[..., Measurement], make_workload: Make, gpu: Hardware) -> Callable[..., RuntimePredictor]:
    """A predictor calibrated by a run that went well and a larger one that did not."""

    def calibrated(error: str, **changes: float) -> RuntimePredictor:
        failed = measure(make_workload(capacity=1e8, **changes), None, hardware=gpu, outcome=Outcome.OUT_OF_MEMORY, error=error)
        return RuntimePredictor().calibrate([measure(make_workload(), 1e-4, hardware=gpu), failed])

    return calibrated


def test_memory_of_an_accelerator_that_ran_out_says_nothing_of_the_hosts(
    run_out: Callable[..., RuntimePredictor], make_workload: Make, gpu: Hardware
) -> None:
    large, near = make_workload(capacity=1e8), make_workload(capacity=8e7)
    assert RuntimePredictor().predict(large, gpu).outcome is Outcome.OK
    taught = run_out(EXHAUSTED)
    assert [taught.predict(w, gpu).outcome for w in (large, near)] == [Outcome.OUT_OF_MEMORY, Outcome.OK]
    offsets = taught.params.offsets
    assert np.isinf(offsets.feasible_bytes)
    # The same ring in the host's memory takes as much of that, which nobody has seen to run out.
    beside = make_workload(capacity=1e8, replay_on_host=1.0)
    assert taught.predict(beside, gpu).outcome is Outcome.OK
    found = [fits(w, hardware_rates(gpu), 1e9, np.inf, offsets.feasible_device_bytes) for w in (large, near, beside)]
    assert list(map(bool, found)) == [False, True, True]
    assert np.isinf(taught.elsewhere().params.offsets.feasible_device_bytes)


def test_memory_of_the_host_that_ran_out_says_nothing_of_an_accelerators(
    run_out: Callable[..., RuntimePredictor], make_workload: Make, gpu: Hardware
) -> None:
    taught = run_out("killed by SIGKILL")
    assert np.isinf(taught.params.offsets.feasible_device_bytes)
    assert taught.predict(make_workload(capacity=1e8), gpu).outcome is Outcome.OUT_OF_MEMORY


def test_a_limit_on_the_host_is_none_on_the_accelerator_and_the_other_way_round(
    run_out: Callable[..., RuntimePredictor], make_workload: Make, gpu: Hardware
) -> None:
    """What failed under less than there is says nothing of those that have everything."""
    large = make_workload(capacity=1e8)
    assert run_out(EXHAUSTED, memory_bytes=2.0**33).predict(large, gpu).outcome is Outcome.OUT_OF_MEMORY
    assert run_out(EXHAUSTED, device_share=0.1).predict(large, gpu).outcome is Outcome.OK
    assert run_out("killed by SIGKILL", device_share=0.1).predict(large, gpu).outcome is Outcome.OUT_OF_MEMORY
    # A share is less than there is, too.
    held = RuntimePredictor().predict(make_workload(capacity=1e8, device_share=0.1), gpu)
    assert held.outcome is Outcome.OUT_OF_MEMORY
    assert held.error is not None
    assert held.error.endswith("GiB of 3.2")


def test_each_of_several_accelerators_is_as_large(
    run_out: Callable[..., RuntimePredictor], make_workload: Make, gpu: Hardware
) -> None:
    taught = run_out(EXHAUSTED)
    split = make_workload(capacity=1.5e8, num_devices=2.0)
    assert taught.predict(split, gpu).outcome is Outcome.OK
    assert taught.predict(dataclasses.replace(split, capacity=2.5e8), gpu).outcome is Outcome.OUT_OF_MEMORY
