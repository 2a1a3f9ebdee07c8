"""Runs whose checkpoints are damaged, do not fit or are trained by another process: one line that says what to do."""

from __future__ import annotations

import errno
import fcntl
import shutil
import sys
from pathlib import Path

import pytest
from refusals import INSTALLED, call, check, run, snapshot

from muzerox.errors import UserError
from muzerox.run_dir import RunDir

# What is done to a checkpoint, whose files are damaged (an item's folder and a pattern), and what is said.
DAMAGE = {
    "cut short": ("*/d/*", b"", "is corrupt"),
    "garbage": ("*/d/*", b"garbage", "is corrupt"),
    "manifest": ("*/manifest.ocdbt", b"x" * 64, "is corrupt"),
    "everything": ("**/*", b"garbage", "is corrupt"),
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def copy(world: Path, finished_run: Path) -> Path:
    return Path(shutil.copytree(finished_run, world / "copy"))


def damage(copy: Path, kind: str) -> None:
    pattern, content, _ = DAMAGE[kind]
    files = [p for p in copy.glob(f"checkpoints/*/{pattern}") if p.is_file()]
    assert files
    for file in files:
        file.write_bytes(content)


@pytest.mark.parametrize("kind", DAMAGE)
def test_evaluate_a_damaged_checkpoint(kind: str, copy: Path, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(copy, kind)
    before = snapshot(world)
    check(*call("evaluate {T}/copy --episodes 2", world, capsys), ["{T}/copy/checkpoints/", "/agent", DAMAGE[kind][2]], world)
    assert snapshot(world) == before


@pytest.mark.parametrize("kind", ["cut short", "everything"])
def test_resume_a_damaged_checkpoint(kind: str, copy: Path, world: Path) -> None:
    """In a process of its own: the threads that read must stay silent to its very end."""
    damage(copy, kind)
    before = snapshot(world)
    command = [INSTALLED, "train", "--resume", "copy", "--set", "train.max_env_steps=900"]
    check(*run(world, *command), ["/copy/checkpoints/", "/state", DAMAGE[kind][2]], world)
    assert snapshot(world) == before  # config.toml and result.json too


@pytest.mark.parametrize(
    ("options", "needles"),
    [
        (f"--opponent {'x' * 300}", ["--opponent = 'xxx", "must be one of", "or the directory of a run"]),
        ("--episodes 1000000", ["search.num_simulations = 10000", "1000000 roots of 2 actions", "nearest valid: 1072"]),
    ],
    ids=["long opponent", "large trees"],
)
def test_evaluate_a_run_of_large_searches(
    options: str, needles: list[str], copy: Path, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copy / "config.toml"
    file.write_text(file.read_text().replace("num_simulations = 2\n", "num_simulations = 10000\n"))
    check(*call(f"evaluate {{T}}/copy {options}", world, capsys), needles, world)


# What orbax leaves behind when a read fails among many, without the race that decides whether it shows.
LATE_READS = """
import asyncio, sys
from muzerox.checkpoint import _late_reads_silenced

async def read(error):
    raise error

def drop_what_failed(error):
    loop = asyncio.new_event_loop()
    task = loop.create_task(read(error))
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    waited_for = loop.create_future()
    waited_for.set_exception(error)
    del task, waited_for
    loop.close()

try:
    with _late_reads_silenced():
        pass
    if sys.argv[1] == "failed":
        with _late_reads_silenced():
            raise ValueError
except ValueError:
    pass
drop_what_failed(ValueError("bytes out of range"))
"""


@pytest.mark.parametrize(("ended", "lines"), [("failed", 0), ("well", 1)])
def test_a_read_that_nobody_waits_for_is_silent_only_after_a_failure(ended: str, lines: int, world: Path) -> None:
    _, _, stderr = run(world, sys.executable, "-c", LATE_READS, ended)
    assert stderr.count("Task exception was never retrieved") == lines, stderr
    assert stderr.count("Future exception was never retrieved") == lines, stderr


def test_missing_item_names_the_step_to_go_back_to(copy: Path, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = max(int(p.name) for p in (copy / "checkpoints").iterdir())
    (copy / "checkpoints" / "99999").mkdir()
    needles = ["{T}/copy/checkpoints/99999/agent", "is corrupt", "delete the folder", f"to go on from step {step}"]
    check(*call("evaluate {T}/copy", world, capsys), needles, world)


@pytest.mark.parametrize("line", ["evaluate {T}/copy", "train --resume {T}/copy --set train.max_env_steps=900"])
def test_checkpoint_of_another_network(line: str, copy: Path, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "config.toml"
    file.write_text(file.read_text().replace("width = 8", "width = 4"))
    before = snapshot(world)
    needles = ["{T}/copy/checkpoints/", "does not fit this configuration", "float32[2, 8]", "float32[2, 4]"]
    check(*call(line, world, capsys), needles, world)
    assert snapshot(world) == before


def test_a_run_that_another_process_trains(copy: Path, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(world)
    with open(copy / ".lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        line = "train --resume {T}/copy --set train.max_env_steps=900"
        check(*call(line, world, capsys), ["run = '{T}/copy'", "another process is training it"], world)
    assert snapshot(world) == before


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"^run = .*: cannot be locked: No locks available$"):
        RunDir(tmp_path).lock()
