"""What each knob of the sebulba pipeline does: throughput, memory, staleness and waits against its value, others fixed.

Each value is a process of its own: it compiles, stands in for the rows that the first update waits for, runs for --seconds
and is measured over the second half. Values of a knob are visited forwards and backwards, --rounds times; medians are reported.
--soak trains for so many seconds instead and reports the memory held in each tenth of them, from the moment the ring is full.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from common import finish, make_console, make_parser, use_device

KNOBS: dict[str, tuple[Any, ...]] = {
    "runtime.cpu_actors": (1, 2, 3, 4, 6),
    "runtime.search_queue_size": (1, 2, 4, 8, 16, 32),
    "runtime.batch_queue_size": (1, 2, 4, 8, 16, 32),
    "runtime.loop_count": (1, 2, 4, 8, 16, 32),
    "runtime.selfplay_workers": (1, 2, 3, 4, 6),
    "runtime.role_threads": (0, 1, 2),
    "runtime.num_envs": (8, 16, 32, 64, 128),
}
WAITS = ("step_put", "context_put", "search_put", "search_get", "batch_put", "batch_get")


def worker(args: argparse.Namespace) -> None:
    """Times one configuration in this process and prints one object."""
    import jax

    from muzerox import Config
    from muzerox.algorithms import make_algorithm
    from muzerox.allocation import resident_memory
    from muzerox.compilation import enable_cache
    from muzerox.config_io import parse_assignment
    from muzerox.envs import make_env
    from muzerox.runtimes import make_runtime, resolve_kind
    from muzerox.timing import PipelineTotals

    enable_cache()
    changes = dict(parse_assignment(item) for item in args.set)
    env = make_env(args.env)
    config = Config.preset(args.env).replace({"runtime.kind": "sebulba", "train.max_env_steps": 2 * 10**9, **changes})
    config = resolve_kind(config, env)
    runtime = make_runtime(config, env, make_algorithm(config, env.spec))
    state = runtime.init(jax.random.key(config.seed))
    state, report = runtime.run(state if args.soak else runtime.prefill(state), 1)
    count = config.runtime.loop_count
    seconds = args.soak or args.seconds
    start = time.perf_counter()
    while time.perf_counter() - start < (0 if args.soak else seconds / 2):
        state, report = runtime.run(state, max(1, 32 // count))
    totals, first, half = PipelineTotals(), report, time.perf_counter()
    memory: list[tuple[float, int, int]] = []
    while (elapsed := time.perf_counter() - half) < (seconds if args.soak else seconds / 2):
        state, report = runtime.run(state, max(1, 32 // count))
        totals.add(report.pipeline)
        memory.append((round(elapsed, 2), report.env_steps, resident_memory()))
    runtime.close()
    pipeline = totals.result()
    if args.soak:
        full = [row for row in memory if row[1] >= config.replay.capacity]
        tenths = [full[i * len(full) // 10] for i in range(10)] + full[-1:] if len(full) >= 10 else memory
        figures = {
            "ring_full_after_seconds": full[0][0] if full else None,
            "mib_at_seconds": [(row[0], round(row[2] / 2**20, 1)) for row in tenths],
            "env_steps": report.env_steps,
            "updates": report.updates,
        }
        print(json.dumps(figures))
        return
    print(
        json.dumps(
            {
                "env_steps_per_second": (report.env_steps - first.env_steps) / elapsed,
                "updates_per_second": (report.updates - first.updates) / elapsed,
                "cores_busy": pipeline["cpu_process_seconds"] / elapsed,
                "mib": max(row[2] for row in memory) / 2**20,
                "targets_age_updates": pipeline["batch_staleness_mean"],
                "acting_age_updates": pipeline.get("acting_staleness_mean", 0.0),
                # Per second of wall time; of a role with several threads, summed over them.
                **{f"wait_{name}": pipeline.get(f"wait_{name}_seconds", 0.0) / elapsed for name in WAITS},
            }
        )
    )


def measure(args: argparse.Namespace, changes: dict[str, Any]) -> dict[str, float]:
    """A fresh process's figures."""
    settings = [part for item in (*args.set, *(f"{k}={v}" for k, v in changes.items())) for part in ("--set", item)]
    command = [sys.executable, __file__, "--worker", "--env", args.env, "--seconds", str(args.seconds), *settings]
    command += ["--soak", str(args.soak)] if args.soak else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        sys.exit(f"{changes or 'the configuration'} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def sweep(args: argparse.Namespace, knob: str) -> list[dict[str, Any]]:
    """Medians by value of a knob."""
    values = KNOBS[knob]
    found: dict[Any, list[dict[str, float]]] = {value: [] for value in values}
    for number in range(args.rounds):
        for value in values if number % 2 == 0 else reversed(values):
            found[value].append(measure(args, {knob: value}))
            row = found[value][-1]
            print(f"{knob}={value}: {row['env_steps_per_second']:,.0f} steps/s", file=sys.stderr, flush=True)
    return [
        {"value": value, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}}
        for value, runs in found.items()
    ]


def show(knob: str, rows: list[dict[str, Any]]) -> None:
    """One table."""
    from rich.table import Table

    table = Table(title=knob)
    titles = ("value", "steps/s", "updates/s", "cores", "MiB", "age of targets", "age acting", *WAITS)
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        figures = list(row.values())
        table.add_row(str(figures[0]), *(f"{x:,.0f}" if x >= 100 else f"{x:.2f}" for x in figures[1:]))
    make_console().print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--env", default="gymnasium:CartPole-v1")
    parser.add_argument("--knob", action="append", choices=KNOBS, help="only these (default: all)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the preset for all")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run, the second half of which counts (default 10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="train so long and report memory instead")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    use_device(args.device)
    if args.worker:
        worker(args)
        return
    shared = {"env": args.env, "changes": args.set, "seconds": args.seconds}
    if args.soak:
        finish("sebulba", {**shared, "seconds": args.soak, "soak": measure(args, {})}, record=args.record)
        return
    tables = {}
    for knob in args.knob or KNOBS:
        tables[knob] = sweep(args, knob)
        show(knob, tables[knob])
    finish("sebulba", {**shared, "rounds": args.rounds, "knobs": tables}, record=args.record)


if __name__ == "__main__":
    main()
