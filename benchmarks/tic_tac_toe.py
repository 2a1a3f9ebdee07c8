"""Self-play on tic_tac_toe: games lost against random moves (1,000) and against perfect play (200 a side).

And of all positions there are, in how many the agent makes a move that perfect play does not: games only meet the few that an
agent leads them to, and one of a few seeds may lose by luck what another does not.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import finish, make_parser, use_device

if TYPE_CHECKING:
    import muzerox


def mistakes(agent: muzerox.Agent) -> dict[str, int]:
    """How many positions a game can get to, and how many the agent misplays."""
    import numpy as np

    from muzerox.opponents import perfect_tic_tac_toe

    optimal = perfect_tic_tac_toe()
    boards = np.flatnonzero(optimal.any(axis=1))
    stones = boards[:, None] // 3 ** np.arange(9) % 3
    observation = np.stack([stones == 1, stones == 2], axis=-1).reshape(-1, 3, 3, 2)
    moves = agent.act(observation, stones == 0)
    return {"positions": len(boards), "misplayed": int((~optimal[boards, moves]).sum())}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the preset")
    args = parser.parse_args()
    use_device(args.device)
    import muzerox
    from muzerox.config_io import parse_assignment

    changes = dict(parse_assignment(item) for item in args.set)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            out = Path(folder) / str(seed)
            config = muzerox.Config.preset("pgx:tic_tac_toe").replace({**changes, "seed": seed})
            result = muzerox.train(config, out)
            games = {"random": 1000, "perfect": 400}
            met = {
                name: muzerox.evaluate_run(out, episodes=n, seed=1 + seed, opponent=name).to_dict() for name, n in games.items()
            }
            errors = mistakes(muzerox.Agent.load(out))
            rows.append(
                {"seed": seed, "train_seconds": sum(result.phases.values()), "env_steps": result.env_steps, **met, **errors}
            )
            print(
                f"seed {seed}: {rows[-1]['train_seconds']:.0f} s, "
                + ", ".join(f"{name}: {m['wins']} won, {m['draws']} drawn, {m['losses']} lost" for name, m in met.items())
                + f"; {errors['misplayed']} of {errors['positions']} positions misplayed",
                file=sys.stderr,
                flush=True,
            )
    finish("tic_tac_toe", {"changes": args.set, "seeds": rows}, record=args.record)


if __name__ == "__main__":
    main()
