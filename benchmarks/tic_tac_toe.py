"""Self-play on tic_tac_toe: games lost against random moves (1,000) and against perfect play (200 a side)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, make_parser, use_device


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    use_device(args.device)
    import muzerox

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            out = Path(folder) / str(seed)
            config = muzerox.Config.preset("pgx:tic_tac_toe").replace("seed", seed)
            result = muzerox.train(config, out)
            games = {"random": 1000, "perfect": 400}
            met = {
                name: muzerox.evaluate_run(out, episodes=n, seed=1 + seed, opponent=name).to_dict() for name, n in games.items()
            }
            rows.append({"seed": seed, "train_seconds": sum(result.phases.values()), "env_steps": result.env_steps, **met})
            print(
                f"seed {seed}: {rows[-1]['train_seconds']:.0f} s, "
                + ", ".join(f"{name}: {m['wins']} won, {m['draws']} drawn, {m['losses']} lost" for name, m in met.items()),
                file=sys.stderr,
                flush=True,
            )
    finish("tic_tac_toe", {"seeds": rows}, record=args.record)


if __name__ == "__main__":
    main()
