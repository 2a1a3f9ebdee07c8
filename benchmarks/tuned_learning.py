"""Does a tuned configuration learn what its preset learns? CartPole-v1 at equal environment steps, several seeds.

Both train for the same number of environment steps, without stopping early; each ends with an evaluation. The steps
until an evaluation first reached the target are in the record, too.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, make_parser, use_device

ENV = "gymnax:CartPole-v1"


def learn(config: Any, steps: int, target: float, out: Path) -> dict[str, Any]:
    """One run to ``steps``: its last evaluation, and when one first reached the target."""
    import muzerox

    changes = {"train.max_env_steps": steps, "train.target_return": None, "train.eval_period": 16_384}
    result = muzerox.train(config.replace(changes), out=out, quiet=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    reached = [row["env_steps"] for row in evaluations if row["mean_return"] >= target]
    return {
        "mean_return": result.mean_return,
        "best": max(row["mean_return"] for row in evaluations),
        "steps_to_target": reached[0] if reached else None,
        "env_steps_per_second": result.env_steps_per_second,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", help="tuned.toml (default: the preset with twice and with half the environments)")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="assignments", help="instead of --config"
    )
    args = parser.parse_args()
    use_device(args.device)
    from muzerox import Config, config_io

    preset = Config.preset(ENV)
    if args.config:
        sides = {"preset": preset, "tuned": config_io.load(args.config)}
    elif args.assignments:
        sides = {"preset": preset, "changed": preset.replace(dict(config_io.parse_assignment(a) for a in args.assignments))}
    else:
        sides = {"preset": preset, **{f"{n} environments": preset.replace("runtime.num_envs", n) for n in (32, 128)}}
    rows: dict[str, Any] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for name, config in sides.items():
                out = Path(folder) / f"{name.replace(' ', '-')}-{seed}"
                rows[name].append(learn(config.replace("seed", seed), args.steps, preset.train.target_return or 0.0, out))
                print(f"seed {seed}, {name}: {rows[name][-1]}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(row["mean_return"] for row in found) for name, found in rows.items()}
    print(f"median returns: {medians}", file=sys.stderr)
    changes = config_io.load(args.config).to_dict() if args.config else args.assignments
    finish("tuned_learning", {"steps": args.steps, "changes": changes, "seeds": rows}, record=args.record)


if __name__ == "__main__":
    main()
