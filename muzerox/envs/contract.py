"""The contract every environment keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from muzerox.envs.wrappers import auto_reset
from muzerox.types import Environment, TimeStep


class ContractError(AssertionError):
    """An environment breaks the contract; the message says where."""


def _require(condition: object, env: Environment, what: str) -> None:
    if not bool(condition):
        raise ContractError(f"{env.spec.id}: {what}")


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

    _require(
        after.observation.shape == (steps, num_envs, *spec.observation_shape),
        env,
        f"observation has shape {after.observation.shape[2:]}, spec says {spec.observation_shape}",
    )
    _require(
        str(after.observation.dtype) == spec.observation_dtype,
        env,
        f"observation has dtype {after.observation.dtype}, spec says {spec.observation_dtype}",
    )
    _require(after.legal.shape == (steps, num_envs, spec.num_actions), env, f"legal has shape {after.legal.shape[2:]}")
    for name, dtype in (
        ("reward", "float32"),
        ("terminated", "bool"),
        ("truncated", "bool"),
        ("legal", "bool"),
        ("player", "int32"),
    ):
        _require(str(getattr(after, name).dtype) == dtype, env, f"{name} has dtype {getattr(after, name).dtype}, must be {dtype}")
    _require(np.isfinite(after.observation.astype(np.float32)).all(), env, "an observation is not finite")
    _require(np.isfinite(after.reward).all(), env, "a reward is not finite")
    _require(after.legal.any(-1).all(), env, "a state has no legal action")
    _require(spec.has_legal or after.legal.all(), env, "has_legal is False but some action is illegal")
    _require(not (after.terminated & after.truncated).any(), env, "a step is both terminated and truncated")
    _require(spec.can_truncate or not after.truncated.any(), env, "can_truncate is False but an episode was truncated")
    goes_on = ~(after.terminated | after.truncated)
    _require(
        (after.final_observation[goes_on] == after.observation[goes_on]).all(),
        env,
        "final_observation differs from observation although the episode goes on",
    )
    _require(
        all((a == b).all() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(again), strict=True)),
        env,
        "the same keys gave different episodes",
    )
    if spec.num_players == 2:
        _require((before.player[goes_on] != after.player[goes_on]).all(), env, "turns do not alternate strictly")
    else:
        _require(spec.num_players == 1, env, f"{spec.num_players} players are not supported")
        _require((after.player == 0).all(), env, "the only player must be 0")
    return {"terminated": int(after.terminated.sum()), "truncated": int(after.truncated.sum()), "steps": steps * num_envs}
