"""What processes use of the machine, by /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muzerox import usage

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux")

# A name that is cut within a letter is no text; one may look like the end of the field that it is in.
NAMES = (b"m\xc3", b") R 1 1 1")
BUSY = """
import sys, time
open("/proc/self/comm", "wb").write(bytes.fromhex(sys.argv[1]))
held = bytearray(64 * 2**20)
while time.process_time() < 0.2: pass
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=NAMES, ids=["no text", "parenthesis"])
def child(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process of such a name, which has taken 0.2 s of a processor and holds 64 MiB."""
    command = [sys.executable, "-c", BUSY, request.param.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.communicate()


def test_a_process_may_have_any_name(child: int) -> None:
    assert child in usage.descendants()
    assert usage.descendants_cpu_seconds() >= 0.2 - 2.0 / os.sysconf("SC_CLK_TCK")
    assert usage.peak_bytes() >= 64 * 2**20 + usage._peak(os.getpid())


def test_processes_of_others_are_not_counted(child: int) -> None:
    found = usage.descendants()
    assert child in found
    assert not {1, os.getppid(), os.getpid()} & set(found)
