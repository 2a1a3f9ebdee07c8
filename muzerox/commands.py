"""Subcommands as records, found through the entry-point group ``muzerox.commands``.

A distribution adds a subcommand by an entry point that names a :class:`Command`, and options to an existing one by an
entry point that names an :class:`Extension`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
from collections.abc import Callable
from typing import Any, NoReturn

from muzerox.errors import nearest_name
from muzerox.streams import flush, tell

GROUP = "muzerox.commands"
Run = Callable[[argparse.Namespace], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand. ``run(args)`` returns the exit code; results go to stdout, everything else to stderr.

    Under ``--json`` what ``run`` gives to :func:`muzerox.streams.answer` is all that reaches stdout.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
    """Options for another command. ``wrap(run)`` returns the function to run instead; it may call ``run``."""

    extends: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    wrap: Callable[[Run], Run]


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and name the nearest valid choice."""

    def error(self, message: str) -> None:  # type: ignore[override]
        """Exits with 2 after one line on stderr."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and "invalid choice" in message:
                value = message.partition("invalid choice: ")[2].rpartition(" (choose from")[0]
                message = f"command = {value}: no such command; nearest valid: {nearest_name(value, action.choices)}"
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exits once what was printed, such as help, is written. Raises OSError where it cannot be."""
        flush()
        super().exit(status, message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but what is left over is an error here, where the options of the command are known."""
        found, rest = super().parse_known_args(args, namespace)
        if rest and rest[0].startswith("-"):
            option = rest[0].partition("=")[0]
            self.error(f"{option}: no such option; nearest valid: {nearest_name(option, self._option_string_actions)}")
        elif rest:
            self.error(f"{rest[0]!r}: unexpected argument")
        return found, rest


def load() -> dict[str, Command]:
    """Every command by name, extensions applied. What cannot be used is left out with one line on stderr."""
    commands: dict[str, Command] = {}
    extensions: list[tuple[importlib.metadata.EntryPoint, Extension]] = []
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            item = point.load()
        except Exception as error:  # another distribution's import may raise anything, and must not take ours along
            _warn(point, f"{type(error).__name__}: {error}")
            continue
        if isinstance(item, Command):
            commands[item.name] = item
        elif isinstance(item, Extension):
            extensions.append((point, item))
        else:
            _warn(point, "neither a Command nor an Extension")
    for point, extension in extensions:
        if extension.extends in commands:
            commands[extension.extends] = _extend(commands[extension.extends], extension)
        else:
            _warn(
                point,
                f"extends {extension.extends}, which is not there; nearest valid: {nearest_name(extension.extends, commands)}",
            )
    return dict(sorted(commands.items(), key=lambda pair: pair[0]))


def _warn(point: importlib.metadata.EntryPoint, why: str) -> None:
    owner = f" of {point.dist.name}" if point.dist else ""
    tell(f"muzerox: left out {point.name} = {point.value}{owner}: {' '.join(why.split())}")


def _extend(command: Command, extension: Extension) -> Command:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        command.add_arguments(parser)
        extension.add_arguments(parser)

    return dataclasses.replace(command, add_arguments=add_arguments, run=extension.wrap(command.run))


def make_parser() -> Parser:
    """The ``muzerox`` parser with every command; the chosen one's ``run`` is in the namespace."""
    parser = Parser(
        prog="muzerox",
        description="MuZero in JAX. Train an agent, look at it, use it.",
        epilog="example: muzerox train --env gymnax:CartPole-v1 --out runs/cartpole",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in load().values():
        sub = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser
