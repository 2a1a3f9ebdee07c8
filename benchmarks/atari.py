"""Atari Pong end to end under sebulba: frames/s and where the time goes.

Simulators alone first, then the whole pipeline: self-play by 16 simulations, half of each batch reanalyzed, learner. Without an
accelerator the preset's network and batch are made smaller (--cpu-size says how; --set changes anything). The learning run itself
is `muzerox train --env ale:Pong`, for a machine with a GPU.
"""

from __future__ import annotations

import time
from typing import Any

from common import finish, make_console, make_parser, use_device

CPU_SIZE = {
    "network.width": 32,
    "network.depth": 1,
    "train.batch_size": 64,
    "runtime.num_envs": 16,
    "replay.capacity": 20_000,
    "replay.min_size": 1_000,
}


def simulators_alone(env: Any, num_envs: int, seconds: float) -> float:
    """Steps/s of one batch, over random actions."""
    import numpy as np

    batch, rng = env.make(num_envs, 0), np.random.default_rng(0)
    batch.reset()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        batch.step(rng.integers(0, env.spec.num_actions, num_envs, dtype=np.int32))
        steps += num_envs
    batch.close()
    return steps / (time.perf_counter() - start)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--env", default="ale:Pong")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the pipeline, after it has compiled (default 60)")
    parser.add_argument("--cpu-size", choices=("auto", "yes", "no"), default="auto", help=f"{CPU_SIZE} (default: on CPU)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the preset")
    args = parser.parse_args()
    use_device(args.device)
    import jax
    from rich.table import Table

    from muzerox import Config
    from muzerox.algorithms import make_algorithm
    from muzerox.compilation import enable_cache
    from muzerox.config_io import parse_assignment
    from muzerox.envs import make_env
    from muzerox.report import pipeline_rows
    from muzerox.runtimes import make_runtime, resolve_kind
    from muzerox.timing import PipelineTotals

    enable_cache()
    small = args.cpu_size == "yes" or (args.cpu_size == "auto" and jax.default_backend() == "cpu")
    changes = {**(CPU_SIZE if small else {}), **dict(parse_assignment(item) for item in args.set)}
    env = make_env(args.env)
    config = resolve_kind(Config.preset(args.env).replace({"train.max_env_steps": 2 * 10**9, **changes}), env)
    alone = simulators_alone(env, config.runtime.num_envs, min(10.0, args.seconds))
    runtime = make_runtime(config, env, make_algorithm(config, env.spec))
    start = time.perf_counter()
    state, first = runtime.run(runtime.prefill(runtime.init(jax.random.key(0))), 1)
    compiled = time.perf_counter() - start
    totals, start = PipelineTotals(), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < args.seconds:
        state, report = runtime.run(state, 1)
        totals.add(report.pipeline)
    runtime.close()
    pipeline = totals.result()
    steps, updates = (report.env_steps - first.env_steps) / elapsed, (report.updates - first.updates) / elapsed
    frame_skip = 4
    cores = pipeline["cpu_process_seconds"] / elapsed
    rows = {
        "simulators alone": f"{alone * frame_skip:,.0f} frames/s",
        "pipeline": f"{steps * frame_skip:,.1f} frames/s, {updates:.2f} updates/s, {cores:.2f} cores busy",
        "compiled and started after": f"{compiled:.1f} s",
        f"preset's 2M steps ({2 * frame_skip}M frames) at this rate": f"{2e6 / steps / 3600:,.1f} hours",
        **pipeline_rows(pipeline),
    }
    table = Table(
        title=f"{args.env}, {config.search.num_simulations} simulations, {jax.devices()[0].device_kind}", show_header=False
    )
    for name, value in rows.items():
        table.add_row(name, value)
    make_console().print(table)
    finish(
        "atari",
        {
            "env": args.env,
            "changes": changes,
            "simulations": config.search.num_simulations,
            "simulator_frames_per_second": alone * frame_skip,
            "frames_per_second": steps * frame_skip,
            "updates_per_second": updates,
            "seconds": elapsed,
            "pipeline": pipeline,
        },
        record=args.record,
    )


if __name__ == "__main__":
    main()
