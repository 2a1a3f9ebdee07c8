"""The ``muzerox`` command: a thin layer over the Python API.

Exit codes: 0 done, 1 the run failed, 2 bad input (one line on stderr), 130 stopped by a signal: a training after
saving, unless Ctrl-C came after it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from muzerox import config_io
from muzerox.commands import Command, make_parser
from muzerox.config import RESUMABLE, Config, paths
from muzerox.errors import ConfigError, RunFailed, UserError
from muzerox.streams import answer, discard, flush, kept_for_answers, refusal, tell


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that make a configuration; they mean the same in every command."""
    parser.add_argument("--env", metavar="SUITE:NAME", help="environment, such as gymnax:CartPole-v1 or pgx:tic_tac_toe")
    parser.add_argument("--config", metavar="FILE.toml", help="configuration file; missing keys take the environment's preset")
    parser.add_argument(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        dest="assignments",
        help="one key of the configuration, such as search.num_simulations=32; repeatable",
    )
    parser.add_argument("--seed", type=int, help="seed of every random stream (default 0)")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """``--json``, which means the same in every command."""
    parser.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout and nothing else there")


def make_config(args: argparse.Namespace) -> Config:
    """Preset, then file, then options, each over the last; the last word on ``env`` chooses the preset. Raises ConfigError."""
    if args.config == "":  # which would be the working directory
        raise ConfigError("--config", "", "must not be empty")
    tree = config_io.read_tree(args.config) if args.config is not None else {}
    changes = dict(config_io.parse_assignment(text) for text in args.assignments)
    env = changes.pop("env", args.env if args.env is not None else tree.get("env", Config().env))
    if not isinstance(env, str):
        raise ConfigError("env", env, "must be text such as gymnax:CartPole-v1")
    config = Config.preset(env).merge({**tree, "env": env})
    if args.seed is not None:
        changes["seed"] = args.seed
    return config.replace(changes)


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--out", metavar="DIR", help="new directory of the run (default runs/<environment>-seed<seed>-<time>)")
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help=f"continue the run in DIR; of the other options only --set applies, to {', '.join(RESUMABLE)}",
    )
    add_output_arguments(parser)


def _train(args: argparse.Namespace) -> int:
    from muzerox import training
    from muzerox.run_dir import RunDir

    if args.resume is not None:
        for option in ("env", "config", "seed", "out"):
            if getattr(args, option) is not None:
                raise UserError(
                    f"--{option}", getattr(args, option), "cannot be given with --resume, which takes it from the run"
                )
        changes = dict(config_io.parse_assignment(text) for text in args.assignments)
        already = not changes and RunDir(args.resume).result() is not None
        result = training.resume(args.resume, changes=changes)
        if already:
            tell(f"{args.resume} has already finished; train on with --set train.max_env_steps=N")
    else:
        result = training.train(make_config(args), args.out)
    if args.json:
        answer(result.to_dict())
    else:
        from muzerox.report import print_table

        print_table(f"muzerox train: {result.out}", _train_rows(result))
    if not result.finished:
        tell(f"stopped and saved; continue with: muzerox train --resume {result.out}")
    return 0 if result.finished else 130


def _train_rows(result: Any) -> dict[str, Any]:
    from muzerox.report import pipeline_rows

    rows: dict[str, Any] = {"solved": result.solved}
    if result.mean_return is not None:
        rows["evaluation"] = f"{result.mean_return:.2f} ± {result.std_return:.2f} over {result.episodes} episodes"
    rows |= {
        "environment steps": result.env_steps,
        "updates": result.updates,
        "seconds since process start": result.seconds,
    }
    if "train" in result.phases:  # absent when the first dispatch, which compiles, was also the last
        rows |= {"environment steps/s": result.env_steps_per_second, "updates/s": result.updates_per_second}
    if result.first_update_seconds is not None:
        rows["first update after"] = f"{result.first_update_seconds:.2f} s"
    if result.peak_memory_gib is not None:
        rows["peak memory"] = f"{result.peak_memory_gib:.2f} GiB"
    rows["seconds by phase"] = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.phases.items())
    rows |= pipeline_rows(result.pipeline)
    if result.finished:
        rows["return curve"] = str(Path(result.out) / "return_curve.png")
    return rows


