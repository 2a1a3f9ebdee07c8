"""Reanalyze: fresh policy targets for stored states (Schrittwieser et al., arXiv:1911.08265, appendix H).

The same ``act`` that plays searches the stored observations again with the target network's parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from muzerox.types import Algorithm, Params


def refresh_policy(
    key: jax.Array, algorithm: Algorithm, params: Params, policy: jax.Array, observation: jax.Array, legal: jax.Array | None
) -> jax.Array:
    """Replaces the policy targets of the first R sequences of a batch.

    Args:
      params: of the target network.
      policy: [B, K+1, A] float32, the stored targets.
      observation: [R, K+1, ...], the states they belong to.
      legal: [R, K+1, A] bool, or None.

    Returns:
      [B, K+1, A] float32.
    """
    count, positions = observation.shape[:2]

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape((count * positions, *x.shape[2:]))

    decision = algorithm.act(key, params, flat(observation), None if legal is None else flat(legal), True)
    fresh = decision.policy.reshape((count, positions, -1))
    return jnp.concatenate([fresh, policy[count:]])
