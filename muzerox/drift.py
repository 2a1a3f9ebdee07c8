"""How far the numbers of a precision level are from O0's, for the same parameters on the same replayed sequences.

A training of some seconds gives parameters that have learnt something: fresh heads are zero, and zero is exact at every level.
What is compared is what acting and learning are made of: policy, value and reward along the stored actions, as a search walks
them (its copies of parameters, its stored hidden states); a search with the same key; the gradient of the loss.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from muzerox import replay, transforms
from muzerox.algorithms import make_algorithm
from muzerox.compilation import ONCE
from muzerox.config import Config
from muzerox.envs import make_env
from muzerox.errors import RunFailed
from muzerox.learner import read_batch
from muzerox.networks import make_model
from muzerox.precision import POLICIES, cast, make_loss_scale, pack, resolve, unpack
from muzerox.replay import Sample
from muzerox.runtimes import make_runtime, offer_cpu_devices, resolve_kind
from muzerox.types import Batch, EnvSpec, Params, Runtime, Targets, Transition

REFERENCE = "O0"
LEAST_UPDATES = 64  # trained for, even if fewer seconds are asked for,
MOST_SECONDS = 20.0  # unless they, or learning anything, take longer than this
# Nor more updates, if something was learnt in them: a machine that makes ten thousand has solved CartPole, and then gradients
# are next to nothing but what rounding makes of them.
MOST_UPDATES = 1024
PARTS = 8  # of the batch, whose gradients are compared: each is spread over the whole replay, as sequences are drawn so
# Values that are nearly the same everywhere have this share of their size as their spread.
LEAST_SPREAD = 0.1


class Replayed(NamedTuple):
    """Sequences of a replay."""

    batch: Batch
    legal: jax.Array | None  # [B, K+1, A] bool, absent where every action always is


class Numbers(NamedTuple):
    """What a level makes of parameters and sequences; float32, NumPy."""

    policy_logits: np.ndarray  # [B, K+1, A]
    value: np.ndarray  # [B, K+1]
    reward: np.ndarray  # [B, K], of the step to position k + 1
    action: np.ndarray  # [B] int32, chosen by a search of the root with exploration
    weights: np.ndarray  # [B, A], its improved policy
    gradient: np.ndarray  # [P], of the mean loss, all parameters in a row
    gradient_noise: np.ndarray  # [], standard error of that, over all parameters, by how parts of the batch differ


def read_replayed(config: Config, spec: EnvSpec, storage: Transition, start: Sample) -> Replayed:
    """The sequences at ``start`` of ``storage`` (leaves [C, E, ...])."""
    positions = jnp.arange(config.train.unroll_steps + 1)
    return Replayed(read_batch(config, spec, storage, start)[0], replay.read(storage.legal, start, positions))


def at_level(config: Config, level: str) -> Config:
    """The configuration at another precision level, with that level's loss scaling."""
    return config.replace({"precision.level": level, "precision.loss_scale": "auto"})


