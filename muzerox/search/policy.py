"""From a configuration to a decision, by a search policy of any engine.

Gumbel MuZero: Danihelka et al., Policy Improvement by Planning with Gumbel (ICLR 2022). MuZero with PUCT:
Schrittwieser et al., arXiv:1911.08265. Tree statistics are float32 whatever the precision level: mctx gives the tree
the dtype of ``root.value``, and averages in bfloat16 are wrong. The least range that values are scaled by is as in EfficientZero
(Ye et al., arXiv:2111.00210), whose code calls it ``value_delta_max``.

An engine is a module with ``gumbel_muzero_policy`` and ``muzero_policy`` of mctx's signatures.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import mctx

from muzerox.config import SearchConfig
from muzerox.types import Decision


class Search(Protocol):
    """``search(key, params, root, recurrent_fn, invalid, explore) -> Decision``.

    ``root`` is mctx.RootFnOutput over [B]; ``invalid`` is [B, A], 1 where an action is illegal, or None; ``explore``
    is static: False switches every root noise off and takes the best action.
    """

    def __call__(
        self, key: jax.Array, params: Any, root: mctx.RootFnOutput, recurrent_fn: Any, invalid: jax.Array | None, explore: bool
    ) -> Decision: ...


def gumbel_search(config: SearchConfig, engine: Any = mctx) -> Search:
    """Gumbel MuZero: sequential halving at the root, deterministic interior selection, improved policy target."""
    qtransform = functools.partial(
        mctx.qtransform_completed_by_mix_value,
        value_scale=config.value_scale,
        maxvisit_init=config.maxvisit_init,
        epsilon=config.min_value_range,
    )

    def search(
        key: jax.Array, params: Any, root: mctx.RootFnOutput, recurrent_fn: Any, invalid: jax.Array | None, explore: bool
    ) -> Decision:
        output = engine.gumbel_muzero_policy(
            params,
            key,
            root,
            recurrent_fn,
            config.num_simulations,
            invalid,
            max_depth=config.max_depth,
            qtransform=qtransform,
            max_num_considered_actions=config.max_considered_actions,
            gumbel_scale=config.gumbel_scale if explore else 0.0,
        )
        return _decision(output)

    return search


def muzero_search(config: SearchConfig, engine: Any = mctx) -> Search:
    """MuZero's PUCT with Dirichlet noise at the root and actions sampled from visit counts."""
    qtransform = functools.partial(mctx.qtransform_by_parent_and_siblings, epsilon=config.min_value_range)

    def search(
        key: jax.Array, params: Any, root: mctx.RootFnOutput, recurrent_fn: Any, invalid: jax.Array | None, explore: bool
    ) -> Decision:
        output = engine.muzero_policy(
            params,
            key,
            root,
            recurrent_fn,
            config.num_simulations,
            invalid,
            max_depth=config.max_depth,
            qtransform=qtransform,
            dirichlet_fraction=config.dirichlet_fraction if explore else 0.0,
            dirichlet_alpha=config.dirichlet_alpha,
            pb_c_init=config.pb_c_init,
            pb_c_base=config.pb_c_base,
            temperature=config.temperature if explore else 0.0,
        )
        return _decision(output)

    return search


def _decision(output: Any) -> Decision:
    # The tree's root value is the mean over the root's own value and every backed-up return.
    value = output.search_tree.node_values[:, mctx.Tree.ROOT_INDEX]
    return Decision(
        action=output.action.astype(jnp.int32), policy=output.action_weights.astype(jnp.float32), value=value.astype(jnp.float32)
    )
