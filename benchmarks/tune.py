"""Tuned against start, re-measured in alternation by fresh processes: from the preset and from random starting points.

Every trial is in the record: what was expected by the base as it comes, by the calibrated base and with the graph network,
and what came. A ratio below 1 means that tuning did harm.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, make_parser, use_device

ENVS = ("gymnax:CartPole-v1", "gymnax:Breakout-MinAtar", "pgx:connect_four")


def random_start(env: str, seed: int) -> Any:
    """The preset at a random point of the grid that a tuning of it would search."""
    import jax.numpy as jnp
    import numpy as np

    from muzerox import Config
    from tuner.bridge import concrete
    from tuner.fingerprint import fingerprint
    from tuner.neighbourhood import space_around
    from tuner.space import feasible, workloads

    hardware = fingerprint()
    preset = concrete(Config.preset(env), hardware.platform)
    space = space_around(preset, "neutral", hardware.platform)
    rng = np.random.default_rng(seed)
    while True:
        point = rng.integers(0, space.sizes).astype(np.int32)
        workload = workloads(space.base, space.tables(), jnp.asarray(point[None]))
        if bool(feasible(workload, jnp.float32(space.max_num_envs))[0]):
            return preset.replace(space.decode(point))


def tune_once(start: Any, budget: str, rounds: int, out: Path) -> dict[str, Any]:
    import tuner
    from tuner.measure import measure_in_alternation, paired_ratio
    from tuner.report import error

    result = tuner.tune(start, budget=budget, out=out)
    base, ours = measure_in_alternation([result.start, result.config], hardware=result.hardware, rounds=rounds)
    trials = [
        {
            "role": trial.role,
            "changes": trial.changes,
            "outcome": str(trial.measurement.outcome),
            "env_steps_per_second": trial.measurement.env_steps_per_second,
            "errors": [error(p, trial) for p in (trial.predicted_uncalibrated, trial.predicted_base, trial.predicted)],
            "balance": trial.balance,
        }
        for trial in result.history
    ]
    return {
        "start_env_steps_per_second": base.env_steps_per_second,
        "tuned_env_steps_per_second": ours.env_steps_per_second,
        "ratio": paired_ratio(ours, base),
        "same_configuration": result.config == result.start,
        "ratio_in_tuning": result.speedup,
        "seconds": result.seconds,
        "balance": result.balance,
        "allocation": result.config.to_dict()["allocation"],
        "trials": trials,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--env", action="append", help=f"default: {', '.join(ENVS)}")
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--random-starts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=25, help="of the re-measurement")
    parser.add_argument("--out", type=Path, help="folder for the tunings, kept and continued (default: a temporary one)")
    args = parser.parse_args()
    use_device(args.device)
    from muzerox import Config

    folder = args.out or Path(tempfile.mkdtemp(prefix="muzerox-tune-"))
    rows: dict[str, Any] = {}
    for env in args.env or ENVS:
        for index in range(1 + args.random_starts):
            name = f"{env} {'preset' if index == 0 else f'random {index}'}"
            start = Config.preset(env) if index == 0 else random_start(env, index)
            rows[name] = row = tune_once(start, args.budget, args.rounds, folder / name.replace(":", "_").replace(" ", "-"))
            print(
                f"{name}: {row['start_env_steps_per_second']:,.0f} to {row['tuned_env_steps_per_second']:,.0f} environment "
                f"steps/s, {row['ratio']:.2f}x, {len(row['trials'])} trials in {row['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    errors = [trial["errors"] for row in rows.values() for trial in row["trials"][1:] if trial["errors"][0] is not None]
    medians = [statistics.median(column) for column in zip(*errors, strict=True)]
    summary = dict(zip(("uncalibrated", "calibrated", "with_graph"), medians, strict=True))
    print(f"median errors of {len(errors)} trials: {summary}", file=sys.stderr)
    finish("tune", {"budget": args.budget, "median_errors": summary, "tunings": rows}, record=args.record)


if __name__ == "__main__":
    main()
