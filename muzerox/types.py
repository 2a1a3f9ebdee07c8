"""Records that travel between the parts, and the names of the axes.

Axes, defined here once: E environments, B sequences of a batch, C rows of the replay ring, L rows of a window,
K unroll steps, N simulations, A actions, R reanalyzed sequences. ``...`` stands for the shape of an observation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import struct

Params = Any  # nested dict of arrays
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What an agent must know about an environment. Hashable, static under jit."""

    id: str
    observation_shape: tuple[int, ...]
    observation_dtype: str  # dtype observations are stored in; networks convert
    num_actions: int
    num_players: int = 1  # 2: zero-sum, strictly alternating turns
    has_legal: bool = False  # False: every action is always legal
    can_truncate: bool = False

    @property
    def sign(self) -> int:
        """What a value is multiplied by when the turn passes: -1 with two players, else 1."""
        return -1 if self.num_players == 2 else 1


class TimeStep(struct.PyTreeNode):
    """What an environment shows after reset or step; leaves have no batch axis unless vmapped.

    ``reward``, ``terminated``, ``truncated`` and ``final_observation`` speak of the step just made (zeros and the
    first observation after reset). ``observation``, ``legal`` and ``player`` speak of the decision to take now: under
    ``auto_reset`` they belong to the next episode when this one ended.
    """

    observation: jax.Array  # [...] seen by the player to move
    reward: jax.Array  # [] float32, to the player who acted
    terminated: jax.Array  # [] bool, the episode ended by its own rules: the value of what follows is 0
    truncated: jax.Array  # [] bool, the episode was cut: the value of what follows is not 0
    final_observation: jax.Array  # [...] observation the step led to, before any reset
    legal: jax.Array  # [A] bool
    player: jax.Array  # [] int32, the player to move

    @property
    def ended(self) -> jax.Array:
        """[] bool: terminated or truncated."""
        return self.terminated | self.truncated


class Environment(NamedTuple):
    """A JAX environment: pure functions for one instance; vmap for more.

    ``reset(key) -> (state, TimeStep)`` and ``step(key, state, action) -> (state, TimeStep)``.
    """

    spec: EnvSpec
    reset: Callable[[jax.Array], tuple[Any, TimeStep]]
    step: Callable[[jax.Array, Any, jax.Array], tuple[Any, TimeStep]]


class HostBatch(NamedTuple):
    """E running environments on the host, which start their next episode within the step that ended the last.

    ``reset() -> TimeStep`` and ``step(action int32 [E]) -> TimeStep`` with NumPy leaves [E, ...], as under ``auto_reset``; the
    arrays are the caller's to keep. ``close()`` frees what they hold; it may be called twice.
    """

    reset: Callable[[], TimeStep]
    step: Callable[[Any], TimeStep]
    close: Callable[[], None]


class HostEnvironment(NamedTuple):
    """Environments that run in Python or C on the host: ``make(num_envs, seed) -> HostBatch``, from any thread.

    ``make_evaluation`` is the same for playing whole games by their true score, where that differs from what is learnt
    from (lives and clipped rewards of Atari); None: it does not.
    """

    spec: EnvSpec
    make: Callable[[int, int], HostBatch]
    make_evaluation: Callable[[int, int], HostBatch] | None = None


class Transition(struct.PyTreeNode):
    """One row of the replay ring: a decision and its consequence. Leaves lead with [E] or [C, E]."""

    observation: jax.Array  # [...] before the action
    action: jax.Array  # int32
    reward: jax.Array  # float32, to the player who acted
    terminated: jax.Array  # bool
    truncated: jax.Array  # bool
    policy: jax.Array  # [A] float32, the search's improved policy
    legal: jax.Array | None  # [A] bool, absent when every action is always legal
    final_observation: jax.Array | None  # [...], absent when the environment never truncates
    random: jax.Array | None = None  # bool, the action was drawn at random; absent when none ever is


class Decision(struct.PyTreeNode):
    """What a search decided for a batch of observations."""

    action: jax.Array  # [B] int32
    policy: jax.Array  # [B, A] float32, improved policy
    value: jax.Array  # [B] float32, searched value for the player to move


class Batch(struct.PyTreeNode):
    """What a loss is computed from."""

    observation: jax.Array  # [B, ...]
    action: jax.Array  # [B, K] int32
    reward: jax.Array  # [B, K] float32, zero in absorbing states
    policy: jax.Array | None  # [B, K+1, A] float32; absent once targets are made from it
    partial_return: jax.Array  # [B, K+1] float32, discounted rewards up to the bootstrap
    bootstrap_weight: jax.Array  # [B, K+1] float32, signed discount of the bootstrap value; 0 after termination
    bootstrap_observation: jax.Array | None  # [B, K+1, ...]; absent once targets are made from it
    absorbing: jax.Array  # [B, K+1] bool, the episode terminated before this position
    unknown: jax.Array  # [B, K+1] bool, the episode was truncated before this position: nothing to learn
    importance: jax.Array  # [B] float32, importance weights, largest 1


