"""muzerox (Gumbel MuZero, Sebulba runtime) on gymnasium's CartPole-v1: its own ``train``.

Threads are its self-play workers; its roles have a thread of XLA each (``runtime.role_threads``). Counts are the rows of the
run's ``metrics.jsonl`` as they appear. Evaluations and checkpoints are left out, as the peers' are.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from pathlib import Path

from steady import CAPACITY, ENV, MIN_SIZE, Window, make_parser

import muzerox
from muzerox.config_io import parse_assignment

NEVER = 1_000_000_000


def watch(metrics: Path, window: Window) -> None:
    """Tells the window of every new row."""
    while not metrics.exists():
        time.sleep(0.05)
    with metrics.open() as file:
        text = ""
        while True:
            text += file.readline()
            if not text.endswith("\n"):  # nothing new, or half a row
                time.sleep(0.02)
                continue
            row, text = json.loads(text), ""
            if row["kind"] == "train":
                window.mark(row["env_steps"], row["updates"])


def main() -> None:
    parser = make_parser(__doc__, threads="self-play workers, each with its share of the environments")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="any other key of the configuration")
    args = parser.parse_args()
    changes = {
        "seed": args.seed,
        "search.num_simulations": args.simulations,
        "network.width": args.width,
        "network.depth": args.depth,
        "network.num_bins": args.bins,
        "replay.capacity": CAPACITY,
        "replay.min_size": MIN_SIZE,
        "train.batch_size": args.batch,
        "train.replay_ratio": args.replay_ratio,
        "train.reanalyze_fraction": args.reanalyze,
        "train.unroll_steps": args.unroll,
        "train.td_steps": args.td_steps,
        "train.target_return": None,
        "train.max_env_steps": NEVER,
        "train.eval_period": NEVER,
        "train.checkpoint_period": 1e6,
        "runtime.kind": "sebulba",
        "runtime.role_threads": 1,
        "runtime.num_envs": args.envs // args.threads,
        "runtime.selfplay_workers": args.threads,
    }
    changes |= dict(parse_assignment(text) for text in args.set)
    config = muzerox.Config.preset(str(changes.pop("env", f"gymnasium:{ENV}"))).replace(changes)
    out = Path(tempfile.mkdtemp()) / "run"
    window = Window(args, ("muzerox", "jax", "gymnasium"))
    threading.Thread(target=watch, args=(out / "metrics.jsonl", window), daemon=True).start()
    muzerox.train(config, out=out, quiet=True)


if __name__ == "__main__":
    main()
