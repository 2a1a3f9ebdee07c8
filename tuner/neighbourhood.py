"""The grid around a configuration: knobs, each with the choices that the configuration and this machine allow."""

from __future__ import annotations

import dataclasses
from typing import Any

from tuner.bridge import RESUMABLE, Config, available_cores, bounded_num_envs, bounded_staleness, get, valid
from tuner.measuring.workload import describe
from tuner.space import Knob, Space, knobs_up_to, make_space


def space_around(start: Config, effect: str, platform: str, max_cores: int | None = None) -> Space:
    """The grid that a tuning from ``start`` (concrete) searches: knobs up to ``effect``, with the choices this machine has."""
    knobs = [_reaching(knob, max_cores or len(available_cores())) for knob in knobs_up_to(effect, start.runtime.kind)]
    values = {knob.path: get(start, knob.path) for knob in knobs}

    def can(path: str, value: Any) -> bool:
        allowed = path != "allocation.cores" or max_cores is None or value <= max_cores
        return allowed and valid(start, path, value, platform)

    return make_space(knobs, values, describe(start), can, bounded_num_envs(start), bounded_staleness(start))


def _reaching(knob: Knob, most_cores: int) -> Knob:
    """The knob; of cores, which are not always a round number, with as many as there are, too."""
    if knob.path != "allocation.cores":
        return knob
    return dataclasses.replace(knob, choices=tuple(sorted({*knob.choices, most_cores})))


def resumable_space(config: Config, platform: str, host_step_seconds_more: float = 0.0) -> Space:
    """The grid around ``config`` (concrete) of the neutral knobs that a resume may change.

    Args:
      host_step_seconds_more: that a step of an environment on the host was seen to take beyond what was measured of it.
    """
    knobs = [knob for knob in knobs_up_to("neutral", config.runtime.kind) if knob.path in RESUMABLE]
    base = describe(config)
    if base.host_step_seconds:
        seconds = max(0.1 * base.host_step_seconds, base.host_step_seconds + host_step_seconds_more)
        base = dataclasses.replace(base, host_step_seconds=seconds)

    def can(path: str, value: Any) -> bool:
        return valid(config, path, value, platform)

    values = {knob.path: get(config, knob.path) for knob in knobs}
    return make_space(knobs, values, base, can, bounded_num_envs(config), bounded_staleness(config))
