"""``muzerox tune``, ``measure`` and ``predict``, ``--tune`` of ``train`` and the fingerprint in ``info``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tuner.bridge import (
    Command,
    Extension,
    RunDir,
    RunFailed,
    UserError,
    add_config_arguments,
    add_output_arguments,
    make_config,
    print_table,
)


def _stay_off_the_accelerator() -> None:
    """This process predicts and anneals; the accelerator is for the ones it measures and trains in."""
    import jax

    jax.config.update("jax_platforms", "cpu")


# tune ----------------------------------------------------------------------------------------------------------------


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--budget", default="5m", metavar="TIME", help="time to spend, such as 90s, 4m or 1h (default 5m)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        default="runs/tuning",
        help="directory of the tuning (default runs/tuning); continued if it holds one",
    )
    parser.add_argument("--trials", type=int, metavar="N", help="end after N processes measured, if the budget lasts that long")
    parser.add_argument(
        "--knobs",
        choices=("exact", "neutral", "learning"),
        default="neutral",
        help="what may move: exact (same numbers), neutral (same learning; the default), learning (simulations, batch size)",
    )
    parser.add_argument(
        "--staleness-price",
        type=float,
        metavar="SHARE",
        help="sebulba: share of time that learning from what is a period of the target network older must win (default 0.02)",
    )
    add_output_arguments(parser)


def _tune(args: argparse.Namespace) -> int:
    from tuner.loop import tune
    from tuner.objective import STALENESS_PRICE

    _stay_off_the_accelerator()
    result = tune(
        make_config(args),
        budget=args.budget,
        max_trials=args.trials,
        out=args.out,
        effect=args.knobs,
        staleness_price=STALENESS_PRICE if args.staleness_price is None else args.staleness_price,
    )
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        _print_tuning(result)
    if not result.finished:
        print(f"stopped; the best so far is in {args.out}/tuned.toml; the same command continues", file=sys.stderr)
    return 0 if result.finished else 130


def _print_tuning(result: Any) -> None:
    from tuner.report import closing_rows, print_trials

    print_trials(result.history)
    print_table(f"muzerox tune: {result.out}", closing_rows(result) | {"tuned configuration": f"{result.out}/tuned.toml"})


TUNE = Command(
    name="tune",
    help="find the configuration that trains fastest on this machine",
    add_arguments=_tune_arguments,
    run=_tune,
    description="""Measures the machine and the initial configuration, predicts what others would cost, anneals, measures the few
that matter under their allocation, and compares the best with the start in alternation.

  muzerox tune --env gymnax:CartPole-v1 --budget 4m --out runs/tuning
  muzerox train --config runs/tuning/tuned.toml

