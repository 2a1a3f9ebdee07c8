"""What each precision level is worth on this machine: O1, O1_float16 and O2 against O0, in alternation, and what is expected.

Each environment's preset, and the same with networks of other widths: small networks are bound by operations, which no level
makes fewer, larger ones by what they move and multiply. Expected is what ships, before anything was measured here but rates.
"""

from __future__ import annotations

import sys
from typing import Any

from common import finish, make_console, make_parser, use_device

LEVELS = ("O0", "O1", "O1_float16", "O2")
# What of each environment's preset is changed.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gymnax:CartPole-v1", {}),
    ("gymnax:CartPole-v1", {"network.width": 32, "runtime.num_envs": 64}),
    ("gymnax:CartPole-v1", {"network.width": 256, "runtime.num_envs": 128}),
    ("gymnax:CartPole-v1", {"search.num_simulations": 16, "train.replay_ratio": 0.5}),
    ("gymnax:CartPole-v1", {"search.num_simulations": 2, "train.replay_ratio": 8.0}),
    ("pgx:tic_tac_toe", {}),
    ("pgx:tic_tac_toe", {"network.width": 256}),
    ("gymnax:Breakout-MinAtar", {}),
    ("gymnasium:CartPole-v1", {}),
    ("gymnasium:CartPole-v1", {"network.width": 256}),
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="bursts of each level (default 7)")
    parser.add_argument("--seconds", type=float, default=0.7, help="of a burst (default 0.7)")
    parser.add_argument("--cases", type=int, nargs="*", help=f"which of the {len(CASES)}, from 0 (default: all)")
    args = parser.parse_args()
    if any(not 0 <= case < len(CASES) for case in args.cases or ()):
        sys.exit(f"--cases: from 0 to {len(CASES) - 1}")
    use_device(args.device)

    from rich.progress import track
    from rich.table import Table

    from muzerox import Config
    from predictor import Outcome, RuntimePredictor
    from tuner.bridge import concrete
    from tuner.measuring.fingerprint import fingerprint
    from tuner.measuring.measure import measure_in_alternation, paired_ratio

    console, hardware = make_console(), fingerprint()
    predictor = RuntimePredictor.pretrained()
    rows = []
    chosen = CASES if args.cases is None else [CASES[case] for case in args.cases]
    for env, changes in track(chosen, "levels", console=console):
        start = concrete(Config.preset(env).replace(changes), hardware.platform)
        configs = [start.replace({"precision.level": level, "precision.loss_scale": "auto"}) for level in LEVELS]
        found = measure_in_alternation(configs, hardware=hardware, rounds=args.rounds, seconds=args.seconds)
        if found[0].outcome != Outcome.OK:
            sys.exit(f"{env} {changes}: {found[0].outcome}: {found[0].error}")
        expected = [predictor.predict(m.workload, hardware).seconds_per_env_step for m in found]
        row = {
            "env": env,
            "changes": changes,
            "env_steps_per_second": [m.env_steps_per_second for m in found],
            "speedup": [paired_ratio(m, found[0]) if m.outcome == Outcome.OK else None for m in found],
            "expected_speedup": [expected[0] / seconds for seconds in expected],
            "measurements": [m.to_dict() for m in found],
        }
        rows.append(row)
        console.print(env, changed(changes), *told(row))

    table = Table(title="speed over that of O0, measured / expected", title_justify="left")
    for column in ("environment", "changes", "O0, steps/s", *LEVELS[1:]):
        table.add_column(column, justify="left" if column in ("environment", "changes") else "right")
    for row in rows:
        table.add_row(row["env"], changed(row["changes"]), f"{row['env_steps_per_second'][0]:,.0f}", *told(row))
    console.print(table)
    finish("levels", {"levels": LEVELS, "rows": rows}, record=args.record)


def changed(changes: dict[str, Any]) -> str:
    """What is not as in the preset."""
    return ", ".join(f"{name.partition('.')[2]} {value}" for name, value in changes.items()) or "preset"


def told(row: dict[str, Any]) -> list[str]:
    """Of each level but the first its speed, measured and expected, or how it failed."""
    trios = list(zip(row["speedup"], row["expected_speedup"], row["measurements"], strict=True))
    return [m["outcome"] if ours is None else f"{ours:.2f} / {theirs:.2f}" for ours, theirs, m in trios[1:]]


if __name__ == "__main__":
    main()
