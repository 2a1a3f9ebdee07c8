"""MuZero (Schrittwieser et al., arXiv:1911.08265): PUCT search, policy targets are visit counts."""

from muzerox.algorithms.base import make_family
from muzerox.config import Config
from muzerox.search import make_search
from muzerox.types import Algorithm, EnvSpec


def build(config: Config, spec: EnvSpec) -> Algorithm:
    """MuZero with PUCT for an environment."""
    return make_family(config, spec, make_search(config.search, "muzero"))
