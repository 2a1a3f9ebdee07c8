"""What ``collect.py`` measured, read back: for those who learn from it, and those who judge by it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Data(NamedTuple):
    """A collection."""

    measurements: list[Any]  # of configurations that ran
    tasks: list[str]  # of each
    processes: np.ndarray  # [n] number of the process that each was measured in
    failures: list[Any]  # measurements of those that did not
    repeated: list[list[float]]  # seconds of configurations that were measured again


def at_reference_speed(rows: list[dict[str, Any]]) -> list[float]:
    """What seconds of each row are multiplied by, so that they are as if the machine had been as fast as it was in the median.

    By the square root of the probe: of configurations measured twice, that leaves the least difference.
    """
    probes = [float(np.sqrt(row["probe_seconds"][0] * row["probe_seconds"][1])) for row in rows]
    return [float(np.sqrt(np.median(probes) / probe)) for probe in probes]


def load(folder: Path) -> Data:
    """The rows of every machine in a folder, their seconds at the machine's reference speed.

    Raises SystemExit where there are none, or one cannot be read.
    """
    from predictor import Measurement, SchemaError

    measurements, tasks, processes, failures = [], [], [], []
    seconds: dict[tuple[Any, ...], list[float]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        rows = []
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            try:
                row = json.loads(line)
                rows.append(row | {"measurement": Measurement.from_dict(row["measurement"])})
            except (ValueError, KeyError, TypeError, SchemaError) as error:
                raise SystemExit(f"{file}:{number}: {error}") from None
        for row, factor in zip(rows, at_reference_speed(rows), strict=True):
            measured, key = row["measurement"], (file.name, row["task"], row["index"])
            if measured.seconds_per_env_step is not None:
                measured = dataclasses.replace(measured, seconds_per_env_step=measured.seconds_per_env_step * factor)
                seconds.setdefault((*key, measured.workload.loop_count), []).append(measured.seconds_per_env_step)
            if row["repeat"]:
                continue
            if measured.outcome == "ok":
                measurements.append(measured)
                tasks.append(row["task"])
                processes.append(key)
            else:
                failures.append(measured)
    if not measurements:
        raise SystemExit(f"{folder}: nothing measured; run benchmarks/collect.py --record")
    numbers = {key: number for number, key in enumerate(dict.fromkeys(processes))}
    repeated = [values for values in seconds.values() if len(values) > 1]
    return Data(measurements, tasks, np.array([numbers[key] for key in processes]), failures, repeated)
