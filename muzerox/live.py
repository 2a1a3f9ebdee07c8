"""Knobs that a training takes while it runs: ``live.json`` in its folder asks for them, and goes once they are taken."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from muzerox import allocation, config_io
from muzerox.config import Config
from muzerox.errors import ConfigError
from muzerox.run_dir import RunDir, write_atomically


def can_change(config: Config, path: str) -> bool:
    """Whether a training of ``config`` (its runtime resolved) takes another value at ``path`` without a restart."""
    return path == "allocation.cores" or (path == "runtime.loop_count" and config.runtime.kind == "anakin")


def ask(run: RunDir, changes: dict[str, Any]) -> None:
    """Asks the training in ``run``, whoever runs it, for changes by dotted path. It takes them between two dispatches."""
    write_atomically(run.live_file, json.dumps(changes) + "\n")


class LiveKnobs:
    """The side of the training. Make it under the allocation: it has no more cores to give than it has then."""

    def __init__(self, run: RunDir, config: Config):
        self._run, self._config, self._cores = run, config, allocation.available_cores()
        self._told = ""  # of a request that can be neither read nor deleted: one line is enough
        with contextlib.suppress(OSError):  # the first poll tells of it
            run.live_file.unlink(missing_ok=True)  # what a process that has ended was asked for

    def poll(self) -> Config | None:
        """The configuration with what was asked for, applied and kept in the run's config.toml; None where nothing was.

        Raises:
          ConfigError: it was asked for what it cannot take; it goes on as it was, and the request is gone.
        """
        file: Path = self._run.live_file
        try:
            text = file.read_bytes()
            file.unlink(missing_ok=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            told, self._told = self._told, f"cannot be taken: {error.strerror}"
            if told == self._told:
                return None
            raise ConfigError(str(file), None, self._told) from None
        try:
            changes = json.loads(text)
        except ValueError:
            changes = None
        if not isinstance(changes, dict):
            raise ConfigError(str(file), text[:40].decode(errors="replace"), "must be an object of values by path")
        for path in changes:
            if not can_change(self._config, path):
                raise ConfigError(path, changes[path], "cannot change while this training runs; resume it with --set")
        config = self._config.replace(changes)
        given = self._given(config.allocation.cores) if "allocation.cores" in changes else None
        try:
            write_atomically(self._run.config_file, config_io.dumps(config))
        except OSError as error:
            raise ConfigError(str(self._run.config_file), None, f"cannot be written: {error.strerror}") from None
        if given is not None:
            allocation.keep_to(given)
        self._config = config
        return config

    def _given(self, cores: int | None) -> list[int]:
        wanted = len(self._cores) if cores is None else cores
        if wanted > len(self._cores):
            raise ConfigError("allocation.cores", wanted, "this training was started with fewer", len(self._cores))
        return self._cores[:wanted]