class Targets(struct.PyTreeNode):
    """What the unrolled model is fitted to, and where (masks are 1 where the loss counts)."""

    policy: jax.Array  # [B, K+1, A] float32
    value: jax.Array  # [B, K+1] float32
    reward: jax.Array  # [B, K] float32
    policy_mask: jax.Array  # [B, K+1] float32
    value_mask: jax.Array  # [B, K+1] float32
    reward_mask: jax.Array  # [B, K] float32


class LossOutput(struct.PyTreeNode):
    """Per-example loss; the learner applies importance weights and the loss scale."""

    loss: jax.Array  # [B] float32
    priority: jax.Array  # [B] float32, absolute value error at the root
    metrics: Metrics  # scalars


class Algorithm(NamedTuple):
    """A variant of MuZero as a record of functions; see ``muzerox.algorithms``.

    init(key) -> params
    act(key, params, observation [B, ...], legal [B, A] or None, explore) -> Decision
    value(params, observation [B, ...]) -> [B] float32, the network's own value
    targets(params, batch) -> Targets
    loss(params, batch, targets) -> LossOutput
    row_bytes: of the largest array that networks make of a row, where rows are best learnt from few at a time; else 0
    """

    init: Callable[[jax.Array], Params]
    act: Callable[..., Decision]
    value: Callable[[Params, jax.Array], jax.Array]
    targets: Callable[[Params, Batch], Targets]
    loss: Callable[[Params, Batch, Targets], LossOutput]
    row_bytes: int = 0


class Skips(struct.PyTreeNode):
    """Of updates that follow one another, those left out because a gradient was not finite.

    Numbers on the host or [] int32 in a compiled program; :meth:`then` is plain arithmetic, the same in both. Runs are counted
    across the borders of dispatches, so that it makes no difference how updates are portioned out.
    """

    updates: Any = 0
    total: Any = 0
    first: Any = 0  # left out in a row at the beginning
    last: Any = 0  # and at the end
    longest: Any = 0  # and anywhere

    @staticmethod
    def of(skipped: Any) -> Skips:
        """Of one update; ``skipped`` is 1 or 0."""
        return Skips(updates=1, total=skipped, first=skipped, last=skipped, longest=skipped)

    def then(self, following: Skips) -> Skips:
        """These updates and the following ones."""
        return Skips(
            updates=self.updates + following.updates,
            total=self.total + following.total,
            first=self.first + (self.first == self.updates) * following.first,
            last=following.last + (following.last == following.updates) * self.last,
            longest=_larger(_larger(self.longest, following.longest), self.last + following.first),
        )


def _larger(a: Any, b: Any) -> Any:
    return a + (b > a) * (b - a)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a call of ``Runtime.run`` did, on the host."""

    env_steps: int  # transitions collected since the start of training, summed over environments
    updates: int  # learner updates since the start of training
    episodes: int  # episodes that ended during this call
    mean_return: float | None  # of those episodes; absent when none ended
    mean_length: float | None  # steps
    skips: Skips  # updates of this call that were left out
    metrics: dict[str, float]  # means over the updates of this call
    pipeline: dict[str, float] = dataclasses.field(default_factory=dict)  # of a runtime with threads: waits, depths, staleness


def _as_it_is(state: Any) -> Any:
    return state


def _nothing() -> None:
    return None


class Runtime(NamedTuple):
    """Where training runs. ``init(key) -> state``; ``run(state, n, loop_count) -> (state, Report)`` makes n dispatches of
    ``loop_count`` updates each (by default ``runtime.loop_count``; another number compiles nothing); ``state`` is donated.
    A state has ``learner`` (a LearnerState) and ``env_steps``.

    ``updates_at(env_steps) -> int`` is the number of updates by which so many environment steps are first made.

    ``prefill(state) -> state`` stands in for the rows that the first update waits for, none of them played: for timing, which
    does not depend on what they hold. ``state`` is donated.

    ``draw(state, key, count, gather)`` is ``gather(storage, Sample)``, jitted, of so many sequences drawn from the replay as the
    learner draws them; ``state`` is one that ``run`` has returned, and stays as it is.

    ``snapshot(state) -> state`` is what a checkpoint saves; where ``run`` has raised RunFailed, what was learnt by then, although
    ``state`` was donated. ``interrupt()``, which a signal handler may call, has ``run`` return
    early from now on; ``close()`` ends threads and environments.
    """

    init: Callable[[jax.Array], Any]
    run: Callable[..., tuple[Any, Report]]
    updates_at: Callable[[int], int]
    prefill: Callable[[Any], Any]
    draw: Callable[[Any, jax.Array, int, Callable[..., Any]], Any]
    snapshot: Callable[[Any], Any] = _as_it_is
    interrupt: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing
