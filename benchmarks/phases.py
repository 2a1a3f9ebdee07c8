"""Whether training in phases ends sooner where costs change on the way, and no later where they do not.

Of three kinds: ``change``, a simulator (``simulators/regimes.py``) whose episodes grow tenfold on the way, and what a step costs
a hundredfold, computed with Python's lock held; ``none``, the same simulator left as it is, half the steps; ``deeper``, searches
that double their simulations on the way (``search.final_simulations``). Configurations of the knobs that a resume may change are
measured as the training begins, in alternation: the best of them is what both trainings start with, one followed from phase to
phase, the other left alone. All alternate, --rounds times; medians are reported. Programs, the annealer's too, are compiled
before anything is timed.

Processes of one training differ by a tenth, which hides what following costs by itself: ``--following MINUTES`` is one training
of kind ``none`` instead, which is followed and left alone in turns of some seconds.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import finish, make_console, make_parser, use_device


class Setting(NamedTuple):
    """What is trained."""

    env: str
    changes: dict[str, Any]  # to its preset
    static: dict[str, tuple[Any, ...]]  # what is measured as it begins: every combination
    steps: int  # environment steps of a training


_ONCE = {"train.eval_period": 1_000_000_000, "train.eval_episodes": 2, "train.target_return": None}  # evaluated at the end
GROWING = {
    "network.width": 32,
    "search.num_simulations": 4,
    "replay.capacity": 65_536,
    "replay.min_size": 1_024,
    "runtime.num_envs": 2,
    "runtime.selfplay_workers": 2,
    "runtime.loop_count": 8,
    "train.batch_size": 64,
    "train.replay_ratio": 2.0,
    **_ONCE,
}
DEEPENING = {
    "network.width": 32,
    "search.num_simulations": 2,
    "search.final_simulations": 64,
    "runtime.num_envs": 8,
    "runtime.selfplay_workers": 2,
    "runtime.loop_count": 8,
    "train.batch_size": 64,
    "train.replay_ratio": 1.0,
    **_ONCE,
}
SETTINGS = {
    "change": Setting(
        "gymnasium:regimes:Growing-v0",
        GROWING,
        {"runtime.step_in": ("thread", "process"), "runtime.role_threads": (0, 1)},
        400_000,
    ),
    # As it begins one core is as fast as two, and faster; with 64 simulations two are 1.6 times as fast (docs/running.md).
    "deeper": Setting(
        "gymnasium:CartPole-v1",
        DEEPENING,
        {"allocation.cores": (1, 2), "runtime.role_threads": (0, 1)},
        1_200_000,
    ),
}
SETTINGS["none"] = SETTINGS["change"]  # half the steps
TURN_SECONDS = 4.0


def best_static(setting: Setting, hardware: Any, rounds: int) -> tuple[Any, dict[str, float]]:
    """The fastest as the training begins, and steps/s of each."""
    from muzerox import Config
    from tuner.bridge import concrete
    from tuner.measuring.measure import measure_in_alternation

    base = Config.preset(setting.env).replace({**setting.changes, "train.max_env_steps": setting.steps})
    combinations = [dict(zip(setting.static, values, strict=True)) for values in itertools.product(*setting.static.values())]
    candidates = [concrete(base.replace(changes), "cpu") for changes in combinations]
    found = measure_in_alternation(candidates, hardware=hardware, rounds=rounds)
    rates = [round(one.env_steps_per_second or 0.0, 1) for one in found]
    names = [" ".join(f"{path.rpartition('.')[2]}={value}" for path, value in changes.items()) for changes in combinations]
    return candidates[rates.index(max(rates))], dict(zip(names, rates, strict=True))


def compile_annealer(config: Any, hardware: Any) -> None:
    """One proposal: the programs of later ones are in the cache, as they are on a machine that has tuned a run before."""
    import jax

    from predictor import RuntimePredictor
    from tuner.bridge import enable_cache
    from tuner.following.phases import Level
    from tuner.following.retune import measured
    from tuner.neighbourhood import resumable_space
    from tuner.proposer import Proposer

    enable_cache()
    space = resumable_space(config, hardware.platform)
    proposer = Proposer(space, hardware, RuntimePredictor.pretrained(), jax.random.key(0), 0.0)
    proposer.learn([(space.start, measured(space, space.start, Level(1e-4, 1e-4, (1.0,) * 3, 1.0, 1.0, 1), hardware))])
    proposer.propose(1)


def train(config: Any, hardware: Any, folder: Path, *, phased: bool, change: int) -> dict[str, Any]:
    """One whole training. ``change``: steps after which the regime changes; 0: never."""
    from tuner.bridge import RunDir, toml
    from tuner.following.retune import train_in_phases

    folder.mkdir(parents=True)
    os.environ.update(REGIME_COUNTER=str(folder / "steps"), REGIME_CHANGE=str(change))
    file, run = folder / "config.toml", RunDir(folder / "run")
    file.write_text(toml(config))
    start, own = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    arguments = ["--config", str(file), "--out", str(run.path)]
    how = train_in_phases(config, run, arguments, hardware, as_json=True, phased=phased)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    del os.environ["REGIME_COUNTER"], os.environ["REGIME_CHANGE"]
    if how.code != 0:
        sys.exit(f"training ended with exit code {how.code}")
    switches = [
        {"at": s.env_steps, "reason": s.reason, "after": s.after, "expected": s.expected_gain, "measured": s.measured_gain,
         "cost_seconds": s.cost_seconds, "verdict": s.verdict}
        for s in how.switches
    ]  # fmt: skip
    follower = after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime
    return {"seconds": round(seconds, 2), "follower_cpu_seconds": round(follower, 2), "switches": switches}


def following(config: Any, hardware: Any, folder: Path, seconds: float) -> dict[str, Any]:
    """Updates a second of one training while it is followed, over those while it is not: mean, its standard error, and turns."""
    from tuner.bridge import RunDir, toml
    from tuner.following import phases
    from tuner.following.process import POLL_SECONDS, Training

    os.environ.update(REGIME_COUNTER=str(folder / "steps"), REGIME_CHANGE="0")
    file, run = folder / "config.toml", RunDir(folder / "run")
    file.write_text(toml(config))
    training, state = Training(config, run, hardware, as_json=True), phases.State()
    ratios: list[float] = []

    def updates_now() -> tuple[int, float]:
        rows = [row for row in run.metrics() if row["kind"] == "train"]
        return rows[-1]["updates"], rows[-1]["train_seconds"]

    def turn(followed: bool) -> float:
        nonlocal state
        (before, began), until = updates_now(), time.monotonic() + TURN_SECONDS
        while (left := until - time.monotonic()) > 0.0:
            if training.wait(min(left, POLL_SECONDS) if followed else left) is not None:
                sys.exit("the training has ended")
            for report in training.reports() if followed else ():
                state, _ = phases.watch(state, report)
        after, ended = updates_now()
        return (after - before) / (ended - began)

    with training.signals():
        training.start(["--config", str(file), "--out", str(run.path)])
        while not training.reports():
            if training.wait(1.0) is not None:
                sys.exit("the training has ended")
        time.sleep(phases.SETTLE_SECONDS)
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(ratios) < 2:
            first = len(ratios) % 2 == 0  # followed first, every second time
            rates = {followed: turn(followed) for followed in (first, not first)}
            ratios.append(math.log(rates[True] / rates[False]))
        signal.raise_signal(signal.SIGTERM)  # it saves and ends
        training.wait()
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {"ratio": math.exp(statistics.fmean(ratios)), "error": error, "turns": len(ratios), "turn_seconds": TURN_SECONDS}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, help="environment steps of a training; of one without a change half as many")
    parser.add_argument("--rounds", type=int, default=1, help="trainings of each kind (default 1)")
    parser.add_argument("--bursts", type=int, default=5, help="rounds of bursts that the static configurations are measured in")
    parser.add_argument("--only", choices=("change", "none", "deeper"), action="append", help="only this kind; repeatable")
    parser.add_argument("--following", type=float, metavar="MINUTES", help="only what following one training costs it")
    args = parser.parse_args()
    if args.following is not None and not 0.0 < args.following < math.inf:
        parser.error(f"--following ({args.following:g}) must be more than 0 minutes")
    use_device(args.device or "cpu")
    simulators = str(Path(__file__).resolve().parent / "simulators")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [simulators, os.environ.get("PYTHONPATH")]))
    sys.path.append(simulators)
    from rich.table import Table

    from tuner.measuring.fingerprint import fingerprint

    kinds = ["none"] if args.following else args.only or ["change", "none", "deeper"]
    hardware = fingerprint()
    settings = {kind: SETTINGS[kind]._replace(steps=args.steps or SETTINGS[kind].steps) for kind in kinds}
    chosen: dict[str, Any] = {}
    static: dict[str, dict[str, float]] = {}
    for kind, setting in settings.items():
        alike = next((other for other in chosen if settings[other] == setting), None)
        if alike is not None:  # measured already
            chosen[kind], static[kind] = chosen[alike], static[alike]
            continue
        chosen[kind], static[kind] = best_static(setting, hardware, args.bursts)
        print(f"{kind}: as it begins {json.dumps(static[kind])}", file=sys.stderr, flush=True)
        if not args.following:
            compile_annealer(chosen[kind], hardware)
    if args.following:
        with tempfile.TemporaryDirectory() as folder:
            endless = chosen["none"].replace("train.max_env_steps", 1_000_000_000)
            found = following(endless, hardware, Path(folder), 60.0 * args.following)
        print(f"followed, over left alone: {found['ratio']:.3f} ± {found['error']:.3f} of the updates a second", file=sys.stderr)
        finish("phases", {"static": static, "following": found}, record=args.record)
        return
    runs: dict[str, list[dict[str, Any]]] = {f"{kind}, {how}": [] for kind in kinds for how in ("static", "phases")}
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in itertools.product(range(args.rounds), kinds):
            for how in ("static", "phases") if number % 2 == 0 else ("phases", "static"):
                place = Path(folder) / f"{kind}-{how}-{number}"
                steps = settings[kind].steps // (2 if kind == "none" else 1)
                config = chosen[kind].replace("train.max_env_steps", steps)
                change = steps * 3 // 7 if kind == "change" else 0
                found = train(config, hardware, place, phased=how == "phases", change=change)
                runs[f"{kind}, {how}"].append(found)
                print(f"{kind}, {how}: {json.dumps(found)}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(run["seconds"] for run in found) for name, found in runs.items()}
    ratios = {kind: round(medians[f"{kind}, phases"] / medians[f"{kind}, static"], 3) for kind in kinds}
    table = Table(title="seconds of a training, process start to end", title_style="italic")
    for title in ("kind", "static", "phases", "phases / static", "switches"):
        table.add_column(title, justify="right")
    for kind in kinds:
        verdicts = ", ".join(s["verdict"] for run in runs[f"{kind}, phases"] for s in run["switches"]) or "none"
        shown = (f"{medians[f'{kind}, {how}']:.1f}" for how in ("static", "phases"))
        table.add_row(kind, *shown, f"{ratios[kind]:.3f}", verdicts)
    make_console().print(table)
    figures = {
        "settings": {kind: setting._asdict() for kind, setting in settings.items()},
        "rounds": args.rounds,
        "static": static,
    }
    finish("phases", {**figures, "runs": runs, "seconds": medians, "ratio": ratios}, record=args.record)


if __name__ == "__main__":
    main()
