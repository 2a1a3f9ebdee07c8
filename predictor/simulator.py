"""The pipeline of threads, event by event: what the bounds of :mod:`predictor.overlap` only bound.

Every thread of the ``sebulba`` runtime goes through its stages in turn and waits where the real one does: for room in a queue,
for something in it, for steps that the replay ratio allows, for a dispatch to end. What it works on takes a share of what it
needs (Python's lock, cores, a device's time), and where more is wanted than there is, everybody is slowed down alike. Between
two events nothing changes, so the next one is known: a fluid model of processor sharing, as simulators of data centres use
(SimGrid: Casanova et al., 2014). It is one ``lax.scan`` over arrays of threads, mapped over candidates, so that tens of
thousands of pipelines, with far more devices than one machine has, take minutes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from predictor.analytic import HANDED, STAGES, Rates, Value
from predictor.compiler import OPTIMIZED
from predictor.overlap import ROLES, SPREAD, cores_taken, shared_devices, staleness
from predictor.schema import Workload

KINDS = ("selfplay", "context", "search", "learner", "update")
MOST = (32, 8, 16, 1, 1)  # threads of each kind that are simulated; the last is the device that runs the learner's program
RESOURCES = ("lock", "cores", "acting", "searching", "learning", "device")
EVENTS = 2048
JITTER = 0.25  # coefficient of variation of what a thread's next round takes
_SEGMENTS = 4  # that a round has at most: Python, environments, narrow and spread parts of a program
_IDLE, _PUT = 0, _SEGMENTS + 1  # before the first segment, and after the last
# A simulated round of self-play makes at least this share of an update, and of what self-play may be ahead: shorter rounds are
# taken together, or half of the events would not do to fill the queues.
_FINEST, _FINEST_AHEAD = 1.0 / 8.0, 1.0 / 64.0
_DISPATCHES = 3.0  # of the second half, at least, for the pace to be told by their ends
_PLENTY = 1e6


def _rest(role: str, *others: str) -> tuple[str, ...]:
    return tuple(stage for stage in ROLES[role] if stage not in (*SPREAD, *others))


_PARTS = {
    "rows": ("host_rows",),
    "steps": ("host_steps",),
    "acting_narrow": _rest("selfplay", "host_rows", "host_steps"),
    "acting_spread": SPREAD[:1],
    "contexts": ("contexts",),
    "ready": ("ready",),
    "targets_narrow": _rest("search", "ready"),
    "targets_spread": SPREAD[2:],
    "dispatch": ("dispatch",),
    "learner_narrow": _rest("learner", "dispatch"),
    "learner_spread": SPREAD[1:2],
}
_MEMBERS = np.array([[stage in names for names in _PARTS.values()] for stage in STAGES], np.float32)  # [S, parts]

_KIND = np.repeat(np.arange(len(KINDS)), MOST)  # [T]
_INDEX = np.concatenate([np.arange(n) for n in MOST])  # [T], among its kind
_SELFPLAY, _CONTEXT, _SEARCH, _LEARNER, _UPDATE = (kind == _KIND for kind in range(len(KINDS)))


class Simulated(NamedTuple):
    """A pipeline's steady state; float32 [...] each, shares between 0 and 1."""

    seconds_per_env_step: jax.Array
    cpu_use: jax.Array  # cores busy
    learner_use: jax.Array  # share of time that the learner's program runs
    busy: jax.Array  # [..., 5] share of time that threads of each of ``KINDS`` do not wait
    queue_depth: jax.Array  # [..., 2] contexts and batches that wait
    use: jax.Array  # [..., K, R] what threads of each of ``KINDS`` take of each of ``RESOURCES``: a lock, cores, devices


class _Pipeline(NamedTuple):
    """One pipeline in numbers; times in seconds an update."""

    work: jax.Array  # [T, P] seconds of each segment of a round
    demand: jax.Array  # [K, P, R] of each resource, while it runs alone
    room: jax.Array  # [R]
    following: jax.Array  # [T, P + 1] int32, the segment after this one that takes any time, _PUT where there is none
    exists: jax.Array  # [T] bool
    threads: jax.Array  # [K] how many
    unit: jax.Array  # updates' worth of steps that a round of self-play makes
    window: jax.Array  # updates that self-play may be ahead
    loop_count: jax.Array
    queues: jax.Array  # [2] contexts and batches there is room for


