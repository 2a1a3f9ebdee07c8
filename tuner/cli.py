"""``muzerox tune``, ``measure`` and ``predict``, and the fingerprint in ``info``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tuner.bridge import (
    Command,
    Config,
    Extension,
    UserError,
    add_config_arguments,
    add_output_arguments,
    answer,
    make_config,
    print_table,
    tell,
)

if TYPE_CHECKING:
    from predictor import Measurement, Workload


def stay_off_the_accelerator() -> None:
    """This process predicts and anneals; the accelerator is for the ones it measures and trains in."""
    import jax

    jax.config.update("jax_platforms", "cpu")


@contextlib.contextmanager
def as_typed(options: Mapping[str, str]) -> Iterator[None]:
    """A block whose errors name what was typed: options, by the arguments of Python that they are passed on as."""
    try:
        yield
    except UserError as error:
        if error.path not in options:
            raise
        raise UserError(options[error.path], error.value, error.rule, error.nearest) from None


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
        help="sebulba: share of time that a configuration must save for each target network period that its data are older "
        "(default 0.02)",
    )
    parser.add_argument(
        "--objective", default="time", metavar="GOAL", help="time (default), cost, energy, or a mix such as time=0.7,cost=0.3"
    )
    parser.add_argument(
        "--prices", default="", metavar="LIST", help="of an hour, for cost (default core=0.04,gib=0.005,device=2.5)"
    )
    parser.add_argument("--max-cores", type=int, metavar="N", help="cores that a training may be given, at most")
    parser.add_argument("--max-memory", type=float, metavar="GIB", help="memory that a training may be given, at most")
    add_output_arguments(parser)


_TYPED = {
    "budget": "--budget",
    "max_trials": "--trials",
    "directory": "--out",
    "staleness_price": "--staleness-price",
    "objective": "--objective",
    "prices": "--prices",
    "max_cores": "--max-cores",
    "max_memory": "--max-memory",
}


def _tune(args: argparse.Namespace) -> int:
    from tuner.goal import Goal
    from tuner.loop import tune
    from tuner.objective import STALENESS_PRICE
    from tuner.reporting.tables import print_tuning

    with as_typed(_TYPED):
        goal = Goal.parse(args.objective, args.prices, args.max_cores, args.max_memory)
        stay_off_the_accelerator()
        result = tune(
            make_config(args),
            budget=args.budget,
            max_trials=args.trials,
            out=args.out,
            effect=args.knobs,
            staleness_price=STALENESS_PRICE if args.staleness_price is None else args.staleness_price,
            goal=goal,
        )
    return print_tuning(result, args.out, as_json=args.json)


TUNE = Command(
    name="tune",
    help="find the configuration that trains fastest on this machine",
    add_arguments=_tune_arguments,
    run=_tune,
    description="""Measures the machine and the initial configuration, predicts what others would cost, anneals, measures the few
that matter under their allocation, and compares the best with the start in alternation.

  muzerox tune --env gymnax:CartPole-v1 --budget 4m --out runs/tuning
  muzerox train --config runs/tuning/tuned.toml

