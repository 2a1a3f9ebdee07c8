"""The folder of a run: config.toml, metrics.jsonl, result.json, return_curve.png, tensorboard/, checkpoints/."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import IO, Any

from muzerox import config_io
from muzerox.config import Config
from muzerox.errors import CheckpointError, UserError


class RunDir:
    """Paths and small files of one run."""

    def __init__(self, path: str | Path):
        if not str(path):
            raise UserError("directory", "", "must not be empty")
        self.path = Path(path)
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.result_file = self.path / "result.json"
        self.curve_file = self.path / "return_curve.png"
        self.live_file = self.path / "live.json"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"

    @staticmethod
    def default(config: Config) -> RunDir:
        """``runs/<environment>-seed<seed>-<time>`` under the working directory."""
        name = config.env.partition(":")[2].replace("/", "_")
        return RunDir(Path("runs") / f"{name}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}")

    def check_new(self) -> None:
        """Raises UserError when the folder cannot hold a new run; writes nothing."""
        try:
            if self.config_file.exists():
                raise UserError("--out", str(self.path), f"already holds a run; continue it with --resume {self.path}")
            if self.path.exists() and (not self.path.is_dir() or any(not _is_unfinished(file) for file in self.path.iterdir())):
                raise UserError("--out", str(self.path), "exists and is not an empty directory")
            parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
            if not parent.is_dir():
                raise UserError("--out", str(self.path), f"cannot be written: {parent} is not a directory")
            if not os.access(parent, os.W_OK | os.X_OK):
                raise UserError("--out", str(self.path), f"cannot be written: no permission to write in {parent}")
        except OSError as error:
            raise UserError("--out", str(self.path), f"cannot be written: {error.strerror}") from None

    def create(self, config: Config) -> None:
        """Makes the folder and writes ``config.toml``. Raises UserError when it cannot."""
        self.check_new()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.config_file, config_io.dumps(config))
        except OSError as error:
            raise UserError("--out", str(self.path), f"cannot be written: {error.strerror}") from None

    def load_config(self) -> Config:
        """The run's configuration. Raises CheckpointError when this is not a run."""
        try:
            found, exists = self.config_file.is_file(), self.path.exists()
        except OSError as error:
            raise CheckpointError(str(self.path), None, f"cannot be read: {error.strerror}") from None
        if not found:
            what = "is not a run: it has no config.toml" if exists else "no such directory"
            raise CheckpointError(str(self.path), None, what)
        return config_io.load(self.config_file)

    def lock(self) -> IO[str]:
        """Holds the run for this process until the file is closed or the process dies. Raises UserError when it cannot."""
        try:
            handle = open(self.path / ".lock", "w")
        except OSError as error:
            raise UserError("run", str(self.path), f"cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise UserError("run", str(self.path), "another process is training it") from None
        except OSError as error:  # not every file system has locks
            handle.close()
            raise UserError("run", str(self.path), f"cannot be locked: {error.strerror}") from None
        return handle

    def result(self) -> dict[str, Any] | None:
        """What a finished run reported; None while it has not finished."""
        try:
            result = json.loads(self.result_file.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(str(self.result_file), None, f"cannot be read: {error.strerror}") from None
        except ValueError:
            result = None
        if not isinstance(result, dict):
            raise CheckpointError(str(self.result_file), None, "is not a JSON object; delete it to resume the run")
        return result

    def last_saved(self) -> int:
        """Updates of the newest checkpoint; 0 where there is none."""
        if not self.checkpoints.is_dir():
            return 0
        return max((int(path.name) for path in self.checkpoints.iterdir() if path.name.isdigit()), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl; a last line cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for line in self.metrics_file.read_text("utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                rows.append({**row, "updates": int(row["updates"])})
            except (ValueError, TypeError, KeyError):
                break
        return rows

    def last_evaluated(self) -> int:
        """Updates of the newest evaluation; 0 where there is none."""
        return max((row["updates"] for row in self.metrics() if row.get("kind") == "evaluation"), default=0)

    def rewind_metrics(self, updates: int) -> None:
        """Drops rows after ``updates``: a resumed run writes them again."""
        kept = [json.dumps(row) for row in self.metrics() if row["updates"] <= updates]
        write_atomically(self.metrics_file, "".join(line + "\n" for line in kept))


def _is_unfinished(path: Path) -> bool:
    """Whether it is what a process that was killed left of a file that it wrote."""
    return re.fullmatch(r"\..+\.\d+", path.name) is not None


def write_atomically(path: Path, text: str) -> None:
    """Writes the whole file or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
