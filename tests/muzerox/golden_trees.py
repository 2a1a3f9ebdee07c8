"""Trees that mctx grew once, kept in ``golden_trees.json``: what a search must return, whatever version of mctx is installed.

Models are NumPy's random numbers and searches have no noise, so that no other library's random stream matters. To write the
file anew, ``python tests/muzerox/golden_trees.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mctx
import numpy as np
from search_models import Case

FILE = Path(__file__).with_suffix(".json")
CASES: dict[str, tuple[str, Case, dict[str, Any]]] = {
    "gumbel": ("gumbel_muzero_policy", Case(batch=2, simulations=24, actions=4), {"gumbel_scale": 0.0}),
    "gumbel, two players, masked": (
        "gumbel_muzero_policy",
        Case(batch=2, simulations=24, actions=6, discount=-1.0, masked=True, seed=1),
        {"gumbel_scale": 0.0, "max_num_considered_actions": 3},
    ),
    "puct": ("muzero_policy", Case(batch=2, simulations=24, actions=4, seed=2), {"dirichlet_fraction": 0.0, "temperature": 0.0}),
    "puct, shallow": (
        "muzero_policy",
        Case(batch=2, simulations=16, actions=3, max_depth=2, seed=3, spread=3.0),
        {"dirichlet_fraction": 0.0, "temperature": 0.0},
    ),
}
FIELDS = ("parents", "action_from_parent", "node_visits", "node_values", "children_index", "children_visits")


def grow(module: Any, name: str) -> dict[str, np.ndarray]:
    """What ``module``'s policy answers, in float64."""
    policy, case, options = CASES[name]
    with jax.enable_x64(True):
        output = case.run(getattr(module, policy), jnp.float64, **options)
    tree = {field: np.asarray(getattr(output.search_tree, field)) for field in FIELDS}
    return {"action": np.asarray(output.action), "action_weights": np.asarray(output.action_weights), **tree}


if __name__ == "__main__":
    trees = {name: {field: x.tolist() for field, x in grow(mctx, name).items()} for name in CASES}
    FILE.write_text(json.dumps(trees, separators=(",", ":")) + "\n")
    print(FILE)