DIR then holds tuned.toml (complete, allocation included), report.html, trials/, tuning.png and result.json. Ctrl-C keeps the
best so far.""",
)


# measure and predict --------------------------------------------------------------------------------------------------


_SHARES = 6  # stages that are named, the largest
_TIMEOUT = 180.0


def _figures(record: Any) -> dict[str, Any]:
    """The keys that a measurement and a prediction share, and those that only a prediction has."""
    from predictor import Prediction

    return {f.name: getattr(record, f.name) for f in dataclasses.fields(Prediction) if hasattr(record, f.name)}


def _print_figures(title: str, config: Any, figures: dict[str, Any], waits: dict[str, float], *, as_json: bool) -> None:
    from tuner.reporting.tables import pipeline_row, wait_rows

    if as_json:
        answer(figures)
        return
    shown = {name: value for name, value in figures.items() if value is not None}
    for name in ("peak_bytes", "device_peak_bytes"):
        if name in shown:
            shown[name] = f"{shown[name] / 2**30:.2f} GiB"
    if "seconds_per_env_step" in shown:
        shown["seconds_per_env_step"] = f"{shown['seconds_per_env_step'] * 1e6:.1f} microseconds"
    if "training_seconds" in shown:
        steps, seconds = config.train.max_env_steps, shown.pop("training_seconds")
        shown[f"training of {steps:,} steps"] = f"{timedelta(seconds=round(seconds))}, without compiling, evaluating and saving"
    if "seconds_per_env_step_by_simulations" in shown:
        depths = shown.pop("seconds_per_env_step_by_simulations").items()
        told = ", ".join(f"{seconds * 1e6:.1f} at {count}" for count, seconds in depths)
        shown["as searches deepen"] = f"{told} simulations, microseconds"
    if "interval" in shown:
        low, high = shown.pop("interval")
        shown["seconds_per_env_step"] += f", nine times in ten {low * 1e6:.1f} to {high * 1e6:.1f}"
    if "measured_times" in shown:
        times, seconds = shown.pop("measured_times"), shown.pop("measured_seconds_per_env_step")
        often = "once" if times == 1 else f"in the median of {times}"
        shown["seconds_per_env_step"] += f"; measured here: {seconds * 1e6:.1f}, {often}"
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
        "--timeout", type=float, default=_TIMEOUT, metavar="S", help="seconds that compiling, or a burst, may take (default 180)"
    )
    add_output_arguments(parser)


def _measure(args: argparse.Namespace) -> int:
    from predictor import Outcome
    from tuner.bridge import allocation_checked, concrete
    from tuner.history import share, shared_store
    from tuner.measuring.fingerprint import fingerprint
    from tuner.measuring.measure import measure_config

    if not 1 <= args.repeats <= 10_000:
        raise UserError("--repeats", args.repeats, "must be from 1 to 10000", 1 if args.repeats < 1 else 10_000)
    if not 1.0 <= args.timeout <= 86_400.0:
        nearest = _TIMEOUT if math.isnan(args.timeout) else min(max(args.timeout, 1.0), 86_400.0)
        raise UserError("--timeout", args.timeout, "must be from 1 to 86400 seconds", f"{nearest:g}")
    config = allocation_checked(make_config(args))
    _check_memory(config)
    hardware = fingerprint()
    served = concrete(config, hardware.platform)
    limits = {"repeats": args.repeats, "timeout": args.timeout}
    (measurement,) = measure_config(config, hardware=hardware, say=tell, **limits)
    share(measurement, shared_store(hardware.id))
    _print_figures(f"muzerox measure: {config.env}", served, _figures(measurement), measurement.waits, as_json=args.json)
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


def _check_memory(config: Config) -> None:
    """Refuses a replay that the memory asked for cannot hold, before the machine is measured."""
    from tuner.bridge import concrete
    from tuner.corrections import check_memory
    from tuner.measuring.workload import describe

    served = concrete(config, "cpu")  # whatever the platform, the replay takes as much
    check_memory(served, describe(served))


def _predict_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    add_output_arguments(parser)


def _predict(args: argparse.Namespace) -> int:
    from predictor import RuntimePredictor, usable
    from tuner.bridge import allocation_checked, concrete, enable_cache
    from tuner.history import HISTORY, shared_measurements
    from tuner.measuring.fingerprint import fingerprint
    from tuner.measuring.workload import describe, whole_training

    stay_off_the_accelerator()
    config = allocation_checked(make_config(args))
    _check_memory(config)
    hardware = fingerprint()
    config = concrete(config, hardware.platform)
    workload = describe(config)
    history = shared_measurements(hardware.id, tell)
    enable_cache()
    model = RuntimePredictor.pretrained().fit(history[-HISTORY:])
    used = len(usable(history[-HISTORY:]))
    if not used:
        tell("no measurement of this machine yet: muzerox measure makes one, and predictions better")
    figures = _figures(model.predict(workload, hardware)) | whole_training(model, config, hardware) | _measured(history, workload)
    taught = f"from {used} measurement{'' if used == 1 else 's'}"
    _print_figures(f"muzerox predict: {config.env}, {taught}", config, figures, {}, as_json=args.json)
    return 0


def _measured(history: Sequence[Measurement], workload: Workload) -> dict[str, Any]:
    """What this very configuration took here, where it was measured; memory it may take aside."""
    from predictor import program, usable

    wanted = program(workload), workload.loop_count
    again = [m for m in usable(history) if (program(m.workload), m.workload.loop_count) == wanted]
    seconds = [m.seconds_per_env_step or math.nan for m in again]
    return {"measured_seconds_per_env_step": statistics.median(seconds), "measured_times": len(seconds)} if seconds else {}


PREDICT = Command(
    name="predict",
    help="say what a configuration would cost, without running it",
    add_arguments=_predict_arguments,
    run=_predict,
    description="""Gives the same figures as measure, without running the configuration. They come from the predictor: an analytic
base over the machine's measured rates, corrected by what was measured here before and, once it has earned a weight, by a graph
network. Also shows the interval that holds what would be measured nine times in ten, where the time goes, the seconds of the
whole training, searches that deepen on the way included, and what this very configuration took here where it was measured.

  muzerox predict --env gymnax:CartPole-v1 --set runtime.num_envs=1024""",
)


# info ----------------------------------------------------------------------------------------------------------------


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--remeasure",
        action="store_true",
        help="measure the machine's rates again, and forget how long environments' steps take here",
    )


def _info_with_fingerprint(info: Any) -> Any:
    def run(args: argparse.Namespace) -> int:
        from tuner.measuring.fingerprint import fingerprint
        from tuner.measuring.workload import forget_step_seconds
        from tuner.reporting.tables import machine_rows

        if args.remeasure:
            forget_step_seconds()
        args.machine = lambda: {"measured rates": machine_rows(fingerprint(again=args.remeasure))}
        return info(args)

    return run


INFO_FINGERPRINT = Extension(extends="info", add_arguments=_info_arguments, wrap=_info_with_fingerprint)