TRAIN = Command(
    name="train",
    help="train an agent, or resume a run",
    add_arguments=_train_arguments,
    run=_train,
    description="""Trains until train.max_env_steps, or until an evaluation reaches train.target_return.

  muzerox train --env gymnax:CartPole-v1 --out runs/cartpole
  muzerox train --env pgx:connect_four --set search.num_simulations=32 --seed 1
  muzerox train --resume runs/cartpole

DIR then holds config.toml, metrics.jsonl, return_curve.png, tensorboard/ and checkpoints/. Ctrl-C saves and stops.""",
)


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="DIR", help="directory of a run")
    parser.add_argument("--episodes", type=int, default=64, metavar="N", help="episodes to play (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the episodes (default 0)")
    parser.add_argument(
        "--opponent",
        default="random",
        metavar="NAME|DIR",
        help="two players: random (default), perfect (tic_tac_toe), or the directory of another run",
    )
    parser.add_argument(
        "--precision", metavar="LEVEL", help="act at another level than the run was trained at: O0, O1, O1_float16, O2"
    )
    add_output_arguments(parser)


def _evaluate(args: argparse.Namespace) -> int:
    from muzerox.agent import evaluate_run

    if args.episodes < 1 or args.episodes > 1_000_000:
        raise UserError("--episodes", args.episodes, "must be from 1 to 1000000", 1 if args.episodes < 1 else 1_000_000)
    if not 0 <= args.seed < 2**31:
        raise UserError("--seed", args.seed, "must be from 0 to 2147483647", 0)
    summary = evaluate_run(
        args.run_dir, episodes=args.episodes, seed=args.seed, opponent=args.opponent, precision=args.precision
    ).to_dict()
    if args.json:
        answer(summary)
    else:
        from muzerox.report import print_table

        print_table(f"muzerox evaluate: {args.run_dir}", summary)
    return 0


EVALUATE = Command(
    name="evaluate",
    help="play whole episodes with a trained agent",
    add_arguments=_evaluate_arguments,
    run=_evaluate,
    description="""Plays episodes with search and without exploration, from the newest checkpoint of a run.
In two-player games the agent meets --opponent and moves first in every other game.

Games against another run begin with 2 random moves, so that they differ.

  muzerox evaluate runs/cartpole --episodes 100 --json
  muzerox evaluate runs/new --opponent runs/old --episodes 400""",
)


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--envs", action="store_true", help="list every environment id, and those that cannot be served")
    parser.add_argument("--keys", action="store_true", help="list every configuration key with default, range and meaning")
    add_output_arguments(parser)


def _info(args: argparse.Namespace) -> int:
    from muzerox import info
    from muzerox.report import print_table

    sections = {"muzerox": info.versions(), **(args.machine() if hasattr(args, "machine") else {})}
    if args.envs:
        sections |= info.environments()
    if args.keys:
        sections["configuration keys"] = {path: info.describe(field) for path, field in paths().items()}
    if args.json:
        answer({**sections.pop("muzerox"), **sections})
    else:
        for title, rows in sections.items():
            print_table(title, rows)
    return 0


INFO = Command(
    name="info",
    help="devices, versions, environments and configuration keys",
    add_arguments=_info_arguments,
    run=_info,
    description="Shows what this machine offers and what can be configured.\n\n  muzerox info --keys",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what its encoding has not ends no command
    try:
        code = _run(argv)
        flush()
    except OSError:
        refused = refusal(sys.stdout)
        if refused is None:  # it was not for our output
            raise
        discard(sys.stdout)
        if isinstance(refused, BrokenPipeError):
            return 0  # whoever read our output has seen enough
        tell(f"muzerox: stdout cannot be written: {refused.strerror}")
        return 1
    return code


def _run(argv: Sequence[str] | None) -> int:
    command = "muzerox"
    try:
        args = make_parser().parse_args(argv)
        command = f"muzerox {args.command}"
        # Tracing makes millions of short-lived containers, and imports long-lived ones: look through them less often.
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
        with kept_for_answers() if getattr(args, "json", False) else contextlib.nullcontext():
            return args.run(args)
    except UserError as error:
        tell(f"{command}: {error}")
        return 2
    except RunFailed as error:
        tell(f"{command}: {error}")
        return 1
    except KeyboardInterrupt:  # a training takes the first one itself
        tell(f"{command}: interrupted")
        return 130


def command() -> NoReturn:
    """The installed command: runs a command line and leaves with its exit code."""
    code = main()
    compilation = sys.modules.get("muzerox.compilation")  # not there where nothing was compiled
    if compilation is not None:
        compilation.leave(code)
    sys.exit(code)
