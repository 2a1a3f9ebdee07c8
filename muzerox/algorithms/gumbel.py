"""Gumbel MuZero (Danihelka et al., ICLR 2022): policy targets are the completed-Q improved policy."""

from muzerox.algorithms.base import make_family
from muzerox.config import Config
from muzerox.search import make_search
from muzerox.types import Algorithm, EnvSpec


def build(config: Config, spec: EnvSpec) -> Algorithm:
    """Gumbel MuZero for an environment."""
    return make_family(config, spec, make_search(config.search, "gumbel"))
