"""Phases of a training: when its costs have changed so much that another configuration may be faster. Pure.

A report is a row of the run's ``metrics.jsonl`` less the row before. The reports of the first seconds of a phase are its
reference. A change of regime is told apart from a machine that is slower for minutes (by up to a half, on those this was written
on) in two ways: a stage that takes longer than the others do, whatever all of them do; and seconds an environment step beyond
what any such machine explains. Both as medians, and in each third of the window, so that a few slow reports say nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Stages of the pipeline that have a clock of their own, which does not run while they wait for one another. The learner has none:
# what it waits for its updates is nothing once batches are scarce.
STAGES = ("environment", "action", "targets")
MEANING = {"environment": "a step of the environments", "action": "a search of self-play", "targets": "making a batch's targets"}
SETTLE_SECONDS = 4.0  # of a process that are not looked at: queues fill, and evaluation compiles beside training
MEASURE_SECONDS = 8.0  # of a candidate, once it has settled
REFERENCE_SECONDS, REFERENCE_REPORTS = 8.0, 8
WINDOW_SECONDS, WINDOW_REPORTS = 6.0, 6
STAGE_BAND = 2.0  # times longer, or shorter, than what the other stages' clocks say of the machine
OWN_BAND = 1.25  # the same than it took before: beside others that take longer, one that has not changed looks shorter
SPEED_BAND = 1.8  # times slower, when nothing else changed: machines are slower by a half for minutes
STEADY_BAND = 1.25  # times slower, or faster, that the end of a window is than its beginning, where costs no longer move
EVENT_BAND = 1.65  # the same where something has changed that explains it: the length of episodes, a buffer that is full
QUICKER = 1.25  # times faster that all of a window must be, to be the reference from then on
LENGTH_BAND = 3.0  # times longer, or shorter, that episodes are
MIN_EPISODES = 8  # in a window, for their length to be known
RETURN_BLOCKS = 32  # blocks of reports that the course of the return is kept in; joined in pairs when there are more
FLAT_AFTER = 0.5  # of the training: before, a flat return is one that has not begun to rise
EARN = 2.0  # times its cost that a switch must be expected to earn: it may have to be undone
KEEP = 1.02  # times faster that a switch must be measured to be to stay


class Report(NamedTuple):
    """What a training did between two rows."""

    seconds: float  # acting and learning
    env_steps: int  # since the start of training
    progress: float  # of train.max_env_steps
    seconds_per_env_step: float
    clocks: tuple[float, ...]  # by STAGES: seconds of one; NaN where there was none
    episodes: int  # that ended
    mean_return: float  # of those; NaN where none ended
    mean_length: float  # steps; NaN likewise
    fill: float  # of the replay's capacity, at most 1
    simulations: int  # of a search
    cores_busy: float  # NaN where nobody tells


class Level(NamedTuple):
    """Costs of a stretch of training."""

    seconds_per_env_step: float  # of all of it
    typical: float  # the same by the median of its reports: a few slow ones do not move it
    clocks: tuple[float, ...]  # medians
    mean_length: float  # over all its episodes; NaN of fewer than MIN_EPISODES
    fill: float  # at its end
    simulations: int  # likewise


class Block(NamedTuple):
    """Episodes of some reports."""

    episodes: float
    return_sum: float


class Reason(NamedTuple):
    """Why a phase ends: ``kind`` is a stage, ``search``, ``speed``, ``prediction`` or ``return``."""

    kind: str
    text: str  # for people
    before: Level
    now: Level


class State(NamedTuple):
    """What was seen of the phase so far. ``expected`` seconds an environment step; NaN where nobody foretold any."""

    expected: float = math.nan
    simulations: int = 0  # of a search, by the last report
    settled: float = 0.0  # seconds of this process, since searches deepened, that were left out
    reports: tuple[Report, ...] = ()  # towards the reference, then the window
    reference: Level | None = None
    blocks: tuple[Block, ...] = ()
    reports_a_block: int = 1
    in_block: int = 0  # reports in the last one
    flat: bool = False  # it was told already that the return has become flat


def read(row: Mapping[str, Any], before: Mapping[str, Any], *, steps_an_update: float, capacity: int, last: int) -> Report | None:
    """Two rows of kind ``train`` of one process, the later first, as a report; None where they hold none.

    Args:
      steps_an_update: environment steps that an update pays for. Under threads self-play runs ahead of updates and falls back:
        updates are what tells the pace.
      capacity: of the replay, transitions.
      last: train.max_env_steps.
    """
    if "train_seconds" not in row or "train_seconds" not in before:
        return None  # the first dispatch, which compiles
    seconds, updates = row["train_seconds"] - before["train_seconds"], row["updates"] - before["updates"]
    if seconds <= 0.0 or updates <= 0:
        return None

    def clock(stage: str) -> float:
        count = row.get(f"wait_{stage}_count", 0)
        return row[f"wait_{stage}_seconds"] / count if count else math.nan

    busy = [row[name] for name in ("cpu_process_seconds", "cpu_simulators_seconds") if name in row]
    return Report(
        seconds=seconds,
        env_steps=row["env_steps"],
        progress=row["env_steps"] / last,
        seconds_per_env_step=seconds / (updates * steps_an_update),
        clocks=tuple(clock(stage) for stage in STAGES),
        episodes=row["episodes"],
        mean_return=row.get("mean_return", math.nan),
        mean_length=row.get("mean_length", math.nan),
        fill=min(1.0, row["env_steps"] / capacity),
        simulations=row["num_simulations"],
        cores_busy=sum(busy) / seconds if busy else math.nan,
    )


def level(reports: Sequence[Report]) -> Level:
    """Costs of some reports, at least one."""
    episodes = [(report.episodes, report.mean_length) for report in reports if report.episodes and report.mean_length > 0]
    count = sum(n for n, _ in episodes)
    clocks = [[x for x in column if x > 0] for column in zip(*(report.clocks for report in reports), strict=True)]
    return Level(
        seconds_per_env_step=_pace(reports),
        typical=statistics.median(report.seconds_per_env_step for report in reports),
        clocks=tuple(statistics.median(column) if column else math.nan for column in clocks),
        mean_length=sum(n * length for n, length in episodes) / count if count >= MIN_EPISODES else math.nan,
        fill=reports[-1].fill,
        simulations=reports[-1].simulations,
    )


def watch(state: State, report: Report) -> tuple[State, Reason | None]:
    """Takes in a report, and says why the phase is over, if it is.

    After a reason that is no ``return`` the state begins a new phase, whose reference is yet to be seen.
    """
    state = _count_returns(state, report)
    if report.simulations != state.simulations:
        if state.simulations and state.reference is None:  # searches have deepened before it was seen what a phase costs
            nothing = Level(math.nan, math.nan, (math.nan,) * len(STAGES), math.nan, report.fill, state.simulations)
            state = state._replace(reference=nothing)
        state = state._replace(simulations=report.simulations, settled=0.0, reports=())
    if state.settled < SETTLE_SECONDS:
        return state._replace(settled=state.settled + report.seconds), None
    state = state._replace(reports=(*state.reports, report))
    reference = state.reference
    if reference is None:
        if not _enough(state.reports, REFERENCE_SECONDS, REFERENCE_REPORTS):
            return state, None
        now = level(state.reports)
        state = state._replace(reports=(), reference=now)
        if now.typical > SPEED_BAND * state.expected:  # NaN: nothing was expected
            text = f"steps cost {now.typical / state.expected:.1f} times the seconds that were predicted"
            foretold = now._replace(seconds_per_env_step=state.expected, typical=state.expected)
            return state, Reason("prediction", text, foretold, now)
        return state, None
    while _enough(state.reports[1:], WINDOW_SECONDS, WINDOW_REPORTS):
        state = state._replace(reports=state.reports[1:])
    if not _enough(state.reports, WINDOW_SECONDS, WINDOW_REPORTS):
        return state, None
    thirds = [level(part) for part in _thirds(state.reports)]
    now = level(state.reports)
    reason = _changed(reference, now, thirds)
    if reason is not None:
        return fresh(state)._replace(settled=SETTLE_SECONDS), reason
    slowest = max(third.typical for third in thirds)
    if QUICKER * slowest < reference.typical:  # the machine is quicker than it was: so fast this can be
        state = state._replace(reference=reference._replace(typical=slowest))
    if not state.flat and report.progress >= FLAT_AFTER and _is_flat(state.blocks):
        state = state._replace(flat=True)
        return state, Reason("return", "the return has become flat", now, now)
    return state, None


def is_steady(reports: Sequence[Report]) -> bool:
    """Whether steps cost at the end of some reports, at least three, what they did at their beginning."""
    first, *_, last = map(_pace, _thirds(reports))
    return 1.0 / STEADY_BAND < last / first < STEADY_BAND


def fresh(state: State, expected: float = math.nan) -> State:
    """A phase that begins: all that is kept is the course of the return, and how deep searches are."""
    return State(
        expected=expected,
        simulations=state.simulations,
        blocks=state.blocks,
        reports_a_block=state.reports_a_block,
        in_block=state.in_block,
        flat=state.flat,
    )


def _pace(reports: Sequence[Report]) -> float:
    """Seconds an environment step of all of them: where data come in bursts, as long episodes end, most reports are quick."""
    return sum(report.seconds for report in reports) / sum(report.seconds / report.seconds_per_env_step for report in reports)


def _enough(reports: Sequence[Report], seconds: float, count: int) -> bool:
    return len(reports) >= count and sum(report.seconds for report in reports) >= seconds


def _thirds(reports: Sequence[Report]) -> list[Sequence[Report]]:
    a, b = len(reports) // 3, 2 * len(reports) // 3
    return [reports[:a], reports[a:b], reports[b:]]


def _changed(before: Level, now: Level, thirds: Sequence[Level]) -> Reason | None:
    """The reason that every third of a window agrees on; that searches have deepened is known, and needs no evidence."""
    if now.simulations != before.simulations:
        ratio = now.typical / before.typical
        cost = "" if math.isnan(ratio) else f"; steps cost {ratio:.1f} times the seconds"
        return Reason("search", f"a search makes {now.simulations} simulations, it made {before.simulations}{cost}", before, now)
    slower = min(third.typical for third in thirds) / before.typical
    beside = [_deviations(before, third) for third in thirds]
    # Where one of three stages takes longer, the others seem shorter beside it: the largest deviation is the one that is told.
    changed = {}
    for index, deviations in enumerate(zip(*beside, strict=True)):
        ratios = [third.clocks[index] / before.clocks[index] for third in thirds]
        longer = all(x > STAGE_BAND for x in deviations) and all(x > OWN_BAND for x in ratios)
        shorter = all(x < 1.0 / STAGE_BAND for x in deviations) and all(x < 1.0 / OWN_BAND for x in ratios)
        shorter &= slower < EVENT_BAND  # no stage that takes less makes all of it take more
        if longer or shorter:
            changed[index] = min(abs(math.log(x)) for x in deviations)
    if changed:
        index = max(changed, key=lambda i: changed[i])
        ratio = now.clocks[index] / before.clocks[index]
        text = f"{MEANING[STAGES[index]]} takes {ratio:.1f} times as long{_also(before, now)}"
        return Reason(STAGES[index], text, before, now)
    if slower > (EVENT_BAND if _also(before, now) else SPEED_BAND):
        ratio = now.typical / before.typical
        return Reason("speed", f"steps cost {ratio:.1f} times the seconds they did{_also(before, now)}", before, now)
    return None


def _deviations(before: Level, now: Level) -> list[float]:
    """By stage, how many times longer it takes than the others, which tell what the machine does; NaN where nobody tells."""
    ratios = [b / a for a, b in zip(before.clocks, now.clocks, strict=True)]
    found = []
    for index, ratio in enumerate(ratios):
        others = [math.log(x) for i, x in enumerate(ratios) if i != index and x > 0]
        found.append(ratio / math.exp(statistics.fmean(others)) if others else math.nan)
    return found


def _also(before: Level, now: Level) -> str:
    """What else has changed, for people; empty where nothing has."""
    ratio, said = now.mean_length / before.mean_length, ""
    if ratio > LENGTH_BAND or ratio < 1.0 / LENGTH_BAND:
        said += f"; episodes have {now.mean_length:.0f} steps, they had {before.mean_length:.0f}"
    if before.fill < 1.0 <= now.fill:
        said += "; the replay is full"
    return said


def _count_returns(state: State, report: Report) -> State:
    """The course of the return so far, in at most RETURN_BLOCKS blocks of as many reports each."""
    blocks, size, filled = list(state.blocks), state.reports_a_block, state.in_block
    if not blocks or filled == size:
        if len(blocks) == RETURN_BLOCKS:
            blocks = [Block(*map(sum, zip(a, b, strict=True))) for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
            size *= 2
        blocks.append(Block(0.0, 0.0))
        filled = 0
    if report.episodes and not math.isnan(report.mean_return):
        n, last = report.episodes, blocks[-1]
        blocks[-1] = Block(last.episodes + n, last.return_sum + n * report.mean_return)
    return state._replace(blocks=tuple(blocks), reports_a_block=size, in_block=filled + 1)


def _is_flat(blocks: Sequence[Block]) -> bool:
    """Whether the mean return of the last quarter of the training is that of the quarter before, within what chance does."""
    quarter = len(blocks) // 4
    if quarter < RETURN_BLOCKS // 8:
        return False
    (mean, error), (mean_before, error_before) = (_mean(blocks[-n * quarter :][:quarter]) for n in (1, 2))
    return abs(mean - mean_before) <= 2.0 * math.hypot(error, error_before)  # NaN: no episodes ended


def _mean(blocks: Sequence[Block]) -> tuple[float, float]:
    """Mean return of the episodes of some blocks, and its standard error, by how the blocks differ."""
    means = [block.return_sum / block.episodes for block in blocks if block.episodes]
    if len(means) < 3:
        return math.nan, math.nan
    return statistics.fmean(means), statistics.stdev(means) / math.sqrt(len(means))


def steps_left(env_steps: int, last: int, target_return: float | None) -> int:
    """Environment steps that a training has yet to make, after ``env_steps`` of at most ``last``.

    When a return ends it nobody knows: one that has taken so many steps is expected to take as many again. Not as many seconds:
    where steps have become dear, what is left is.
    """
    left = max(0, last - env_steps)
    return left if target_return is None else min(left, env_steps)


def pays(gain: float, seconds_left: float, cost_seconds: float) -> bool:
    """Whether making the rest of a training ``gain`` times as fast earns what it costs, EARN times over."""
    return gain > KEEP and seconds_left * (1.0 - 1.0 / gain) > EARN * cost_seconds


def verdict(gain: float, seconds_left: float, cost_seconds: float) -> str:
    """``kept`` where a switch was measured to pay; else ``undone``, or ``left`` where going back would cost more than it wins."""
    if gain > KEEP:
        return "kept"
    return "undone" if seconds_left * (1.0 / gain - 1.0) > cost_seconds else "left"
