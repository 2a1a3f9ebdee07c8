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
    """The newest published parameters, copied to each device once: by the first who asks there, from then on by who publishes.

    They are handed out as lists of leaves, as programs take them.

    A copy to a CPU device of another backend takes half a millisecond, which self-play, whose pace is everybody's, has not.
    """

    def __init__(self, meter: Meter):
        self._meter = meter
        self._lock = threading.Lock()
        self._newest: Published | None = None
        self._on_device: dict[tuple[Any, bool], tuple[int, list[jax.Array]]] = {}

    def publish(self, published: Published) -> None:
        """Replaces what is published; its arrays are ready, and nobody donates them."""
        for device, target in list(self._on_device):
            self._copy(published, device, target=target)
        self._newest = published

    def pull(self, device: jax.Device, *, target: bool = False) -> tuple[int, list[jax.Array]]:
        """Version, and leaves of parameters (or target parameters) on ``device``."""
        newest = self._newest
        if newest is None:
            raise RuntimeError("nothing has been published yet")
        held = self._on_device.get((device, target))
        if held is not None and held[0] >= newest.version:
            return held
        with self._meter.wait("parameters_get"), self._lock:
            held = self._on_device.get((device, target))
            return self._copy(newest, device, target=target) if held is None or held[0] < newest.version else held

    def _copy(self, published: Published, device: jax.Device, *, target: bool) -> tuple[int, list[jax.Array]]:
        leaves = jax.tree.leaves(published.target_params if target else published.params)
        there = placement.put(leaves, device)
        if there is not leaves:
            self._meter.add("bytes_parameters", sum(x.nbytes for x in there))
        held = self._on_device[device, target] = (published.version, there)
        return held
