"""Batched tree search as a function from root predictions to a decision."""

from muzerox.search.policy import Search, gumbel_search, muzero_search

__all__ = ["Search", "gumbel_search", "muzero_search"]
