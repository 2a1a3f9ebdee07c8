"""Seconds from process start to a solved CartPole-v1, by seed, with a cold and a warm compilation cache.

Each run is a process of its own: `muzerox train` with the preset, then `muzerox evaluate` on 100 fresh episodes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, make_parser, use_device

COMMAND = str(Path(sys.executable).with_name("muzerox"))


def run_json(arguments: list[str], home: Path) -> dict[str, Any]:
    """The object that a muzerox command prints."""
    environment = {**os.environ, "MUZEROX_HOME": str(home)}
    done = subprocess.run([COMMAND, *arguments, "--json"], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"muzerox {' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def solve(env: str, seed: int, home: Path, out: Path, changes: list[str]) -> dict[str, Any]:
    settings = [part for change in changes for part in ("--set", change)]
    result = run_json(["train", "--env", env, "--seed", str(seed), "--out", str(out), *settings], home)
    fresh = run_json(["evaluate", str(out), "--episodes", "100", "--seed", str(1000 + seed)], home)
    keys = ("solved", "seconds", "first_update_seconds", "env_steps", "updates", "env_steps_per_second", "phases")
    return {"seed": seed, **{key: result[key] for key in keys}, "return_of_100_fresh_episodes": fresh["mean_return"]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--env", default="gymnax:CartPole-v1", help="or gymnasium:CartPole-v1, under sebulba")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="change a key of the preset, for example precision.level=O1")
    args = parser.parse_args()
    use_device(args.device)
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            home = Path(folder) / f"home-{seed}"
            for cache, found in runs.items():
                found.append(solve(args.env, seed, home, Path(folder) / f"{cache}-{seed}", args.set))
                row = found[-1]
                print(
                    f"seed {seed} {cache}: {row['seconds']:.1f} s, first update {row['first_update_seconds']:.1f} s, "
                    f"{row['env_steps']:,} steps, return {row['return_of_100_fresh_episodes']:.1f}",
                    file=sys.stderr,
                    flush=True,
                )
    medians = {
        cache: {key: statistics.median(row[key] for row in found) for key in ("seconds", "first_update_seconds")}
        for cache, found in runs.items()
    }
    finish("cartpole", {"env": args.env, "changes": args.set, "medians": medians, **runs}, record=args.record)


if __name__ == "__main__":
    main()