DIR then holds tuned.toml (complete, allocation included), trials/, tuning.png and result.json. Ctrl-C keeps the best so far.""",
)


# measure and predict --------------------------------------------------------------------------------------------------


_SHARES = 6  # stages that are named, the largest


def _figures(record: Any) -> dict[str, Any]:
    """The keys that a measurement and a prediction share, and those that only a prediction has."""
    from predictor import Prediction

    return {f.name: getattr(record, f.name) for f in dataclasses.fields(Prediction) if hasattr(record, f.name)}


def _print_figures(title: str, config: Any, figures: dict[str, Any], waits: dict[str, float], *, as_json: bool) -> None:
    from tuner.report import pipeline_row, wait_rows

    if as_json:
        print(json.dumps(figures))
        return
    shown = {name: value for name, value in figures.items() if value is not None}
    for name in ("peak_bytes", "device_peak_bytes"):
        if name in shown:
            shown[name] = f"{shown[name] / 2**30:.2f} GiB"
    if "seconds_per_env_step" in shown:
        shown["seconds_per_env_step"] = f"{shown['seconds_per_env_step'] * 1e6:.1f} microseconds"
    if "interval" in shown:
        low, high = shown.pop("interval")
        shown["seconds_per_env_step"] += f", nine times in ten {low * 1e6:.1f} to {high * 1e6:.1f}"
    if "batch_staleness" in shown:
        shown["batch_staleness"] = f"{shown['batch_staleness']:.1f} updates"
    if "shares" in shown:
        largest = sorted(shown.pop("shares").items(), key=lambda item: -item[1])[:_SHARES]
        shown["where the time goes"] = ", ".join(
            f"{name.replace('_', ' ')} {share:.0%}" for name, share in largest if share >= 0.01
        )
    named = {name.replace("_", " "): value for name, value in shown.items()}
    print_table(title, pipeline_row(config) | named | wait_rows(waits))


def _measure_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="timed bursts; the figures are medians (default 5)")
    parser.add_argument(
        "--timeout", type=float, default=180.0, metavar="S", help="seconds that compiling, or a burst, may take (default 180)"
    )
    add_output_arguments(parser)


def _measure(args: argparse.Namespace) -> int:
    from predictor import Outcome
    from tuner.bridge import allocation_checked, concrete
    from tuner.fingerprint import fingerprint
    from tuner.history import shared_store
    from tuner.measure import measure_config

    if not 1 <= args.repeats <= 10_000:
        raise UserError("--repeats", args.repeats, "must be from 1 to 10000", 1 if args.repeats < 1 else 10_000)
    if not 1.0 <= args.timeout <= 86_400.0:
        raise UserError("--timeout", args.timeout, "must be from 1 to 86400 seconds", 1 if args.timeout < 1.0 else 86_400)
    config = allocation_checked(make_config(args))
    hardware = fingerprint()
    measurement = measure_config(config, hardware=hardware, repeats=args.repeats, timeout=args.timeout)[0]
    shared_store(hardware.id).append(measurement.to_dict())
    config = concrete(config, hardware.platform)
    _print_figures(f"muzerox measure: {config.env}", config, _figures(measurement), measurement.waits, as_json=args.json)
    return 0 if measurement.outcome == Outcome.OK else 1


MEASURE = Command(
    name="measure",
    help="run a configuration for a few seconds in a subprocess, and say what it costs",
    add_arguments=_measure_arguments,
    run=_measure,
    description="""Trains in a subprocess under the configuration's allocation, and times the steady state: compilation and
warm-up apart. seconds_per_env_step is wall time a transition, summed over environments, learning and reanalysis included.

  muzerox measure --env gymnax:CartPole-v1 --set runtime.num_envs=128 --set allocation.cores=1""",
)


def _predict_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_output_arguments(parser)


def _predict(args: argparse.Namespace) -> int:
    from predictor import RuntimePredictor
    from tuner.bridge import allocation_checked, concrete, enable_cache
    from tuner.fingerprint import fingerprint
    from tuner.history import shared_measurements
    from tuner.loop import HISTORY
    from tuner.workload import describe

    _stay_off_the_accelerator()
    config = allocation_checked(make_config(args))
    hardware = fingerprint()
    history = shared_measurements(hardware.id, lambda text: print(text, file=sys.stderr))
    enable_cache()
    model = RuntimePredictor.pretrained().fit(history[-HISTORY:])
    if not history:
        print("no measurement of this machine yet: muzerox measure makes one, and predictions better", file=sys.stderr)
    config = concrete(config, hardware.platform)
    prediction = model.predict(describe(config), hardware)
    title = f"muzerox predict: {config.env}, from {len(history)} measurements"
    _print_figures(title, config, _figures(prediction), {}, as_json=args.json)
    return 0


PREDICT = Command(
    name="predict",
    help="say what a configuration would cost, without running it",
    add_arguments=_predict_arguments,
    run=_predict,
    description="""The same figures as measure, from the predictor: an analytic base over the machine's measured rates,
