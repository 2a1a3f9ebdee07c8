"""Knobs that a training takes while it runs: ``live.json`` in its folder asks for them, and goes once they are taken."""

from __future__ import annotations

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
        run.live_file.unlink(missing_ok=True)  # what a process that has ended was asked for

    def poll(self) -> Config | None:
        """The configuration with what was asked for, applied and kept in the run's config.toml; None where nothing was.

        Raises:
          ConfigError: it was asked for what it cannot take; it goes on as it was, and the request is gone.
        """
        file: Path = self._run.live_file
        try:
            text = file.read_text("utf-8")
        except FileNotFoundError:
            return None
        file.unlink(missing_ok=True)
        try:
            changes = json.loads(text)
        except ValueError:
            changes = None
        if not isinstance(changes, dict):
            raise ConfigError(str(file), text[:40], "must be an object of values by path")
        for path in changes:
            if not can_change(self._config, path):
                raise ConfigError(path, changes[path], "cannot change while this training runs; resume it with --set")
        config = self._config.replace(changes)
        if "allocation.cores" in changes:
            self._keep_to(config.allocation.cores)
        self._config = config
        write_atomically(self._run.config_file, config_io.dumps(config))
        return config

    def _keep_to(self, cores: int | None) -> None:
        wanted = len(self._cores) if cores is None else cores
        if wanted > len(self._cores):
            raise ConfigError("allocation.cores", wanted, "this training was started with fewer", len(self._cores))
        allocation.keep_to(self._cores[:wanted])
