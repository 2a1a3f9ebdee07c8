"""Commands, and options of ours, that other distributions bring (``muzerox/commands.py``)."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from muzerox.cli import main
from muzerox.commands import load
from muzerox.config import Config
from muzerox.report import Reporter
from muzerox.run_dir import RunDir
from muzerox.streams import tell

OTHER = """
import ctypes, os, signal, subprocess

from muzerox.cli import add_output_arguments
from muzerox.commands import Command, Extension
from muzerox.report import print_table
from muzerox.streams import answer

def _greet(args):
    print(f"hello {args.who}")
    return 5

INTERRUPT = Command(
    name="interrupt", help="stops", description="Stops.", add_arguments=lambda p: None,
    run=lambda args: signal.default_int_handler(signal.SIGINT, None),  # what Python does at Ctrl-C
)
GREET = Command(
    name="greet", help="greets", description="Greets.", add_arguments=lambda p: p.add_argument("--who", default="you"), run=_greet
)

def _show(args):
    print_table("long", {"a": "b" * 100_000})
    return 5

def _lose(args):
    raise BrokenPipeError(32, "a worker has ended")

def _chatter(args):
    print("from Python")
    os.write(1, b"from the system\\n")
    ctypes.CDLL(None).puts(b"from C")  # which holds it until the process ends, or longer than we do
    subprocess.run(["echo", "from another process"], check=True)
    answer({"said": "enough"})
    print("and more")
    return 0

CHATTER = Command(name="chatter", help="prints", description="Prints.", add_arguments=add_output_arguments, run=_chatter)
SHOW = Command(name="show", help="shows", description="Shows.", add_arguments=lambda p: None, run=_show)
LOSE = Command(name="lose", help="loses", description="Loses.", add_arguments=lambda p: None, run=_lose)

def _wrap(run):
    def wrapped(args):
        if args.before:
            print("before")
        return run(args) + (1 if args.before else 0)
    return wrapped

POLITE = Extension(extends="greet", add_arguments=lambda p: p.add_argument("--before", action="store_true"), wrap=_wrap)
LOUD = Extension(extends="info", add_arguments=lambda p: p.add_argument("--before", action="store_true"), wrap=_wrap)
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with a command and two extensions, one of which extends the first's own command."""
    (tmp_path / "other_commands.py").write_text(OTHER)
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    entries = "".join(
        f"{n.lower()} = other_commands:{n}\n" for n in ("GREET", "INTERRUPT", "SHOW", "LOSE", "CHATTER", "POLITE", "LOUD")
    )
    (info / "entry_points.txt").write_text(f"[muzerox.commands]\n{entries}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_commands", raising=False)


def test_entry_points_of_this_distribution() -> None:
    assert set(load()) >= {"train", "evaluate", "info"}
    assert "greet" not in load()


@pytest.mark.usefixtures("other")
def test_command_and_extension_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert "greet" in load()
    assert main(["greet", "--who", "world"]) == 5
    assert capsys.readouterr().out == "hello world\n"
    assert main(["greet", "--before"]) == 6
    assert capsys.readouterr().out == "before\nhello you\n"
    assert main(["info", "--json", "--before"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out), "one object on stdout and nothing else"
    assert printed.err.startswith("before\n")
    assert main(["info", "--json"]) == 0  # its own options are untouched
    json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("other")
def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["interrupt"]) == 130
    assert capsys.readouterr().err == "muzerox interrupt: interrupted\n"


def test_an_interrupt_before_a_command_is_known_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muzerox.cli.make_parser", lambda: signal.default_int_handler(signal.SIGINT, None))
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "muzerox: interrupted\n"


CHATTER = [sys.executable, "-c", "from muzerox.cli import command; command()", "chatter", "--json"]


@pytest.mark.usefixtures("other")
def test_what_simulators_print_is_not_on_stdout_beside_an_answer(tmp_path: Path) -> None:
    done = subprocess.run(CHATTER, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, '{"said": "enough"}\n')
    assert sorted(done.stderr.splitlines()) == ["and more", "from C", "from Python", "from another process", "from the system"]


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize(
    ("ending", "said", "code"), [(">/dev/full", "No space left on device", 1), ("| true", "", 0), (">&-", "", 0)]
)
def test_an_answer_that_cannot_be_written_is_one_line(ending: str, said: str, code: int, tmp_path: Path) -> None:
    shell = f"set -o pipefail; {shlex.join(CHATTER)} {ending}"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert "enough" not in done.stderr, "an answer is for stdout"


@pytest.fixture
def unread() -> Iterator[IO[str]]:
    """What nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        yield stream


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("command", [["greet"], ["greet", "--who", "x" * 100_000], ["show"]], ids=" ".join)
def test_who_has_read_enough_fails_nothing(command: list[str], unread: IO[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", unread)
    assert main(command) in (0, 5)
    unread.flush()  # as Python does at its end


@pytest.mark.usefixtures("other")
def test_a_pipe_of_something_else_that_breaks_is_a_failure() -> None:
    with pytest.raises(BrokenPipeError):
        main(["lose"])


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("command", [["greet"], ["show"], ["train", "--help"]], ids=" ".join)
def test_a_full_disk_is_one_line(command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(command) == 1
        full.flush()
    assert capsys.readouterr().err == "muzerox: stdout cannot be written: No space left on device\n"


@pytest.mark.usefixtures("other")
def test_what_a_terminal_cannot_show_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["greet", "--who", "Zoë…"]) == 5
    assert shown.getvalue() == b"hello Zo??\n"


def test_progress_that_nobody_reads_ends_no_work(unread: IO[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", unread)
    with Reporter(RunDir(tmp_path), Config(), quiet=False, start=0) as reporter:
        reporter.say("a line")
        tell("another")
        assert reporter._console.quiet, "who reads it has left"
        reporter.say("and another")


@pytest.mark.usefixtures("other")
def test_what_cannot_be_used_of_another_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other-1.0.dist-info" / "entry_points.txt").write_text(
        "[muzerox.commands]\ngreet = other_commands:GREET\nbroken = other_commands:MISSING\nabsent = no_such_module_at_all:X\n"
        "function = other_commands:_greet\nlost = other_commands:LOST\n"
    )
    with (tmp_path / "other_commands.py").open("a") as file:
        file.write("LOST = Extension(extends='trian', add_arguments=lambda p: None, wrap=_wrap)\n")
    assert main(["greet"]) == 5  # the rest still works
    captured = capsys.readouterr()
    assert captured.out == "hello you\n"
    lines = captured.err.splitlines()
    assert len(lines) == 4
    for name, why in (
        ("broken", "MISSING"), ("absent", "no_such_module_at_all"), ("function", "neither"), ("lost", "nearest valid: train"),
    ):  # fmt: skip
        assert any(f"left out {name} = " in line and " of other: " in line and why in line for line in lines), lines
