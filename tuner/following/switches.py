"""The changes of configuration that a run was given while it trained: ``switches.jsonl`` in its folder, a row for each."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from tuner.bridge import RunDir, UserError

ON_TRIAL = "on trial"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """A change of configuration. It is written when it is made, and again, under its number, when it is judged."""

    number: int  # from 0, in the run
    time: float = dataclasses.field(default_factory=time.time)  # seconds since 1970, when the row was written
    env_steps: int
    kind: str  # of the reason: a stage, speed, prediction or return
    reason: str
    how: str  # restart, or live
    before: dict[str, Any]  # what was changed, by path
    after: dict[str, Any]
    expected_gain: float  # times faster, as predicted
    measured_gain: float | None = None  # steps/s after over before; absent while it is on trial, and where it failed
    cost_seconds: float | None = None  # from the request to the first report in the new configuration
    # Then kept, undone (by whoever goes on with the run, where whoever tried it was killed), left (it gains nothing, but going
    # back would cost more, or the training ended on the way), failed, or cut short.
    verdict: str = ON_TRIAL


def _file(run: RunDir) -> Path:
    return run.path / "switches.jsonl"


def append(run: RunDir, switch: Switch) -> None:
    """Keeps a row; when this returns it is on disk."""
    with open(_file(run), "a+b") as file:
        file.seek(max(0, file.tell() - 1))
        torn = file.read(1) not in (b"", b"\n")  # a kill cut the last row short: this one begins on a line of its own
        file.write((b"\n" if torn else b"") + json.dumps(dataclasses.asdict(switch)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def load(run: RunDir) -> list[Switch]:
    """The switches of a run by number, each as it was last written; a line cut short by a kill is left out.

    Raises:
      UserError: a whole row that is no switch.
    """
    if not _file(run).exists():
        return []
    found: dict[int, Switch] = {}
    for line in _file(run).read_text("utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut short, or the end
        try:
            switch = Switch(**row)
        except TypeError:
            raise UserError(str(_file(run)), line[:40], "is not a switch of this version; move the file away") from None
        found[switch.number] = switch
    return [found[number] for number in sorted(found)]
