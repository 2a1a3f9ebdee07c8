"""Batched tree search as a function from root predictions to a decision.

An engine is an implementation of the policies; to add one, write its file, a row in ``ENGINES``, and its name in the
choices of ``search.engine``.
"""

from muzerox.config import SearchConfig
from muzerox.search.policy import Search, gumbel_search, muzero_search

ENGINES = {"mctx": {"gumbel": gumbel_search, "muzero": muzero_search}}


def make_search(config: SearchConfig, policy: str) -> Search:
    """The search of ``policy`` (gumbel or muzero) by the engine that ``search.engine`` names."""
    return ENGINES[config.engine][policy](config)


__all__ = ["ENGINES", "Search", "make_search"]
