"""Does a tuned configuration learn what its preset learns? Both for the same number of environment steps, several seeds.

Nothing is stopped early. Each training is judged by fresh episodes of its final agent: returns, and where there is perfect play,
games lost against it. The steps until an evaluation on the way first reached the target are in the record, too. Tuned ones are
those given (``--config``, of any of the environments), or the preset with ``--set``; without either, twice and half the
environments stand in for them, of which a tuning may choose either.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, make_console, make_parser, use_device
from rich.table import Table

ENVS = ("gymnax:CartPole-v1", "pgx:tic_tac_toe")
STEPS = {"gymnax:CartPole-v1": 200_000}  # others: those of the preset
EPISODES = 400


def learn(config: Any, steps: int, out: Path) -> dict[str, Any]:
    """One run to ``steps``: what its agent is worth, and when an evaluation first reached the target."""
    import muzerox
    from muzerox.opponents import OPPONENTS

    target = config.train.target_return
    # Trainings follow one another in this process, which holds more than the one that memory was allocated to.
    changes = {"train.max_env_steps": steps, "train.target_return": None, "allocation.memory_gib": None}
    result = muzerox.train(config.replace(changes), out=out, quiet=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    reached = [
        row["env_steps"] for row in rows if row["kind"] == "evaluation" and target is not None and row["mean_return"] >= target
    ]
    spec = muzerox.Agent.load(out).spec
    against = [name for name, make in OPPONENTS.items() if make(spec) is not None] if spec.num_players == 2 else ["random"]
    judged = {
        name: muzerox.evaluate_run(out, episodes=EPISODES, seed=1 + config.seed, opponent=name).to_dict() for name in against
    }
    return {
        "mean_return": judged["random"]["mean_return"],
        "losses": {name: row["losses"] for name, row in judged.items() if "losses" in row},
        "steps_to_target": reached[0] if reached else None,
        "env_steps_per_second": result.env_steps_per_second,
    }


def sides_of(env: str, tuned: list[Any], assignments: list[str]) -> dict[str, Any]:
    """The preset of an environment, and what is to learn the same."""
    from muzerox import Config, config_io

    preset = Config.preset(env)
    own = [config for config in tuned if config.env == env]
    if own:
        return {"preset": preset, **{f"tuned {index}" if len(own) > 1 else "tuned": config for index, config in enumerate(own)}}
    if assignments:
        return {"preset": preset, "changed": preset.replace(dict(config_io.parse_assignment(a) for a in assignments))}
    n = preset.runtime.num_envs
    return {"preset": preset, **{f"{m} environments": preset.replace("runtime.num_envs", m) for m in (n // 2, 2 * n)}}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--env", action="append", help=f"default: those of --config, else {', '.join(ENVS)}")
    parser.add_argument("--config", action="append", default=[], help="a tuned.toml; may be given several times")
    parser.add_argument("--steps", type=int, help=f"environment steps (default: those of the preset; {STEPS})")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="assignments", help="of the preset, instead of --config"
    )
    args = parser.parse_args()
    use_device(args.device)
    from muzerox import Config, config_io

    tuned = [config_io.load(path) for path in args.config]
    rows: dict[str, Any] = {}
    table = Table(title="final agents, medians over seeds")
    for column in ("task", "configuration", "mean return", "by seed", "lost to random, perfect", "steps/s"):
        table.add_column(column, justify="left" if column in ("task", "configuration") else "right")
    for env in args.env or list(dict.fromkeys(config.env for config in tuned)) or ENVS:
        sides = sides_of(env, tuned, args.assignments)
        steps = args.steps or STEPS.get(env, Config.preset(env).train.max_env_steps)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        with tempfile.TemporaryDirectory() as folder:
            for seed, (name, config) in itertools.product(range(args.seeds), sides.items()):
                found[name].append(learn(config.replace("seed", seed), steps, Path(folder) / f"{name.replace(' ', '-')}-{seed}"))
                print(f"{env}, seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
        rows[env] = {"steps": steps, "seeds": found, "configurations": {name: config.to_dict() for name, config in sides.items()}}
        for name, learnt in found.items():
            returns, rates = ([row[key] for row in learnt] for key in ("mean_return", "env_steps_per_second"))
            losses = ", ".join(str(sum(row["losses"][who] for row in learnt)) for who in learnt[0]["losses"]) or "-"
            by_seed = " ".join(f"{x:.4g}" for x in returns)
            table.add_row(env, name, f"{statistics.median(returns):.4g}", by_seed, losses, f"{statistics.median(rates):,.0f}")
    make_console().print(table)
    finish("tuned_learning", {"episodes": EPISODES, "tasks": rows}, record=args.record)


if __name__ == "__main__":
    main()
