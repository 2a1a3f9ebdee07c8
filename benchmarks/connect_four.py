"""Self-play on connect_four for a quarter of an hour: games against random moves (1,000), and against itself 10 minutes before.

Games against the earlier self begin with two random moves, and each side moves first in half of them. The curve, in which
evaluations are 64 games against random moves, goes to the data folder with ``--record``.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import DATA, finish, make_parser, use_device

EARLIER = 600.0  # seconds between the two agents that meet
EVALUATIONS = ("train.eval_period=30000", "train.eval_episodes=64", "train.max_env_steps=2000000000")


def copy_agent(run: Path, to: Path) -> int:
    """A run directory with the newest checkpoint alone, while training goes on; returns the checkpoint's updates."""
    for _ in range(100):
        try:
            newest = max(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit())
            shutil.copytree(run / "checkpoints" / str(newest), to / "checkpoints" / str(newest))
            shutil.copy(run / "config.toml", to)
            return newest
        except (shutil.Error, FileNotFoundError, ValueError):  # none yet, or training replaced it meanwhile
            shutil.rmtree(to, ignore_errors=True)
            time.sleep(1.0)
    raise SystemExit(f"{run / 'checkpoints'}: no checkpoint could be copied")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="of training, compilation included; more than 10")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the preset")
    args = parser.parse_args()
    if args.minutes * 60 <= EARLIER + 60:
        parser.error(f"argument --minutes: must be above {EARLIER / 60 + 1:g}, not {args.minutes:g}")
    use_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        run, earlier = Path(folder) / "run", Path(folder) / "earlier"
        command = [sys.executable, "-m", "muzerox", "train", "--env", "pgx:connect_four", "--out", str(run)]
        settings = [x for setting in (*EVALUATIONS, *args.set) for x in ("--set", setting)]
        training = subprocess.Popen([*command, "--seed", str(args.seed), *settings], stdout=subprocess.DEVNULL)
        start = time.monotonic()
        copied = None
        try:
            while (left := 60 * args.minutes - (time.monotonic() - start)) > 0:
                if copied is None and left <= EARLIER:
                    copied = copy_agent(run, earlier)
                if training.poll() is not None:
                    raise SystemExit(f"training ended after {time.monotonic() - start:.0f} s with code {training.returncode}")
                time.sleep(min(1.0, left))
            training.send_signal(signal.SIGINT)  # which saves and stops
            training.wait()
        finally:
            training.kill()  # ended already, unless this was interrupted

        import muzerox

        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        figures: dict[str, Any] = {
            "seed": args.seed,
            "changes": args.set,
            "minutes": args.minutes,
            "env_steps": max(row["env_steps"] for row in rows if row["kind"] == "train"),
            "random": muzerox.evaluate_run(run, episodes=1000, seed=1).to_dict(),
            "earlier": muzerox.evaluate_run(run, episodes=400, seed=2, opponent=str(earlier)).to_dict(),
            "earlier_updates": copied,
            "curve": [[row["seconds"], row["env_steps"], row["mean_return"]] for row in rows if row["kind"] == "evaluation"],
        }
        if args.record:
            DATA.mkdir(exist_ok=True)
            shutil.copy(run / "return_curve.png", DATA / "connect_four.png")
    for name in ("random", "earlier"):
        games = figures[name]
        print(f"against {name}: {games['wins']} won, {games['draws']} drawn, {games['losses']} lost", file=sys.stderr)
    finish("connect_four", figures, record=args.record)


if __name__ == "__main__":
    main()
