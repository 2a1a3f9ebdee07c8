"""Batched tree search as a function from root predictions to a decision.

An engine is an implementation of mctx's policies, with its signatures: mctx itself, or ``fused``, our own loop. To add one,
write its module, a row in ``ENGINES``, and its name in the choices of ``search.engine``. A program on mctx can import the
policies from here.
"""

import math
from types import ModuleType

import jax
import mctx

from muzerox.config import SearchConfig
from muzerox.search import fused, tree
from muzerox.search.fused import gumbel_muzero_policy, muzero_policy, stochastic_muzero_policy
from muzerox.search.policy import Search, gumbel_search, muzero_search

ENGINES: dict[str, ModuleType] = {"mctx": mctx, "fused": fused}
_FASTEST = {"cpu": "fused", "gpu": "fused"}  # by backend, as benchmarks/search.py measured; mctx where nothing was
_POLICIES = {"gumbel": gumbel_search, "muzero": muzero_search}


def default_engine(platform: str) -> str:
    """What ``search.engine = "auto"`` means on a JAX backend."""
    return _FASTEST.get(platform, "mctx")


def make_search(config: SearchConfig, policy: str) -> Search:
    """The search of ``policy`` (gumbel or muzero) by the engine that ``search.engine`` names."""
    return _POLICIES[policy](config, ENGINES[_engine(config)])


def check_room(config: SearchConfig, roots: int, actions: int) -> None:
    """Raises ConfigError when the deepest search of so many roots would have trees too large for the engine."""
    if _engine(config) == "fused":  # mctx counts the edges of a tree, not those of all
        tree.check_room(roots // math.gcd(config.split, roots), config.final_simulations or config.num_simulations, actions)


def _engine(config: SearchConfig) -> str:
    return default_engine(jax.default_backend()) if config.engine == "auto" else config.engine


__all__ = [
    "ENGINES",
    "Search",
    "check_room",
    "default_engine",
    "gumbel_muzero_policy",
    "make_search",
    "muzero_policy",
    "stochastic_muzero_policy",
]
