"""``--tune`` and ``--phases`` of ``muzerox train``: tunes first, then trains in phases."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.bridge import Extension, RunDir, RunFailed, UserError, answer, make_config, parse_assignment, print_table, tell
from tuner.cli import as_typed, stay_off_the_accelerator
from tuner.following.switches import Switch


def _train_tune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tune", metavar="TIME", help="first spend this long, such as 2m, on finding the configuration that trains fastest here"
    )
    parser.add_argument(
        "--phases",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="watch the training, and go on from a checkpoint with another configuration where its costs have changed and that "
        "pays: with --tune unless --no-phases; with --resume if asked for",
    )


def _train_tuned(train: Any) -> Any:
    def run(args: argparse.Namespace) -> int:
        if args.tune is not None:
            return _tune_then_train(args)
        if not args.phases:
            return train(args)
        if args.resume is None:
            raise UserError("--phases", None, "needs --tune TIME, or --resume DIR of a run")
        return _resume_in_phases(args)

    return run


def _tune_then_train(args: argparse.Namespace) -> int:
    import numpy as np

    from tuner.following.retune import train_in_phases
    from tuner.loop import tune
    from tuner.reporting.tables import print_tuning
    from tuner.resources import balance_of
    from tuner.result import parse_budget

    if args.resume is not None:
        raise UserError("--tune", args.tune, "cannot be given with --resume: a run keeps its configuration")
    with as_typed({"budget": "--tune"}):
        parse_budget(args.tune)
    stay_off_the_accelerator()
    config = make_config(args)
    out = RunDir(args.out).path if args.out is not None else RunDir.default(config).path
    run = RunDir(out)
    run.check_new()
    result = tune(config, budget=args.tune, out=tuning_folder(out))
    if not result.finished:
        return print_tuning(result, out, as_json=args.json)
    if not args.json:  # else it is told with the training
        print_tuning(result, out, as_json=False)
    tuned = Path(result.out) / "tuned.toml"
    how = train_in_phases(
        result.config,
        run,
        ["--config", str(tuned), "--out", str(out)],
        result.hardware,
        expected=(result.measurement and result.measurement.seconds_per_env_step) or result.predicted["seconds_per_env_step"],
        as_json=args.json,
        phased=args.phases is not False,
        most_memory_gib=config.allocation.memory_gib,
    )
    if how.code not in (0, 130):
        raise RunFailed(f"training the tuned configuration ended with exit code {how.code}; {tuned} holds it")
    trained = run.result() or {}
    peak = trained.get("peak_memory_gib", math.nan) * 2**30
    use = np.array([how.cores_busy, peak, 0.0], np.float32)
    factor = balance_of(result.config, use, result.hardware)
    if args.json:
        tuning = {"tuning": result.to_dict(), "balance_factor": factor, "switches": [vars(switch) for switch in how.switches]}
        answer({**json.loads(how.said or "{}"), **tuning})
    else:
        print(how.said, end="")
    _say_unsaved(how, f"--resume {out}" if run.config_file.exists() else f"--config {tuned} --out {out}")
    if how.code == 0 and not args.json:
        print_table(f"muzerox train --tune: {out}", _used_rows(result, trained, use, factor) | _switch_rows(how.switches))
    return how.code


def tuning_folder(out: Path) -> Path:
    """Where the tuning of a run in ``out`` lies: beside it."""
    named = out.absolute()  # "." has no name
    return named.with_name(named.name + "-tuning")


def _resume_in_phases(args: argparse.Namespace) -> int:
    """A run that is gone on with in phases."""
    from tuner.following.retune import train_in_phases
    from tuner.measuring.fingerprint import fingerprint

    for option in ("env", "config", "seed", "out"):
        if getattr(args, option) is not None:
            raise UserError(f"--{option}", getattr(args, option), "cannot be given with --resume, which takes it from the run")
    stay_off_the_accelerator()
    run = RunDir(args.resume)
    assigned = dict(parse_assignment(text) for text in args.assignments)
    config = run.load_config().replace(assigned)
    # What a run is kept to may be what a tuning found that it needs: it is a bound where it is asked for.
    most = config.allocation.memory_gib if "allocation.memory_gib" in assigned else None
    sets = [part for text in args.assignments for part in ("--set", text)]
    arguments = ["--resume", args.resume, *sets]
    how = train_in_phases(config, run, arguments, fingerprint(), as_json=args.json, most_memory_gib=most)
    if args.json and how.said:
        answer(json.loads(how.said))
    else:
        print(how.said, end="")
    _say_unsaved(how, f"--resume {args.resume}")
    return how.code


def _say_unsaved(how: Any, again: str) -> None:
    if how.code == 130 and not how.said:  # it had not begun, or was told twice: it could not say so itself
        tell(f"stopped before it could save; go on with: muzerox train {again}")


def _switch_rows(switches: Sequence[Switch]) -> dict[str, str]:
    """What the run was switched to, and what came of it."""
    rows = {}
    for switch in switches:
        changes = " ".join(f"{path.rpartition('.')[2]}={value}" for path, value in switch.after.items())
        gain = "" if switch.measured_gain is None else f", measured {switch.measured_gain:.2f} times as fast"
        rows[f"at {switch.env_steps:,} steps"] = f"{changes}: {switch.verdict}{gain} ({switch.reason})"
    return rows


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
        "tuning": f"{result.out}/report.html",
    }


TRAIN_TUNE = Extension(extends="train", add_arguments=_train_tune_arguments, wrap=_train_tuned)
