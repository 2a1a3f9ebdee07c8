"""Parameters on their way from the learner to those who search, by reference: nobody waits for anybody."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import jax

from muzerox.runtimes import placement
from muzerox.runtimes.sebulba.meter import Meter
from muzerox.types import Params


class Published(NamedTuple):
    """What the learner last published."""

    version: int  # updates it had made
    params: Params
    target_params: Params


class ParameterStore:
    """The newest published parameters, copied to each device once, by the first who asks there."""

    def __init__(self, meter: Meter):
        self._meter = meter
        self._lock = threading.Lock()
        self._newest: Published | None = None
        self._on_device: dict[tuple[Any, bool], tuple[int, Params]] = {}

    def publish(self, published: Published) -> None:
        """Replaces what is published; its arrays are ready, and nobody donates them."""
        self._newest = published

    def pull(self, device: jax.Device, *, target: bool = False) -> tuple[int, Params]:
        """Version and parameters (or target parameters) on ``device``."""
        newest = self._newest
        if newest is None:
            raise RuntimeError("nothing has been published yet")
        held = self._on_device.get((device, target))
        if held is not None and held[0] == newest.version:
            return held
        with self._meter.wait("parameters_get"), self._lock:
            held = self._on_device.get((device, target))
            if held is None or held[0] < newest.version:
                published = newest.target_params if target else newest.params
                params = jax.block_until_ready(placement.put(published, device))
                held = self._on_device[device, target] = (newest.version, params)
                if params is not published:
                    self._meter.add("bytes_parameters", sum(x.nbytes for x in jax.tree.leaves(params)))
            return held