corrected by what was measured here before, and a graph network. With the interval that holds what would be measured nine times in
ten, and with where the time goes. The configuration is not run.

  muzerox predict --env gymnax:CartPole-v1 --set runtime.num_envs=1024""",
)


# train --tune, info ---------------------------------------------------------------------------------------------------


def _train_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tune", metavar="TIME", help="first spend this long, such as 2m, on finding the configuration that trains fastest here"
    )


def _train_tuned(train: Any) -> Any:
    def run(args: argparse.Namespace) -> int:
        if args.tune is None:
            return train(args)
        return _tune_then_train(args)

    return run


def _tune_then_train(args: argparse.Namespace) -> int:
    import numpy as np

    from tuner.loop import tune
    from tuner.resources import balance_of
    from tuner.result import parse_budget

    if args.resume is not None:
        raise UserError("--tune", args.tune, "cannot be given with --resume: a run keeps its configuration")
    parse_budget(args.tune)
    _stay_off_the_accelerator()
    config = make_config(args)
    out = RunDir(args.out).path if args.out is not None else RunDir.default(config).path
    run = RunDir(out)
    run.check_new()
    result = tune(config, budget=args.tune, out=out.with_name(out.name + "-tuning"))
    if not args.json:
        _print_tuning(result)
    if not result.finished:
        return 130
    tuned = Path(result.out) / "tuned.toml"
    code, said, cores = _train_in_child(tuned, out, as_json=args.json)
    if code not in (0, 130):
        raise RunFailed(f"training the tuned configuration ended with exit code {code}; {tuned} holds it")
    trained = run.result() or {}
    peak = trained.get("peak_memory_gib", math.nan) * 2**30
    use = np.array([cores, peak, 0.0], np.float32)
    factor = balance_of(result.config, use, result.hardware)
    if args.json:
        print(json.dumps({**json.loads(said), "tuning": result.to_dict(), "balance_factor": factor}))
    elif code == 0:
        print_table(f"muzerox train --tune: {out}", _used_rows(result, trained, use, factor))
    return code


def _used_rows(result: Any, trained: dict[str, Any], use: Any, factor: float) -> dict[str, Any]:
    """What the training was expected to do and to need, and what it did and used."""
    from tuner.balance import verdict

    given = result.config.allocation
    rows = {}
    if trained.get("env_steps_per_second"):
        expected = f"{result.predicted['env_steps_per_second']:,.0f} predicted"
        if result.measurement is not None:
            expected += f", {result.measurement.env_steps_per_second:,.0f} measured in tuning"
        rows["environment steps/s"] = f"{trained['env_steps_per_second']:,.0f} ({expected})"
    if "peak_memory_gib" in trained:
        rows["peak memory"] = f"{trained['peak_memory_gib']:.2f} of {given.memory_gib:g} GiB allocated"
    return rows | {
        "cores busy": f"{use[0]:.2f} of {given.cores} allocated, compilation and evaluations included",
        "balance factor": f"{factor:.2f} ({verdict(factor)})",
        "tuning": f"{result.out}/tuning.png",
    }


def _train_in_child(config: Path, out: Path, *, as_json: bool) -> tuple[int, str, float]:
    """Trains in a process of its own, under its allocation from the start. Exit code, stdout if asked for, cores busy."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "muzerox", "train", "--config", str(config), "--out", str(out)]
    stdout = subprocess.PIPE if as_json else None
    process = subprocess.Popen([*command, "--json"] if as_json else command, stdout=stdout, text=True)
    # The child answers both by saving. A terminal sends it Ctrl-C itself, and a second would end it at once: not passed on.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        said, _ = process.communicate()
    finally:
        for number, before_us in previous.items():
            signal.signal(number, before_us)
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return process.returncode, said or "", cpu / seconds


TRAIN_TUNE = Extension(extends="train", add_arguments=_train_tune_arguments, wrap=_train_tuned)


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--remeasure", action="store_true", help="measure the machine's rates again")


def _info_with_fingerprint(info: Any) -> Any:
    def run(args: argparse.Namespace) -> int:
        from tuner.fingerprint import fingerprint

        args.machine = lambda: {"measured rates": _rates(fingerprint(again=args.remeasure))}
        return info(args)

    return run


def _rates(hardware: Any) -> dict[str, Any]:
    """A fingerprint for people."""
    return {
        "processor": hardware.cpu,
        "cores": hardware.cores,
        "memory": f"{hardware.memory_bytes / 2**30:.1f} GiB",
        "device": f"{hardware.devices} x {hardware.device} ({hardware.platform})",
        "device memory": f"{hardware.device_memory_bytes / 2**30:.1f} GiB",
        "float32 products": f"{hardware.float32_flops / 1e9:,.0f} GFLOP/s",
        "float32 products, one core": f"{hardware.one_core_flops / 1e9:,.0f} GFLOP/s",
        "bfloat16 products": f"{hardware.bfloat16_flops / 1e9:,.0f} GFLOP/s",
        "copies": f"{hardware.copy_bytes_per_second / 1e9:,.1f} GB/s",
        "dispatch": f"{hardware.dispatch_seconds * 1e6:,.0f} microseconds",
        "small operation in a loop": f"{hardware.operation_seconds * 1e6:,.2f} microseconds",
    }


INFO_FINGERPRINT = Extension(extends="info", add_arguments=_no_arguments, wrap=_info_with_fingerprint)