class _State(NamedTuple):
    time: jax.Array
    phase: jax.Array  # [T] int32
    left: jax.Array  # [T] seconds of the segment, when nothing slows it down
    rounds: jax.Array  # [T] begun
    started: jax.Array  # updates' worth of steps begun
    made: jax.Array  # and made
    contexts: jax.Array  # begun
    queued: jax.Array  # [2] contexts and batches that wait
    hand: jax.Array  # batches in the learner's hands
    under_way: jax.Array  # dispatches: handed to the device, and not finished
    pending: jax.Array  # of those, not begun
    published: jax.Array  # updates
    half: jax.Array  # [2] time and contexts begun when the second half began
    mark: jax.Array  # [2] time and updates when the first dispatch of the second half ended
    newest: jax.Array  # [2] when the last one did
    spent: jax.Array  # [1 + K * R + K + 2] in the second half: time, seconds of resources and of busy threads, depths times time


def simulate(
    stage_seconds: jax.Array,
    workload: Workload,
    hardware: Rates,
    *,
    jitter: float = JITTER,
    events: int = EVENTS,
    chunk: int = 512,
) -> Simulated:
    """The steady state of pipelines of threads, after half of ``events`` for queues to fill.

    Deterministic: what a round takes varies evenly about its mean by ``jitter`` (a coefficient of variation, at most 0.5).

    Args:
      stage_seconds: [C, S] an environment step, with coefficients.
      workload: fields [C], all of ``sebulba``, with at most ``MOST`` threads of a kind.
      hardware: fields [] or [C].
      events: simulated, after which no more than a share of a dispatch should be missing from a second half.
      chunk: pipelines simulated side by side.

    Raises:
      ValueError: one program instead of threads, more threads than ``MOST``, or too much jitter.
    """
    if not 0.0 <= jitter <= 0.5:
        raise ValueError(f"jitter = {jitter:g}: must be between 0 and 0.5")
    if not np.all(workload.sebulba):
        raise ValueError("workload.sebulba: must be 1 everywhere: of one program there is nothing to simulate")
    for name, most in zip(("selfplay_workers", "cpu_actors", "searching_devices"), MOST, strict=False):
        if (found := np.max(getattr(workload, name))) > most:
            raise ValueError(f"workload.{name} = {found:g}: at most {most} are simulated")
    return _simulate_all(stage_seconds, workload, hardware, jitter, events, chunk)


@functools.partial(jax.jit, static_argnames=("events", "chunk"), compiler_options=OPTIMIZED)
def _simulate_all(
    stage_seconds: jax.Array, workload: Workload, hardware: Rates, jitter: Value, events: int, chunk: int
) -> Simulated:
    rows = stage_seconds.reshape(-1, len(STAGES))
    fields: tuple[Workload, Rates] = jax.tree.map(
        lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), rows.shape[:1]), (workload, hardware)
    )
    step = functools.partial(_simulate, jitter=jitter, events=events)
    return jax.lax.map(lambda row: step(*row), (rows, *fields), batch_size=chunk)


