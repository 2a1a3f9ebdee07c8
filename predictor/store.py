"""Measured runs on disk: append-only lines of JSON, one writer a file, whole after any kill.

A line that :meth:`Store.append` returned for is on disk. A writer that was killed leaves at most one torn line, the last
of its file, which readers leave out; any other line that cannot be read is an error, not a repair.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class StoreError(ValueError):
    """A store that cannot be read or written; ``str(error)`` is one line."""


class Store:
    """Rows, which are dictionaries JSON can hold, in the files of a directory.

    Raises:
      StoreError: ``directory`` is not one, or cannot be made.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        self._file: int | None = None
        self._last = 0.0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self.directory}: {error.strerror}") from error

    def append(self, row: dict[str, Any]) -> None:
        """Writes a row and returns when it is on disk. Raises StoreError."""
        # Times order the rows of all files; those of one writer never go back.
        self._last = max(time.time(), self._last)
        try:
            line = json.dumps({"time": self._last, "row": row}, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise StoreError(f"{self.directory}: a row that JSON cannot hold: {error}") from error
        try:
            if self._file is None:
                self._file = self._open()
            _write(self._file, line)
        except OSError as error:
            # What was written of the line stays the torn last line of its file: the next row starts another.
            self.close()
            raise StoreError(f"{self.directory}: {error.strerror}") from error

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all writers, oldest first. Raises StoreError with path and line number of one that is corrupt."""
        try:
            names = sorted(os.listdir(self.directory))  # not glob, to which a folder that may not be listed is an empty one
            paths = [self.directory / name for name in names if name.endswith(".jsonl")]
            texts = [path.read_bytes() for path in paths]
        except OSError as error:
            raise StoreError(f"{error.filename}: {error.strerror}") from error
        entries = [entry for path, text in zip(paths, texts, strict=True) for entry in _parse(path, text)]
        return [row for _, row in sorted(entries, key=lambda entry: entry[0])]

    def close(self) -> None:
        """Lets go of the writer's file; a later row starts another."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        """A new file of this writer's own, its name on disk too."""
        name = f"{time.time_ns()}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        file = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        folder = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return file


def _write(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]
    os.fsync(file)


def _parse(path: Path, text: bytes) -> Iterable[tuple[float, dict[str, Any]]]:
    """Times and rows of a file; what follows the last newline was torn off."""
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            time, row = float(entry["time"]), dict(entry["row"])
            if not math.isfinite(time):
                raise ValueError("no time")
            yield time, row
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise StoreError(f"{path}:{number}: not a row: {line[:80]!r}") from error
