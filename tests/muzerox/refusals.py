"""Commands that refuse what they are given: one line on stderr, exit code 2, nothing on stdout, nothing written."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from muzerox.cli import main

INSTALLED = str(Path(sys.executable).parent / "muzerox")


def snapshot(directory: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None for p in directory.rglob("*")}


def check(code: object, out: str, err: str, needles: list[str], world: Path) -> None:
    assert code == 2, err
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert err.startswith("muzerox")
    assert "Traceback" not in err
    for needle in needles:
        assert needle.replace("{T}", str(world)) in err


def call(line: str, world: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    """A command line in this process: exit code, stdout, stderr."""
    try:
        code: object = main(shlex.split(line.replace("{T}", str(world))))
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run(world: Path, *command: str) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=world, timeout=300)
    return done.returncode, done.stdout, done.stderr
