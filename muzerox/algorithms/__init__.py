"""Algorithms: one file a variant, each with ``build(config, spec) -> Algorithm``.

To add one, write the file and a row in ``ALGORITHMS``, and its name to the choices of ``search.algorithm``.
"""

from muzerox.algorithms import gumbel, muzero
from muzerox.config import Config
from muzerox.types import Algorithm, EnvSpec

ALGORITHMS = {"gumbel": gumbel.build, "muzero": muzero.build}


def make_algorithm(config: Config, spec: EnvSpec) -> Algorithm:
    """The algorithm that ``search.algorithm`` names, for an environment."""
    return ALGORITHMS[config.search.algorithm](config, spec)


__all__ = ["ALGORITHMS", "make_algorithm"]