def make_numbers(config: Config, spec: EnvSpec) -> Callable[[jax.Array, Params, Replayed], Numbers]:
    """``numbers(key, params, replayed) -> Numbers`` at the configured level; ``params`` are float32, as the learner's are.

    Raises:
      ConfigError: the configured network does not fit the environment's observations.
    """
    policy = POLICIES[resolve(config.precision).level]
    model, algorithm, net = make_model(config.network, spec, policy), make_algorithm(config, spec), config.network

    def unroll(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As a search does it, which is the roughest that a level has: narrow parameters, stored hidden states."""
        params = cast(params, policy.acting)

        def predicted(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits, value_logits = model.predict(params, hidden)
            return logits, transforms.expected_value(value_logits, net.value_bound)

        def step(embedding: jax.Array, action: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            hidden, reward_logits = model.dynamics(params, unpack(embedding, policy.embedding), action)
            reward = transforms.expected_value(reward_logits, net.reward_bound)
            return pack(hidden, policy.embedding), (*predicted(hidden), reward)

        root = model.represent(params, batch.observation)
        _, (logits, value, reward) = jax.lax.scan(step, pack(root, policy.embedding), batch.action.T)
        first_logits, first_value = predicted(root)
        logits, value = jnp.concatenate([first_logits[None], logits]), jnp.concatenate([first_value[None], value])
        return logits.swapaxes(0, 1), value.T, reward.T

    def compute(key: jax.Array, params: Params, replayed: Replayed, scale: jax.Array) -> tuple[jax.Array, ...]:
        batch, legal = replayed
        decision = algorithm.act(key, params, batch.observation, None if legal is None else legal[:, 0], True)
        targets = algorithm.targets(params, batch)

        def scaled_loss(params: Params, part: tuple[Batch, Targets]) -> jax.Array:
            return jnp.mean(algorithm.loss(params, *part).loss * part[0].importance) * scale

        def add(sums: tuple[jax.Array, jax.Array], part: tuple[Batch, Targets]) -> tuple[tuple[jax.Array, jax.Array], None]:
            gradient = ravel_pytree(jax.grad(scaled_loss)(params, part))[0] / scale
            return (sums[0] + gradient, sums[1] + gradient @ gradient), None

        parts = math.gcd(PARTS, len(batch.action))
        split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), (batch, targets))
        (total, squares), _ = jax.lax.scan(add, (jnp.zeros_like(ravel_pytree(params)[0]), jnp.float32(0.0)), split)
        mean = total / parts
        noise = jnp.sqrt(jnp.maximum(squares / parts - mean @ mean, 0.0) / max(parts - 1, 1))
        return *unroll(params, batch), decision.action, decision.policy, mean, noise

    compiled = jax.jit(compute, compiler_options=ONCE)

    def numbers(key: jax.Array, params: Params, replayed: Replayed) -> Numbers:
        scale = float(make_loss_scale(config.precision).scale)
        while True:
            found = Numbers(*jax.device_get(compiled(key, params, replayed, jnp.float32(scale))))
            if np.isfinite(found.gradient).all() or scale <= 1.0:
                return found
            scale /= 2.0  # as a training finds its scale

    return numbers


def compare(base: Numbers, other: Numbers, replayed: Replayed) -> dict[str, Any]:
    """How far ``other`` is from ``base``, in float64. Positions after an episode's end and illegal actions do not count.

    Returns:
      policy_kl: KL(base || other) of the policies in nats, means over sequences by position, the root first.
      policy_kl_max: of any sequence and position.
      value_error: mean absolute differences by position, as shares of ``value_spread``. Of positions that no sequence has, there
        is nothing.
      value_spread: standard deviation of the base's values; at least ``LEAST_SPREAD`` of their root mean square, and of that of
        the rewards that were summed up, so that values that are all the same have one.
      reward_error: likewise, as shares of ``value_spread`` or of the standard deviation of the rewards that were received, the
        larger: a search compares their sums, and at first values say nothing yet.
      policy_learnt: KL of the base's policies from the uniform one over legal actions, mean: 0 of what has learnt nothing.
      actions_agree: share of roots where searches with one key choose the same action.
      weights_differ: total variation of their improved policies, mean. (KL would be infinite where a visit moves.)
      gradient_error: length of the difference of the gradients, as a share of the base's length, or of its standard error where
        that is larger: where the gradients of sequences cancel each other, what is left is chance.

    Raises:
      RunFailed: numbers that are not finite.
    """
    for whose, numbers in (("O0's", base), ("its", other)):
        odd = [name for name, x in numbers._asdict().items() if not np.isfinite(x).all()]
        if odd:
            raise RunFailed(f"{whose} {', '.join(odd)} not finite")
    batch = replayed.batch
    inside, legal = _counted(base, replayed)
    ours, theirs = _log_policy(base.policy_logits, legal), _log_policy(other.policy_logits, legal)
    probability = np.exp(ours)
    kl = np.sum(probability * np.where(legal, ours - theirs, 0.0), axis=-1)
    values = base.value[inside].astype(np.float64)
    floors = (_rms(values), _rms(np.asarray(batch.partial_return)[inside]))
    spread = max(float(np.std(values)), *(LEAST_SPREAD * x for x in floors), 1e-9)
    value = np.abs(base.value.astype(np.float64) - other.value)
    received = np.asarray(batch.reward, np.float64)[inside[:, :-1]]
    reward_spread = max(spread, float(np.std(received)) if received.size else 0.0)
    reward = np.abs(base.reward.astype(np.float64) - other.reward)
    a, b = base.gradient.astype(np.float64), other.gradient.astype(np.float64)
    length = max(float(np.linalg.norm(a)), float(base.gradient_noise), 1e-300)
    return {
        "policy_kl": _by_position(kl, inside),
        "policy_kl_max": float(np.max(kl, where=inside, initial=0.0)),
        "value_error": [x / spread for x in _by_position(value, inside)],
        "reward_error": [x / reward_spread for x in _by_position(reward, inside[:, :-1])],
        "value_spread": spread,
        "policy_learnt": _learnt(base, replayed),
        "actions_agree": float(np.mean(base.action == other.action)),
        "weights_differ": float(np.mean(0.5 * np.abs(base.weights.astype(np.float64) - other.weights).sum(-1))),
        "gradient_error": float(np.linalg.norm(a - b)) / length,
    }


def _counted(numbers: Numbers, replayed: Replayed) -> tuple[np.ndarray, np.ndarray]:
    """Positions [B, K+1] within an episode, and actions [B, K+1, A] that count at each."""
    batch = replayed.batch
    inside = ~(np.asarray(batch.absorbing) | np.asarray(batch.unknown))
    legal = np.ones(numbers.policy_logits.shape, bool) if replayed.legal is None else np.asarray(replayed.legal)
    return inside, legal | ~inside[..., None]  # beyond the end it may allow nothing


def _learnt(numbers: Numbers, replayed: Replayed) -> float:
    """KL of policies from the uniform one over legal actions, mean, nats."""
    inside, legal = _counted(numbers, replayed)
    policy, uniform = _log_policy(numbers.policy_logits, legal), -np.log(legal.sum(-1))
    return float(np.mean(np.sum(np.exp(policy) * np.where(legal, policy - uniform[..., None], 0.0), axis=-1)[inside]))


def _log_policy(logits: np.ndarray, legal: np.ndarray) -> np.ndarray:
    """Log-probabilities [..., A] float64 over legal actions; of others, very small ones."""
    masked = np.where(legal, logits.astype(np.float64), -1e9)
    shifted = masked - masked.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _by_position(x: np.ndarray, inside: np.ndarray) -> list[float]:
    """Means of [B, P] over sequences that are still inside their episode, for positions that any is at."""
    return [float(x[inside[:, k], k].mean()) for k in range(x.shape[1]) if inside[:, k].any()]


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x.astype(np.float64)))))


class Learnt(NamedTuple):
    """What a short training leaves."""

    params: Params
    replayed: Replayed
    updates: int
    seconds: float  # of training, without what compiling and the first rows took


def learn_and_draw(
    config: Config, *, seconds: float, examples: int, enough: Callable[[EnvSpec, Learnt], bool] | None = None
) -> tuple[EnvSpec, Learnt]:
    """Trains for some ``seconds`` by really playing, and draws ``examples`` sequences from the replay.

    For at most ``MOST_UPDATES``. Twice as long, and again, until what was learnt is ``enough``, but for no more than
    ``MOST_SECONDS``.

    Raises:
      ConfigError, RunFailed: as training does.
    """
    env = make_env(config.env)
    config = resolve_kind(config, env)
    if config.runtime.kind == "sebulba":  # near its end self-play would no longer run ahead
        config = config.replace("train.max_env_steps", 2_000_000_000)
    runtime = make_runtime(config, env, make_algorithm(config, env.spec))
    try:
        for learnt in _train(runtime, config, env.spec, seconds, examples):
            if enough is None or learnt.seconds >= MOST_SECONDS or enough(env.spec, learnt):
                break
        return env.spec, learnt
    finally:
        runtime.close()


def _train(runtime: Runtime, config: Config, spec: EnvSpec, seconds: float, examples: int) -> Iterator[Learnt]:
    """What is learnt in ``seconds`` or ``MOST_UPDATES``, in twice as many, and so on."""

    def gather(storage: Transition, start: Sample) -> Replayed:
        return read_replayed(config, spec, storage, start)

    key = jax.random.key(config.seed)
    state, report = runtime.run(runtime.init(key), 1, 1)  # compiles, and plays what the first update waits for
    size, past, updates = 1, 0.0, MOST_UPDATES
    while True:
        while past < MOST_SECONDS and (report.updates < LEAST_UPDATES or (past < seconds and report.updates < updates)):
            began = time.perf_counter()
            state, report = runtime.run(state, 1, size)
            took = time.perf_counter() - began
            past += took
            if took < seconds / 16 and report.updates < updates / 8:
                size *= 2
        replayed = jax.device_get(runtime.draw(state, jax.random.fold_in(key, 1), examples, gather))
        yield Learnt(jax.device_get(state.learner.params), replayed, report.updates, past)
        seconds, updates = min(2.0 * past, MOST_SECONDS), 2 * report.updates


def measure_drift(
    config: Config, levels: Sequence[str], *, seconds: float, examples: int, least_learnt: float = 0.0
) -> dict[str, dict[str, Any]]:
    """Trains for ``seconds`` at the configured level, and says how far each of ``levels`` then is from O0.

    Longer where the policy has learnt less than ``least_learnt``, in nats (``policy_learnt`` of :func:`compare`).

    Returns:
      By level the figures of :func:`compare`, with ``updates``, ``training_seconds`` and ``examples``; or ``failure``, one line.

    Raises:
      ConfigError, RunFailed: as training does.
    """
    offer_cpu_devices(config.runtime.num_devices)
    config = config.replace({f"precision.{k}": v for k, v in vars(resolve(config.precision)).items()})
    key = jax.random.fold_in(jax.random.key(config.seed), 2)

    @functools.cache
    def compiled(level: str, spec: EnvSpec) -> Callable[[jax.Array, Params, Replayed], Numbers]:
        return make_numbers(at_level(config, level), spec)

    def numbers(level: str, spec: EnvSpec, learnt: Learnt) -> Numbers:
        return compiled(level, spec)(key, learnt.params, learnt.replayed)

    def enough(spec: EnvSpec, learnt: Learnt) -> bool:
        return _learnt(numbers(REFERENCE, spec, learnt), learnt.replayed) >= least_learnt

    spec, learnt = learn_and_draw(config, seconds=seconds, examples=examples, enough=enough)
    common = {"updates": learnt.updates, "training_seconds": learnt.seconds, "examples": examples}
    with ThreadPoolExecutor(thread_name_prefix="level") as pool:  # XLA compiles as many programs at once as there are cores
        asked = {level: pool.submit(numbers, level, spec, learnt) for level in dict.fromkeys((REFERENCE, *levels))}
    base = asked[REFERENCE].result()
    found: dict[str, dict[str, Any]] = {}
    for level in levels:
        try:
            found[level] = compare(base, asked[level].result(), learnt.replayed) | common
        except RunFailed as failure:
            found[level] = {"failure": str(failure)}
    return found
