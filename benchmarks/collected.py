"""What ``collect.py`` measured, read back: for those who learn from it, and those who judge by it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Data(NamedTuple):
    """A collection."""

    measurements: list[Any]  # of configurations that ran; their seconds are means over the times they did
    tasks: list[str]  # of each
    processes: np.ndarray  # [n] number of the process that each was measured in
    failures: list[Any]  # measurements of those that did not
    repeated: list[list[float]]  # seconds of each configuration that was measured again, oldest first


def at_reference_speed(rows: list[dict[str, Any]]) -> list[float]:
    """What seconds of each row are multiplied by, so that they are as if the machine had been as fast as it was in the median.

    By the square root of the probe: of configurations measured twice, that leaves the least difference.
    """
    probes = [float(np.sqrt(row["probe_seconds"][0] * row["probe_seconds"][1])) for row in rows]
    return [float(np.sqrt(np.median(probes) / probe)) for probe in probes]


def load(folder: Path, machine: str = "*") -> Data:
    """The rows of every machine in a folder, or of the one with that identifier, their seconds at its reference speed.

    A configuration that was measured more than once has the geometric mean of its seconds; whether it ran is what the first time
    says. Raises SystemExit where there are none, or one cannot be read.
    """
    from predictor import Measurement, SchemaError

    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    seconds: dict[tuple[Any, ...], list[float]] = {}
    failures = []
    for file in sorted(folder.glob(f"{machine}.jsonl")):
        rows = []
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            try:
                row = json.loads(line)
                rows.append(row | {"measurement": Measurement.from_dict(row["measurement"])})
            except (ValueError, KeyError, TypeError, SchemaError) as error:
                raise SystemExit(f"{file}:{number}: {error}") from None
        for row, factor in zip(rows, at_reference_speed(rows), strict=True):
            measured = row["measurement"]
            key = (file.name, row["task"], row["index"], measured.workload.loop_count)
            if row["repeat"] == 0 and measured.outcome == "ok":
                first[key] = row
            elif row["repeat"] == 0:
                failures.append(measured)
            if measured.outcome == "ok":
                seconds.setdefault(key, []).append(measured.seconds_per_env_step * factor)
    if not first:
        raise SystemExit(f"{folder}: nothing measured; run benchmarks/collect.py --record")
    mean = {key: float(np.exp(np.mean(np.log(values)))) for key, values in seconds.items()}
    measurements = [dataclasses.replace(row["measurement"], seconds_per_env_step=mean[key]) for key, row in first.items()]
    numbers = {process: number for number, process in enumerate(dict.fromkeys(key[:3] for key in first))}
    processes = np.array([numbers[key[:3]] for key in first])
    repeated = [seconds[key] for key in first if len(seconds[key]) > 1]
    return Data(measurements, [row["task"] for row in first.values()], processes, failures, repeated)
