"""Tunings of some minutes from the preset and from random starting points, and how much of what there was to gain they found.

Each is a ``muzerox tune`` of its own, with nothing measured and nothing compiled before, as on a machine that is new to it; with
``--used`` they share what each learns of the machine and compiles, one after the other, as on one that is tuned often. All starts
and what their tunings made of them run in alternation, ``--processes`` times anew, for processes of one program differ by more
than medians of rounds do; ``--long`` adds what a longer tuning ends with. The best known for a task is the fastest of them,
chosen by all processes but those that judge it. ``ratio`` is tuned over start (below 1: tuning did harm), ``recovered`` the share
of the way from the start to the best, in logarithms, ``recovered_error`` its standard error, by leaving out one set of processes
after the other, ``recovered_of_luckiest`` the share where the best is chosen and judged by the same rounds, as in all records
before 2026-11-28's last. Every trial is in the record: what was expected by the base as it comes, by the base with all that was
learnt and by base and network, and what came.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import finish, make_console, make_parser, use_device
from rich.table import Table

ENVS = ("gymnax:CartPole-v1", "pgx:tic_tac_toe", "gymnasium:CartPole-v1", "gymnasium:Acrobot-v1")  # both runtimes
FEWEST_ROUNDS = 10  # of all processes together
NOTHING = 1.05  # times the speed of a start: where the best known is no faster than that there is nothing to recover


def random_start(env: str, seed: int) -> Any:
    """The preset at a random point of the grid that a tuning of it would search."""
    import jax.numpy as jnp
    import numpy as np

    from muzerox import Config
    from tuner.bridge import concrete
    from tuner.measuring.fingerprint import fingerprint
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


def tune_once(start: Any, budget: str, out: Path, home: Path) -> tuple[Any, dict[str, Any]]:
    """The result of a tuning, and its row without the comparison. ``home`` is where it finds and leaves what is known."""
    from tuner.bridge import load_config, toml
    from tuner.history import TuneDir
    from tuner.measuring.fingerprint import fingerprint
    from tuner.reporting.html_report import changed
    from tuner.reporting.tables import error
    from tuner.result import TuneResult

    home.mkdir(parents=True, exist_ok=True)
    config = home / "start.toml"
    config.write_text(toml(start))
    command = [sys.executable, "-m", "muzerox", "tune", "--config", str(config), "--budget", budget, "--out", str(out)]
    done = subprocess.run(command, env=os.environ | {"MUZEROX_HOME": str(home)}, stdout=subprocess.DEVNULL, check=False)
    folder = TuneDir(out)
    told = folder.result()
    if done.returncode != 0 or told is None:
        sys.exit(f"tuning in {out} ended with exit code {done.returncode} and {'a' if told else 'no'} result")
    result = TuneResult.from_dict(told, start=load_config(folder.start_file), hardware=fingerprint(), history=folder.trials())
    trials = [
        {
            "role": trial.role,
            "changes": trial.changes,
            "outcome": str(trial.measurement.outcome),
            "env_steps_per_second": trial.measurement.env_steps_per_second,
            "errors": [
                error(p, trial) for p in (trial.predicted_uncalibrated, trial.predicted_base, trial.predicted, trial.foreseen)
            ],
            "balance": trial.balance,
        }
        for trial in result.history
    ]
    return result, {
        "same_configuration": result.config == result.start,
        "ratio_in_tuning": result.speedup,
        "interval_in_tuning": result.interval,
        "seconds": result.seconds,
        "balance": result.balance,
        "allocation": result.config.to_dict()["allocation"],
        "changes": changed(result.start, result.config),
        "trials": trials,
    }


def compare(results: Sequence[Any], further: Sequence[Any], processes: int, rounds: int, minutes: float) -> list[dict[str, Any]]:
    """Of each tuning its start, what it made of it and the fastest there is among all and ``further``'s, in alternation.

    So many ``processes`` of each, one after the other, share the ``rounds``. Of threads, a round of all can take minutes: a
    process that has had its part of the ``minutes`` begins none, but for its part of FEWEST_ROUNDS.
    """
    from predictor import Outcome
    from tuner.measuring.measure import measure_in_alternation

    ends = [result.config for result in (*results, *further)]
    configs = list({repr(config): config for config in (*(result.start for result in results), *ends)}.values())
    place = {repr(config): i for i, config in enumerate(configs)}
    began, sets = time.monotonic(), []
    for number in range(1, 1 + processes):
        until = began + 60.0 * minutes * number / processes
        share, fewest = -(-rounds // processes), -(-FEWEST_ROUNDS // processes)
        found = measure_in_alternation(configs, rounds=share, fewest=fewest, until=until, hardware=results[0].hardware)
        failed = [f"{one.outcome}: {one.error}" for one in found if one.outcome != Outcome.OK]
        if failed:
            sys.exit(f"comparing: {failed[0]}")
        sets.append([list(one.repeats) for one in found])
    pairs = [(place[repr(result.start)], place[repr(result.config)]) for result in results]
    how = {"rounds": sum(len(one[0]) for one in sets), "processes": processes}
    return [{**row, **how} for row in judge(sets, pairs)]


def judge(sets: Sequence[Sequence[Sequence[float]]], pairs: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """How much of what there was to gain each of ``pairs``, a start and what was made of it, has gained.

    The fastest of many processes is the luckiest too: chosen and judged by the same rounds, it seems faster than it is. For each
    of the ``sets`` the best known is chosen by all others and judged by that one, and the sets are averaged (cross-fitting); by
    the luckiest, by all rounds at once, the share is told as well.

    Args:
      sets: two or more; in each, of one process of each configuration, the seconds an environment step of its rounds, which are
        paired.
    """
    import numpy as np

    every = [[second for one in sets for second in one[which]] for which in range(len(sets[0]))]

    def logs(one: Sequence[Sequence[float]], start: int) -> Any:
        """[C], how many times as fast as ``start`` each is, as logarithms."""
        seconds = np.log(one)
        return np.median(seconds[start] - seconds, axis=1)

    def ways(start: int, tuned: int, among: Sequence[int]) -> tuple[float, float]:
        """What was gained and what there was to gain by the sets ``among`` alone."""
        told = np.stack([logs(sets[which], start) for which in among])
        best = [int(np.argmax(np.delete(told, row, axis=0).mean(axis=0))) for row in range(len(told))]
        return float(told[:, tuned].mean()), float(np.mean([row[fastest] for row, fastest in zip(told, best, strict=True)]))

    luckiest = int(np.argmax(logs(every, 0)))
    numbers = range(len(sets))
    rows = []
    for start, tuned in pairs:
        by_all = logs(every, start)
        gained, there_is = ways(start, tuned, numbers)
        most = float(by_all[luckiest])
        speeds = {name: 1.0 / statistics.median(every[which]) for name, which in (("start", start), ("tuned", tuned))}
        found = there_is > math.log(NOTHING)
        rows.append(
            {
                **{f"{name}_env_steps_per_second": speed for name, speed in speeds.items()},
                "best_env_steps_per_second": speeds["start"] * math.exp(there_is),
                "ratio": math.exp(gained),
                "best_over_start": math.exp(there_is),
                "recovered": gained / there_is if found else None,
                "recovered_error": _error(functools.partial(ways, start, tuned), len(sets)) if found else None,
                "luckiest_over_start": math.exp(most),
                "recovered_of_luckiest": float(by_all[tuned]) / most if most > math.log(NOTHING) else None,
            }
        )
    return rows


def _error(ways: Callable[[Sequence[int]], tuple[float, float]], count: int) -> float | None:
    """Standard error of the share gained of what there is, by the jackknife (Tukey, 1958) over ``count`` sets.

    None of fewer than three, or where without one of them there is nothing to gain.
    """
    if count < 3:
        return None
    shares = []
    for left_out in range(count):
        gained, there_is = ways([which for which in range(count) if which != left_out])
        if there_is <= 0.0:
            return None
        shares.append(gained / there_is)
    mean = statistics.fmean(shares)
    return math.sqrt((count - 1) / count * sum((share - mean) ** 2 for share in shares))


def show(rows: dict[str, Any]) -> None:
    """The table at the end."""
    table = Table(title="steps/s in alternation")
    columns = ("task and start", "start", "tuned", "tuned/start", "best/start", "recovered", "error", "of the luckiest", "trials")
    told = ("recovered", "recovered_error", "recovered_of_luckiest")
    for column in columns:
        table.add_column(column, justify="left" if column.startswith("task") else "right")
    for name, row in rows.items():
        speeds = [f"{row[f'{which}_env_steps_per_second']:,.0f}" for which in ("start", "tuned")]
        shares = ["-" if row[name] is None else f"{row[name]:.0%}" for name in told]
        table.add_row(name, *speeds, f"{row['ratio']:.2f}", f"{row['best_over_start']:.2f}", *shares, str(len(row["trials"])))
    make_console().print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--env", action="append", help=f"default: {', '.join(ENVS)}")
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--long", metavar="BUDGET", help="of one more tuning from the preset, for the best known")
    parser.add_argument("--random-starts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=42, help="of the comparison, at most")
    parser.add_argument("--processes", type=int, default=6, help="of each configuration that share the rounds, 2 or more")
    parser.add_argument("--minutes", type=float, default=20.0, help="that the comparison may take, about")
    parser.add_argument("--used", action="store_true", help="each tuning knows what those before it measured and compiled")
    parser.add_argument("--out", type=Path, help="folder for the tunings, kept and continued (default: a temporary one)")
    args = parser.parse_args()
    if args.processes < 2:
        parser.error(f"--processes {args.processes}: the best is chosen by some and judged by others; 2 at the least")
    use_device(args.device)
    from muzerox import Config

    folder = args.out or Path(tempfile.mkdtemp(prefix="muzerox-tune-"))
    rows: dict[str, Any] = {}
    for env in args.env or ENVS:
        results, own, further = [], {}, []
        starts = {f"{env} preset": Config.preset(env)}
        starts |= {f"{env} random {index}": random_start(env, index) for index in range(1, 1 + args.random_starts)}
        for name, start in starts.items():
            place = folder / name.replace(":", "_").replace(" ", "-")
            home = folder / "home" if args.used else place.with_name(f"{place.name}-home")
            result, own[name] = tune_once(start, args.budget, place, home)
            results.append(result)
        if args.long:
            place = folder / f"{env.replace(':', '_')}-long"
            further = [tune_once(Config.preset(env), args.long, place, place.with_name(f"{place.name}-home"))[0]]
        for row, compared in zip(own.values(), compare(results, further, args.processes, args.rounds, args.minutes), strict=True):
            row |= compared
        rows |= own
    show(rows)
    errors = [trial["errors"] for row in rows.values() for trial in row["trials"][1:] if trial["errors"][0] is not None]
    medians = [statistics.median(column) for column in zip(*errors, strict=True)]
    summary = dict(zip(("uncalibrated", "base", "base_and_network", "with_its_own_trials"), medians, strict=True))
    recovered = [row["recovered"] for row in rows.values() if row["recovered"] is not None]
    figures = {
        "budget": args.budget,
        "used": args.used,
        "least_ratio": min(row["ratio"] for row in rows.values()),
        "recovered_median": statistics.median(recovered) if recovered else None,
        "recovered_least": min(recovered, default=None),
        "best_over_preset": {name: row["best_over_start"] for name, row in rows.items() if name.endswith("preset")},
        "median_errors": summary,
    }
    print(figures, file=sys.stderr)
    finish("tune", {**figures, "tunings": rows}, record=args.record)


if __name__ == "__main__":
    main()
