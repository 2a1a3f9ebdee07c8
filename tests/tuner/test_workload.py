"""What a workload says of a configuration, against the code that it is said of."""

from __future__ import annotations

import mctx
import pytest

from muzerox import Config
from muzerox.search.selection import gumbel_rounds
from predictor.analytic import halving_rounds
from tuner.bridge import concrete
from tuner.workload import describe


@pytest.mark.parametrize("num_simulations", [2, 4, 8, 16, 32, 50, 64, 128])
@pytest.mark.parametrize(("env", "actions"), [("gymnax:CartPole-v1", 2), ("gymnax:Breakout-MinAtar", 3), ("pgx:connect_four", 7)])
def test_rounds_side_by_side_are_those_of_the_search(env: str, actions: int, num_simulations: int) -> None:
    config = concrete(Config.preset(env).replace("search.num_simulations", num_simulations), "gpu")
    rounds = gumbel_rounds(actions, num_simulations, config.search.max_considered_actions, mctx.qtransform_completed_by_mix_value)
    assert float(halving_rounds(describe(config))) == pytest.approx(len(rounds), abs=1.0)
