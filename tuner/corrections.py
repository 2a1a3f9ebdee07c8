"""Corrections of one configuration's allocation by what its runs were measured to use, and requests that nothing can correct.

The steps of ``balance`` on this machine: what a run says of its allocation, with the predictor where a measurement cannot tell
(a run that had too few cores does not say how many it could have used, one that ran out of memory not how much it needs), and
the state after several runs of the same configuration, which is a function of these and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predictor import Hardware, Measurement, Outcome, RuntimePredictor, Workload, stack
from predictor.memory import replay_resident_bytes
from tuner import allocate, balance, resources
from tuner.bridge import GIB, Config, UserError
from tuner.history import Trial
from tuner.measuring.workload import describe

ROLE = "balanced"  # of a trial: the best configuration so far under a corrected allocation
EVERY = 6  # one trial in so many may be such a one
MOST = 3  # corrections of one configuration
_PAYS = 0.02  # log seconds: of fewer, more cores are not worth asking for
_SCARCE = 2.0  # times the memory that ran out: at least so much is wanted
_PROCESS_BYTES = 0.75e9  # of a process that trains, beside what its training holds
_ALLOCATION = {f"allocation.{name}": None for name in ("cores", "memory_gib", "device_memory", "devices")}


def marginal(predictor: RuntimePredictor, workload: Workload, hardware: Hardware) -> tuple[np.ndarray, np.ndarray]:
    """What the predictor expects of a core more and of a core less: gain and loss of log seconds over a core's share, [R] each.

    Memory buys no speed where it is enough.
    """
    cores = [workload.cores, min(workload.cores + 1.0, float(hardware.cores)), max(workload.cores - 1.0, 1.0)]
    here, more, less = np.asarray(_log_seconds(predictor, workload, hardware, cores)) * hardware.cores
    nothing = np.zeros(len(allocate.RESOURCES))
    gain, loss = nothing.copy(), nothing.copy()
    gain[balance.CORES], loss[balance.CORES] = here - more, less - here
    return gain, loss


def _log_seconds(predictor: RuntimePredictor, workload: Workload, hardware: Hardware, cores: Sequence[float]) -> np.ndarray:
    workloads = [dataclasses.replace(workload, cores=n) for n in cores]
    return np.asarray(predictor.log_seconds(stack(workloads), hardware))


def need_of(
    config: Config, measured: Measurement, predictor: RuntimePredictor, hardware: Hardware, enough: float = math.inf
) -> np.ndarray:
    """What a run [R] would have used had nothing been short: as measured, and as predicted where that cannot tell.

    A run that kept all its cores busy would have used more of them, ``enough`` at most, if it is predicted to be faster with all
    there are; one that ran out of memory needs what it is predicted to, and more than it had; one that found its programs
    compiled may have to compile them next time. Threads that wait for one another in a loop look busy: of its cores it needs no
    more than are predicted to make it faster.
    """
    workload, given = measured.workload, resources.allocation_of(config, hardware)
    predicted = predictor.predict(workload, hardware)
    if measured.outcome != Outcome.OK:
        need = resources.use_of(predicted)
        if measured.outcome == Outcome.OUT_OF_MEMORY:
            need[1] = max(need[1], _SCARCE * given[1] / (1.0 + allocate.HEADROOM))
        return need
    need = resources.need_of(config, measured, hardware)
    if measured.from_cache:
        need[1] = max(need[1], predicted.peak_bytes)
    if _busy(config, measured, hardware) and given[0] < hardware.cores:
        here, everything = _log_seconds(predictor, workload, hardware, [workload.cores, float(hardware.cores)])
        if here - everything > _PAYS:
            free = predictor.predict(dataclasses.replace(workload, cores=float(hardware.cores)), hardware)
            need[0] = max(need[0], min(enough, need[0] * free.cpu_use / predicted.cpu_use))
    *fewer, here = _log_seconds(predictor, workload, hardware, range(1, round(workload.cores) + 1))
    need[0] = min([need[0], *(cores for cores, one in enumerate(fewer, 1) if one - here <= _PAYS)])
    return need


def for_training(
    config: Config, measured: Measurement, predictor: RuntimePredictor, hardware: Hardware, most: np.ndarray
) -> Config:
    """The configuration with memory by what it was measured to use, and the cores it was measured with; ``most`` [R] at most.

    Searches that deepen take more memory than those which were measured, by as much as is predicted.
    """
    use, predicted = resources.need_of(config, measured, hardware), predictor.predict(describe(config), hardware)
    if measured.from_cache:  # the training may have to compile
        use[1] = max(use[1], predicted.peak_bytes)
    deepest = config.deepenings[-1][1]
    if deepest != config.search.num_simulations:
        later = predictor.predict(describe(config.searching(deepest)), hardware)
        use[1:] += np.maximum(resources.use_of(later) - resources.use_of(predicted), 0.0)[1:]
    allocated = resources.for_training(use, hardware, most)
    allocated[0] = config.allocation.cores or hardware.cores
    return resources.with_allocation(config, allocated, hardware, (), most)


def _busy(config: Config, measured: Measurement, hardware: Hardware) -> bool:
    """It may have wanted more cores than it had."""
    return (measured.cpu_use or 0.0) >= resources.BUSY * resources.allocation_of(config, hardware)[0]


def seen(
    config: Config,
    measured: Measurement,
    predictor: RuntimePredictor,
    hardware: Hardware,
    most: np.ndarray | None = None,
    enough: float = math.inf,
) -> balance.Seen:
    """What a run of ``config`` says of its allocation.

    Args:
      most: [R] that was asked for; all there is where it is absent.
      enough: cores that it used where it could have had more.
    """
    need = need_of(config, measured, predictor, hardware, enough)
    wanted = np.asarray(allocate.demand(need, np.ones_like(need), 0.0))
    limits = resources.limits(hardware, need, most)
    seconds = measured.seconds_per_env_step if measured.outcome == Outcome.OK else None
    gain, loss = marginal(predictor, measured.workload, hardware)
    return balance.Seen(math.inf if seconds is None else seconds, wanted, limits, gain, loss)


def state_after(
    runs: Sequence[tuple[Config, Measurement]], predictor: RuntimePredictor, hardware: Hardware, most: np.ndarray | None = None
) -> balance.State:
    """The state after runs of one configuration, each under the allocation that the state after those before it said."""
    state, enough = balance.start(resources.allocation_of(runs[0][0], hardware)), math.inf
    for config, measured in runs:
        given = resources.allocation_of(config, hardware)  # whole cores and quarters of a GiB
        state = balance.correct(state._replace(allocated=given), seen(config, measured, predictor, hardware, most, enough))
        if measured.outcome == Outcome.OK and measured.cpu_use and not _busy(config, measured, hardware):
            enough = measured.cpu_use
    return state


def corrected(
    runs: Sequence[tuple[Config, Measurement]],
    predictor: RuntimePredictor,
    hardware: Hardware,
    most: np.ndarray | None = None,
    cores: Sequence[int] = (),
) -> Config:
    """The last of ``runs``'s configuration under its corrected allocation; the same one where nothing is to be corrected.

    ``cores``: numbers to choose among, the knob's; any where there are none.
    """
    config = runs[-1][0]
    given, after = resources.allocation_of(config, hardware), state_after(runs, predictor, hardware, most).allocated
    changes = {}
    if after[0] != given[0]:
        changes["allocation.cores"] = _nearest_cores(float(after[0]), resources.least_cores(config), cores)
    moved = resources.with_allocation(config, after, hardware, (), most).to_dict()["allocation"]
    for name, column in (("memory_gib", 1), ("device_memory", 2)):
        if after[column] != given[column] and name in moved:
            changes[f"allocation.{name}"] = moved[name]
    return config.replace(changes)


def _nearest_cores(wanted: float, least: int, cores: Sequence[int]) -> int:
    """Of ``cores``, or of all numbers, the nearest that is at least ``least``: a move that does not pay is undone."""
    enough = [n for n in cores or [round(wanted), least] if n >= least]
    return min(enough, key=lambda n: (abs(n - wanted), -n))


def begin(
    start: Config, trials: Sequence[Trial], hardware: Hardware, max_cores: int | None = None
) -> tuple[np.ndarray, balance.State]:
    """What may be given at most, [R], and the state that allocations go on from: the newest trial's, or the start's.

    At most the memory that the start asks for. Its cores are a knob, which moves: at most ``max_cores``, or all there are.
    """
    asked = resources.allocation_of(start, hardware)
    asked[balance.CORES] = max_cores or hardware.cores
    most = np.asarray(resources.limits(hardware, most=asked).maximum)
    newest = Config.from_dict(trials[-1].config) if trials else start
    return most, balance.start(np.minimum(resources.allocation_of(newest, hardware), most))


def rebalanced(
    trials: Sequence[Trial],
    best: Trial,
    predictor: RuntimePredictor,
    hardware: Hardware,
    most: np.ndarray,
    cores: Sequence[int],
) -> tuple[Config, np.ndarray, tuple[Config, Measurement]]:
    """The best configuration under the allocation that its runs say it should have, its predicted use [R], and its last run.

    As it is where they say no other. Its runs are the last that was not a correction, and the corrections since. ``cores``: the
    numbers of them that the grid has.
    """
    work = Config.from_dict(best.config).replace(_ALLOCATION)
    every = [(Config.from_dict(trial.config), trial) for trial in trials]
    runs = [(config, trial) for config, trial in every if config.replace(_ALLOCATION) == work]
    first = max(index for index, (_, trial) in enumerate(runs) if trial.role != ROLE)
    since = [(config, trial.measurement) for config, trial in runs[first:]]
    config = since[-1][0]
    if len(since) <= MOST:
        config = corrected(since, predictor, hardware, most, cores)
        if config.allocation.cores == since[-1][0].allocation.cores:  # memory moves no time, and is not measured for itself
            config = corrected([*since[:-1], (config, since[-1][1])], predictor, hardware, most, cores)
    return config, resources.use_of(predictor.predict(describe(config), hardware)), since[-1]


# Requests -------------------------------------------------------------------------------------------------------------


def check_memory(config: Config, workload: Workload) -> None:
    """Raises UserError when the memory asked for cannot hold even the replay, with the largest capacity that would fit."""
    given = config.allocation.memory_gib
    needed = float(replay_resident_bytes(workload))
    if given is None or needed <= given * GIB:
        return
    capacity = config.replay.capacity
    # Saving makes a copy of it.
    fits = int(capacity * max(given * GIB - _PROCESS_BYTES, 0.0) / (2.0 * needed))
    rule = f"takes {needed / GIB:,.2f} GiB, and allocation.memory_gib is {given:g}"
    nearest: object = fits
    try:
        config.replace("replay.capacity", fits)
    except UserError:  # so few transitions that other settings would have to change too
        nearest = f"allocation.memory_gib = {_quarters(_PROCESS_BYTES + 2.0 * needed):g}"
    raise UserError("replay.capacity", capacity, rule, nearest)


def would_run(config: Config, measured: Measurement, predictor: RuntimePredictor, hardware: Hardware) -> str | None:
    """What to ask for instead of an allocation that a run ran out of memory in; None where that is not what ended it."""
    if measured.outcome != Outcome.OUT_OF_MEMORY or config.allocation.memory_gib is None:
        return None
    wanted = seen(config, measured, predictor, hardware).wanted[1]
    return f"allocation.memory_gib = {_quarters(min(wanted, hardware.memory_bytes)):g}"


def more_memory(
    config: Config, changes: Mapping[str, Any], predictor: RuntimePredictor, hardware: Hardware, most_gib: float = math.inf
) -> dict[str, float]:
    """Change of allocation.memory_gib that a run needs to go on with ``changes``; empty where what it is kept to will do.

    ``most_gib``: that somebody asked for; more is not given.
    """
    given = config.allocation.memory_gib
    if given is None or set(changes) <= {"allocation.cores", "runtime.loop_count"}:
        return {}
    expected = predictor.predict(describe(config.replace(changes)), hardware).peak_bytes
    wanted = min(_quarters(expected + allocate.SAFETY_BYTES[hardware.platform]), hardware.memory_bytes / GIB, most_gib)
    return {"allocation.memory_gib": wanted} if wanted > given else {}


def _quarters(size: float) -> float:
    """Bytes in GiB, to the next quarter."""
    return math.ceil(4.0 * size / GIB) / 4.0
