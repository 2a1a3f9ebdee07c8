"""Training on gymnasium's CartPole-v1 by our Sebulba runtime, mujax and LightZero: throughput in one session.

Each trains in fresh processes that alternate, at the same simulations, environments, batch, replay ratio, unrolled steps, bins
and layer width. Environments are gymnasium's on the host. Rates are of a steady window, after the first updates
and a warm-up (``peers/steady.py``). Peers run in virtual environments of their own, by their public training functions
(``peers/*_cartpole.py``); one whose interpreter is not given is left out:

  python3 -m venv mujax && mujax/bin/pip install mujax==0.1.3 gymnasium
  python3 -m venv lightzero && lightzero/bin/pip install LightZero==0.2.0
  python benchmarks/peers.py --mujax-python mujax/bin/python --lightzero-python lightzero/bin/python

Every system first tries one and two threads (ours: self-play workers; mujax: actors; LightZero: torch's threads) for
``--probe-seconds``, and goes on with the better. What still differs:

- Multiplications of a model step, at width 128 and 255 bins: ours 163k, mujax 151k (an embedding of 32 as in its preset of
  that width, two hidden layers in each head), LightZero 95k (heads of 32 units).
- Value targets: ours and LightZero evaluate a target network as they learn, mujax takes the values of the search that acted.
- Replay: ours and LightZero prioritized, mujax uniform.
- LightZero collects whole episodes and rounds its updates down to whole ones: the replay ratio it reaches is in the table.
- Search: Gumbel for all, in XLA by ours and mujax, in C++ by LightZero.
- The first update comes sooner where programs compiled before are still on disk, which ours keeps.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, make_console, make_parser, use_device
from rich.table import Table

OURS = "muzerox"
DRIVERS = Path(__file__).with_name("peers")
SETTINGS = ("simulations", "envs", "batch", "replay_ratio", "reanalyze", "width", "depth", "bins")
PROBE_WARMUP = 5.0
START_SECONDS = 400.0  # until the window begins, compilation included
ROWS = {
    "env_steps_per_second": ("environment steps/s", ",.0f"),
    "updates_per_second": ("updates/s", ".1f"),
    "replay_ratio": ("samples per step", ".2f"),
    "cores_busy": ("cores busy", ".2f"),
    "peak_gib": ("peak memory, GiB", ".2f"),
    "first_update_seconds": ("first update, s", ".0f"),
}

console = make_console()


def lacking(python: str | None, module: str) -> str | None:
    """Why ``python`` cannot run a peer; None when it can."""
    if python is None:
        return "no interpreter given"
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        return str(error)
    return None if found else f"{python} has no {module}"


def drive(name: str, python: str, options: dict[str, Any], extra: list[str], device: str | None) -> dict[str, Any] | None:
    """The figures of one fresh process; None, with a line that says why, when it has none."""
    command = [python, str(DRIVERS / f"{name}_cartpole.py"), *extra]
    for key, value in options.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    environment = dict(os.environ)
    if name != OURS and device != "cpu":
        environment.pop("JAX_PLATFORMS", None)  # mujax acts on the CPU beside the accelerator it learns on
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if name == "lightzero":  # threads that wait must not spin: with two of them on two cores it was ten times slower
        environment |= {"OMP_NUM_THREADS": str(options["threads"]), "OMP_WAIT_POLICY": "PASSIVE"}
    limit = START_SECONDS + options["warmup"] + 2 * options["seconds"]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        environment["TMPDIR"] = folder
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            console.print(f"{name}: no figures within {limit:.0f} s")
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # with the processes under it
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    try:
        return json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError):
        console.print(f"{name}: exit code {process.returncode}, {lines[-1] if lines else 'without a word'}", markup=False)
        return None


def table(threads: dict[str, int], medians: dict[str, dict[str, float]], ratios: dict[str, float]) -> Table:
    shown = Table("median of rounds", *medians)
    shown.add_row("threads", *(str(threads[name]) for name in medians))
    for key, (label, form) in ROWS.items():
        shown.add_row(label, *(format(row[key], form) for row in medians.values()))
    shown.add_row("ours / theirs, paired", *(f"{ratios[name]:.2f}" if name in ratios else "" for name in medians))
    return shown


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mujax-python", metavar="PATH", help="Python of a virtual environment that has mujax")
    parser.add_argument("--lightzero-python", metavar="PATH", help="Python of a virtual environment that has LightZero")
    parser.add_argument("--simulations", type=int, default=16)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--replay-ratio", type=float, default=2.0, help="sampled sequences per environment step")
    parser.add_argument("--reanalyze", type=float, default=0.0, help="share of a batch that is searched again")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--bins", type=int, default=255)
    parser.add_argument("--seconds", type=float, default=90.0, help="of a round's window, start-up and warm-up apart")
    parser.add_argument("--warmup", type=float, default=10.0, help="seconds between the first update and the window")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--probe-seconds", type=float, default=20.0, help="window of one and of two threads; 0: one thread")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="another key of our configuration")
    args = parser.parse_args()
    use_device(args.device)

    pythons = {OURS: sys.executable}
    for name, module, python in (("mujax", "mujax", args.mujax_python), ("lightzero", "lzero", args.lightzero_python)):
        why = lacking(python, module)
        if why is None:
            pythons[name] = python
        else:
            console.print(f"{name}: left out, {why}", markup=False)
    settings = {key: getattr(args, key) for key in SETTINGS}
    extra = {OURS: [part for text in args.set for part in ("--set", text)]}

    def figures(name: str, **options: Any) -> dict[str, Any] | None:
        row = drive(name, pythons[name], settings | options, extra.get(name, []), args.device)
        if row is not None:
            console.print(f"{name}, {options['threads']} threads: {row['env_steps_per_second']:,.0f} environment steps/s")
        return row

    probes: dict[str, dict[int, dict[str, Any] | None]] = {}
    threads = {}
    for name in pythons:
        tried = (1, 2) if args.probe_seconds > 0 and args.envs % 2 == 0 else ()
        probes[name] = {n: figures(name, threads=n, seconds=args.probe_seconds, warmup=PROBE_WARMUP, seed=0) for n in tried}
        rates = {n: row["env_steps_per_second"] for n, row in probes[name].items() if row is not None}
        threads[name] = max(rates, key=rates.__getitem__, default=1)

    rounds: list[dict[str, dict[str, Any] | None]] = []
    for seed in range(args.rounds):
        order = list(pythons) if seed % 2 == 0 else list(pythons)[::-1]
        rounds.append({n: figures(n, threads=threads[n], seconds=args.seconds, warmup=args.warmup, seed=seed) for n in order})

    medians, ratios = {}, {}
    for name in pythons:
        rows = [row for result in rounds if (row := result[name]) is not None]
        if rows:
            medians[name] = {key: statistics.median(row[key] for row in rows) for key in ROWS}
        paired = [(result[OURS], result[name]) for result in rounds]
        both = [ours["env_steps_per_second"] / other["env_steps_per_second"] for ours, other in paired if ours and other]
        if both and name != OURS:
            ratios[name] = statistics.median(both)
    console.print(table(threads, medians, ratios))
    record = {"settings": settings | {"seconds": args.seconds, "warmup": args.warmup, "set": args.set}, "threads": threads}
    finish("peers", record | {"medians": medians, "ratios": ratios, "rounds": rounds, "probes": probes}, record=args.record)


if __name__ == "__main__":
    main()