def _simulate(seconds: jax.Array, workload: Workload, hardware: Rates, *, jitter: Value, events: int) -> Simulated:
    pipeline = _describe(seconds, workload, hardware)
    zero, threads = jnp.float32(0.0), len(_KIND)
    one = jnp.float32(1.0)  # the first update has the steps it needs
    start = _State(
        time=zero,
        phase=jnp.zeros(threads, jnp.int32),
        left=jnp.zeros(threads),
        rounds=jnp.zeros(threads),
        started=one,
        made=one,
        contexts=zero,
        queued=jnp.zeros(2),
        hand=zero,
        under_way=zero,
        pending=zero,
        published=zero,
        half=jnp.zeros(2),
        mark=jnp.zeros(2),
        newest=jnp.zeros(2),
        spent=jnp.zeros(1 + len(KINDS) * len(RESOURCES) + len(KINDS) + 2),
    )

    def event(state: _State, index: jax.Array) -> tuple[_State, None]:
        state = _begin(pipeline, state, jitter)
        return _advance(pipeline, state, jitter, index >= events // 2), None

    end, _ = jax.lax.scan(event, start, jnp.arange(events))
    # From the end of a dispatch to the end of another, so that updates are whole; where there were few, by contexts.
    (first_time, first), (last_time, last) = end.mark, end.newest
    by_updates = (last_time - first_time) / jnp.maximum(last - first, 1e-9)
    by_contexts = (end.time - end.half[0]) / jnp.maximum(end.contexts - end.half[1], 1e-9)
    enough = (first > 0.0) & (last - first >= _DISPATCHES * pipeline.loop_count)
    per_update = jnp.where(enough, by_updates, by_contexts)
    span = jnp.maximum(end.spent[0], 1e-30)
    use, busy = jnp.split(end.spent[1:-2] / span, [len(KINDS) * len(RESOURCES)])
    use, busy = use.reshape(len(KINDS), len(RESOURCES)), busy / jnp.maximum(pipeline.threads, 1.0)
    return Simulated(
        seconds_per_env_step=per_update * workload.replay_ratio / workload.batch_size,
        cpu_use=jnp.sum(use[:, RESOURCES.index("cores")]),
        learner_use=busy[KINDS.index("update")],
        busy=busy,
        queue_depth=end.spent[-2:] / span,
        use=use,
    )


def _describe(seconds: jax.Array, w: Workload, hardware: Rates) -> _Pipeline:
    per_update = w.batch_size / w.replay_ratio  # environment steps
    group = dict(zip(_PARTS, jnp.matmul(seconds * per_update, _MEMBERS, precision="highest"), strict=True))
    row = w.num_envs / per_update  # updates' worth that a row of self-play is
    window = jnp.asarray(staleness(w))
    unit = row * jnp.maximum(jnp.round(jnp.maximum(_FINEST, _FINEST_AHEAD * window) / row), 1.0)
    on_host, cores = hardware.on_host > 0.0, jnp.maximum(w.cores, 1.0)
    own = on_host & (w.role_threads > 0.0)
    # Cores that products take, and how much longer they take on the threads of their role than on all cores.
    wide = cores_taken(w, jnp.where(own, jnp.clip(w.role_threads, 1.0, cores), cores))
    stretch = dict(zip(SPREAD, (a / b for a, b in zip(cores_taken(w, cores), wide, strict=True)), strict=True))
    taken = dict(zip(SPREAD, wide, strict=True))
    kept = jnp.where(own & (cores > 1.0), 1.0 - HANDED, 1.0)
    python_steps = 1.0 - w.step_in_process  # environments hold Python's lock

    # Seconds of an update's worth, by kind and segment.
    zero = jnp.float32(0.0)
    acting = [group["rows"], group["steps"], group["acting_narrow"], group["acting_spread"] * stretch["acting_flops"]]
    work = jnp.stack(
        [
            jnp.stack(acting) * unit,
            jnp.stack([group["contexts"], zero, zero, zero]),
            jnp.stack([group["ready"], zero, group["targets_narrow"], group["targets_spread"] * stretch["reanalysis_flops"]]),
            jnp.stack([group["dispatch"], zero, zero, zero]) * w.loop_count,
            jnp.stack([zero, zero, group["learner_narrow"], group["learner_spread"] * stretch["learner_flops"]]) * w.loop_count,
        ]
    )
    host = jnp.where(on_host, 1.0, 0.0)

    with_search, with_learning = shared_devices(w, hardware)

    def needs(name: str, product: str, first: Value) -> jax.Array:
        """[P, R] of a kind whose programs run on the devices ``name``, its products those of a stage.

        ``first``: of the first device, if that is shared.
        """

        def of(**amounts: Value) -> jax.Array:
            return jnp.stack([jnp.asarray(amounts.get(resource, 0.0), jnp.float32) for resource in RESOURCES])

        narrow = of(cores=host * kept, device=first, **{name: 1.0})
        spread = of(cores=host * taken[product], device=first, **{name: jnp.where(own, taken[product], 1.0)})
        return jnp.stack([of(lock=1.0, cores=1.0), of(lock=python_steps, cores=1.0), narrow, spread])

    # Where the roles of a processor have threads of their own, targets are made by the learner's.
    by_learner, by_search = (needs(name, "reanalysis_flops", 1.0 / w.searching_devices) for name in ("learning", "searching"))
    acts = needs("acting", "acting_flops", 1.0 / w.acting_devices)
    learns = needs("learning", "learner_flops", 1.0 * with_learning)
    demand = jnp.stack([acts, acts, jnp.where(own, by_learner, by_search), learns, learns])
    free = on_host & ~own
    room = [
        jnp.float32(1.0),
        cores,
        jnp.where(on_host, _PLENTY, w.acting_devices),  # who acts on a processor calls its searches
        jnp.where(free, _PLENTY, w.searching_devices * jnp.where(own, w.role_threads, 1.0)),
        jnp.where(free, _PLENTY, jnp.where(own, w.role_threads, 1.0)),
        jnp.where(on_host | ~with_search, _PLENTY, 1.0),
    ]
    has = work > 0.0
    later = np.arange(_SEGMENTS)[None, None, :] >= np.arange(_SEGMENTS + 1)[None, :, None]  # segment s is number s + 1
    found = jnp.broadcast_to(has[:, None, :], (len(KINDS), *later.shape[1:])) & later
    last = np.array([1] + [_PUT] * _SEGMENTS)[None, :]  # a round without work has one segment, of no time
    following = jnp.where(jnp.any(found, -1), jnp.argmax(found, -1) + 1, last)
    count = jnp.stack([w.selfplay_workers, w.cpu_actors, w.searching_devices, jnp.float32(1.0), jnp.float32(1.0)])
    return _Pipeline(
        work=work[_KIND],
        demand=demand,
        room=jnp.stack(room),
        following=following.astype(jnp.int32)[_KIND],
        exists=jnp.asarray(_INDEX) < count[_KIND],
        threads=count,
        unit=unit,
        window=window,
        loop_count=jnp.asarray(w.loop_count),
        queues=jnp.stack([w.search_queue_size, w.batch_queue_size]),
    )


def _begin(p: _Pipeline, s: _State, jitter: Value) -> _State:
    """Everybody who waits for something that is there goes on; from the learner backwards, so that room passes upstream."""

    def first(waiting: jax.Array, number: jax.Array) -> jax.Array:
        """The first ``number`` of those who wait."""
        return waiting & (jnp.cumsum(waiting) <= number)

    idle, putting = (s.phase == _IDLE) & p.exists, s.phase == _PUT
    contexts, batches = s.queued

    taking = jnp.any(idle & _LEARNER) & (s.under_way < 2.0)  # it waits for the dispatch before the last first
    ready = first(putting & _SEARCH, p.queues[1] - batches + jnp.where(taking, p.loop_count - s.hand, 0.0))
    batches = batches + jnp.sum(ready)
    taken = jnp.where(taking, jnp.minimum(batches, p.loop_count - s.hand), 0.0)
    batches, hand = batches - taken, s.hand + taken
    dispatching = taking & (hand >= p.loop_count)
    hand = jnp.where(dispatching, 0.0, hand)

    asking = (idle | ready) & _SEARCH
    put = first(putting & _CONTEXT, p.queues[0] - contexts + jnp.sum(asking))
    contexts = contexts + jnp.sum(put)
    searching = first(asking, contexts)
    contexts = contexts - jnp.sum(searching)
    due = jnp.floor(s.made + 1e-4) - s.contexts
    drawing = first((idle | put) & _CONTEXT, due)

    allowed = jnp.ceil((s.published + p.window - s.started) / p.unit - 1e-4)
    playing = first(idle & _SELFPLAY, allowed)
    updating = idle & _UPDATE & (s.pending > 0.0)

    freed = (ready & ~searching) | (put & ~drawing)
    beginning = searching | drawing | playing | updating | (idle & _LEARNER & dispatching)
    entered = _following(p, jnp.zeros_like(s.phase))
    phase = jnp.where(beginning, entered, jnp.where(freed, _IDLE, s.phase))
    rounds = s.rounds + beginning
    left = jnp.where(beginning, _work(p, entered, rounds, jitter), s.left)
    return s._replace(
        phase=phase,
        left=left,
        rounds=rounds,
        started=s.started + p.unit * jnp.sum(playing),
        contexts=s.contexts + jnp.sum(drawing),
        queued=jnp.stack([contexts, batches]),
        hand=hand,
        under_way=s.under_way + dispatching,
        pending=s.pending - jnp.sum(updating),
    )


def _following(p: _Pipeline, phase: jax.Array) -> jax.Array:
    """[T] the phase after each thread's."""
    chosen = jax.nn.one_hot(phase, _SEGMENTS + 1, dtype=jnp.int32)
    return jnp.sum(chosen * p.following, axis=1)


def _at(phase: jax.Array) -> jax.Array:
    """[T, P] 1 where a thread is in that segment."""
    return jax.nn.one_hot(phase - 1, _SEGMENTS)


def _work(p: _Pipeline, phase: jax.Array, rounds: jax.Array, jitter: Value) -> jax.Array:
    """[T] seconds of the segment that each thread enters, varied by its round: evenly spread, nothing drawn."""
    seconds = jnp.sum(_at(phase) * p.work, axis=1)
    golden = 0.6180339887
    spread = jnp.mod(rounds * golden + np.arange(len(_KIND)) * golden**2, 1.0) - 0.5  # variance 1/12
    return seconds * (1.0 + jitter * np.sqrt(12.0) * spread)


def _advance(p: _Pipeline, s: _State, jitter: Value, counted: jax.Array) -> _State:
    """To the next moment that somebody is done with a segment."""
    busy = (s.phase > _IDLE) & (s.phase < _PUT)
    at = _at(s.phase)
    # Threads of a kind in the same segment take the same and get the same: it is worked out once for all of them.
    together = jnp.stack([jnp.sum(part, axis=0) for part in jnp.split(at, np.cumsum(MOST)[:-1])])  # [K, P]
    taken = jnp.sum(together[..., None] * p.demand, axis=(0, 1))  # [R]
    share = jnp.minimum(1.0, p.room / jnp.maximum(taken, 1e-9))
    rates = jnp.min(jnp.where(p.demand > 0.0, share[None, None], 1.0), axis=2)  # [K, P]
    use = jnp.sum((together * rates)[..., None] * p.demand, axis=1)  # [K, R]
    rate = jnp.sum(at * rates[_KIND], axis=1) + (1.0 - jnp.sum(at, axis=1))
    needed = jnp.where(busy, s.left / rate, jnp.inf)
    shortest = jnp.min(needed)
    step = jnp.where(jnp.isfinite(shortest), shortest, 0.0)
    done = busy & (needed <= step * (1.0 + 1e-6))
    left = jnp.maximum(s.left - rate * step, 0.0)

    entered = _following(p, s.phase)
    finished = done & (entered == _PUT)
    phase = jnp.where(done, entered, s.phase)
    waits = jnp.asarray(_CONTEXT | _SEARCH)
    phase = jnp.where(finished & ~waits, _IDLE, phase)
    left = jnp.where(done & ~finished, _work(p, entered, s.rounds, jitter), left)

    learnt = jnp.any(finished & _UPDATE)
    handed = jnp.any(finished & _LEARNER)
    time = s.time + step
    published = s.published + jnp.where(learnt, p.loop_count, 0.0)
    now = jnp.stack([time, published])
    spent = jnp.concatenate([jnp.ones(1), use.reshape(-1), jnp.sum(together, axis=1), s.queued])
    return s._replace(
        time=time,
        phase=phase,
        left=left,
        made=s.made + p.unit * jnp.sum(finished & _SELFPLAY),
        under_way=s.under_way - learnt,
        pending=s.pending + handed,
        published=published,
        half=jnp.where(counted, s.half, jnp.stack([time, s.contexts])),
        mark=jnp.where(counted & learnt & (s.mark[0] == 0.0), now, s.mark),
        newest=jnp.where(counted & learnt, now, s.newest),
        spent=s.spent + jnp.where(counted, step, 0.0) * spent,
    )
