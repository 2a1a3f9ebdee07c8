"""The contract every environment keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.envs.wrappers import auto_reset
from muzerox.types import Environment, EnvSpec, HostBatch, HostEnvironment, TimeStep


class ContractError(AssertionError):
    """An environment breaks the contract; the message says where."""


def _require(condition: object, spec: EnvSpec, what: str) -> None:
    if not bool(condition):
        raise ContractError(f"{spec.id}: {what}")


def _same(one: TimeStep, other: TimeStep) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def _check_time_steps(spec: EnvSpec, before: TimeStep, after: TimeStep) -> None:
    """Time steps [T, E] as they were shown before and after each step."""
    lead = after.reward.shape
    for name in ("observation", "final_observation"):
        shown = getattr(after, name)
        _require(
            shown.shape == (*lead, *spec.observation_shape),
            spec,
            f"{name} has shape {shown.shape[2:]}, spec says {spec.observation_shape}",
        )
        _require(
            str(shown.dtype) == spec.observation_dtype,
            spec,
            f"{name} has dtype {shown.dtype}, spec says {spec.observation_dtype}",
        )
    _require(after.legal.shape == (*lead, spec.num_actions), spec, f"legal has shape {after.legal.shape[2:]}")
    for name, dtype in (
        ("reward", "float32"),
        ("terminated", "bool"),
        ("truncated", "bool"),
        ("legal", "bool"),
        ("player", "int32"),
    ):
        found = getattr(after, name)
        _require(str(found.dtype) == dtype, spec, f"{name} has dtype {found.dtype}, must be {dtype}")
        _require(name == "legal" or found.shape == lead, spec, f"{name} has shape {found.shape[2:]}, must be one number")
    for shown in (after.observation, after.final_observation):
        _require(np.isfinite(shown.astype(np.float32)).all(), spec, "an observation is not finite")
    _require(np.isfinite(after.reward).all(), spec, "a reward is not finite")
    _require(after.legal.any(-1).all(), spec, "a state has no legal action")
    _require(spec.has_legal or after.legal.all(), spec, "has_legal is False but some action is illegal")
    _require(not (after.terminated & after.truncated).any(), spec, "a step is both terminated and truncated")
    _require(spec.can_truncate or not after.truncated.any(), spec, "can_truncate is False but an episode was truncated")
    goes_on = ~(after.terminated | after.truncated)
    _require(
        (after.final_observation[goes_on] == after.observation[goes_on]).all(),
        spec,
        "final_observation differs from observation although the episode goes on",
    )
    if spec.num_players == 2:
        _require((before.player[goes_on] != after.player[goes_on]).all(), spec, "turns do not alternate strictly")
    else:
        _require(spec.num_players == 1, spec, f"{spec.num_players} players are not supported")
        _require((after.player == 0).all(), spec, "the only player must be 0")


def check_env(env: Environment, *, seed: int = 0, steps: int = 64, num_envs: int = 8) -> dict[str, int]:
    """Plays random legal actions and checks everything an agent relies on.

    Shapes, dtypes and stability under ``lax.scan``; determinism by key; observations finite; at least one legal
    action; terminated and truncated never both; ``final_observation`` equal to ``observation`` where nothing ended;
    strict alternation of two players within an episode; rewards finite; an environment that is declared never to
    truncate does not.

    Args:
      env: without automatic reset.
      steps: steps played in each of ``num_envs`` copies, under :func:`auto_reset`.

    Returns:
      Counts of what was seen: ``terminated``, ``truncated``, ``steps``.

    Raises:
      ContractError: naming the environment and the broken rule.
    """
    spec = env.spec
    looped = auto_reset(env)
    key_reset, key_play = jax.random.split(jax.random.key(seed))
    reset_keys = jax.random.split(key_reset, num_envs)

    def body(carry: tuple, key: jax.Array) -> tuple:
        state, timestep = carry
        key_action, key_step = jax.random.split(key)
        logits = jnp.where(timestep.legal, 0.0, -jnp.inf)
        action = jax.random.categorical(key_action, logits, axis=-1).astype(jnp.int32)
        following = jax.vmap(looped.step)(jax.random.split(key_step, num_envs), state, action)
        return following, (timestep, following[1])

    @jax.jit
    def play(keys: jax.Array, key: jax.Array) -> tuple[TimeStep, TimeStep]:
        return jax.lax.scan(body, jax.vmap(env.reset)(keys), jax.random.split(key, steps))[1]

    try:
        before, after = play(reset_keys, key_play)
    except TypeError as error:  # lax.scan refuses a state whose types or shapes change
        raise ContractError(f"{spec.id}: state or time step changes type from reset to step: {error}") from error
    again = play(reset_keys, key_play)[1]
    before, after, again = jax.tree.map(np.asarray, (before, after, again))

    _check_time_steps(spec, before, after)
    _require(_same(after, again), spec, "the same keys gave different episodes")
    return {"terminated": int(after.terminated.sum()), "truncated": int(after.truncated.sum()), "steps": steps * num_envs}


def _random_actions(spec: EnvSpec, timestep: TimeStep, generator: np.random.Generator) -> np.ndarray:
    """[E] int32, uniform over the legal actions."""
    draws = generator.random((len(timestep.reward), spec.num_actions))
    return np.where(timestep.legal, draws, -1.0).argmax(-1).astype(np.int32)


def _play(spec: EnvSpec, batch: HostBatch, steps: int, seed: int, beside: HostBatch | None = None) -> list[TimeStep]:
    """``steps`` random steps from a reset, while another batch plays on beside it if there is one."""
    generator, others = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    shown, copies = [batch.reset()], []
    other = None if beside is None else beside.reset()
    for _ in range(steps):
        copies.append(jax.tree.map(np.array, shown[-1]))
        action = _random_actions(spec, shown[-1], generator)
        given = action.copy()
        shown.append(batch.step(given))
        _require(np.array_equal(action, given), spec, "step changes the actions it is given")
        given[:] = 0  # the array is its caller's again
        if beside is not None and other is not None:
            other = beside.step(_random_actions(spec, other, others))
    for leaf in jax.tree.leaves(shown):
        _require(isinstance(leaf, np.ndarray), spec, f"a time step holds {type(leaf).__name__}, must be NumPy arrays")
    for kept, copied in zip(shown, copies, strict=False):
        _require(_same(kept, copied), spec, "a later step overwrites the arrays of an earlier one")
    return shown


def check_host_env(env: HostEnvironment, *, seed: int = 0, steps: int = 64, num_envs: int = 4) -> dict[str, int]:
    """Plays random legal actions on the host and checks everything an agent relies on.

    The rules of :func:`check_env`, and those of batches: NumPy arrays that later steps leave alone; the first time step free
    of reward and ends, also after a second reset; the same seed plays the same, whatever other batches do; ``close`` twice;
    ``can_truncate``, since whoever steps a batch may have to cut its episodes. ``make_evaluation`` must keep to the spec too.

    Returns:
      Counts of what was seen: ``terminated``, ``truncated``, ``steps``.

    Raises:
      ContractError: naming the environment and the broken rule.
    """
    spec = env.spec
    _require(spec.can_truncate, spec, "can_truncate must be True for environments of the host")
    batch, other = env.make(num_envs, seed), env.make(num_envs, seed + 1)
    try:
        shown = _play(spec, batch, steps, seed, beside=other)
        first = [shown[0], batch.reset()]
    finally:
        for opened in (batch, other):
            opened.close()
            opened.close()
    for start in first:
        quiet = not (np.any(start.reward) or np.any(start.terminated) or np.any(start.truncated))
        _require(quiet, spec, "a reset shows a reward or an end")
    before, after = (jax.tree.map(lambda *leaves: np.stack(leaves), *part) for part in (shown[:-1], shown[1:]))
    _check_time_steps(spec, before, after)
    start = jax.tree.map(lambda *leaves: np.stack(leaves), *first)
    _check_time_steps(spec, start.replace(player=1 - start.player), start)  # of two players, either may begin
    again = env.make(num_envs, seed)
    try:
        repeated = _play(spec, again, steps, seed)
    finally:
        again.close()
    _require(all(map(_same, shown, repeated)), spec, "the same seed gave different episodes")
    if env.make_evaluation is not None:
        check_host_env(env._replace(make=env.make_evaluation, make_evaluation=None), seed=seed, steps=4, num_envs=2)
    return {"terminated": int(after.terminated.sum()), "truncated": int(after.truncated.sum()), "steps": steps * num_envs}
