"""The folder of a tuning: its start, trials, drifts, tuned.toml, report.html, plot, result. A kill takes nothing of it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from predictor import Measurement, OtherVersion, SchemaError, Store
from tuner import plain
from tuner.bridge import Config, RunDir, UserError, home, load_config, toml, write_atomically
from tuner.disk import kept, saving
from tuner.measuring.drift import Drift

HISTORY = 256  # of the newest measurements made here before: more make a fit slow and no better


_RULES = {
    "id": plain.TEXT,
    "number": plain.COUNT,
    "role": plain.TEXT,
    "changes": plain.TABLE,
    "config": plain.TABLE,
    "measurement": plain.TABLE,
    "predicted_uncalibrated": plain.POSITIVE,
    "predicted_base": plain.POSITIVE,
    "predicted": plain.POSITIVE,
    "predicted_use": plain.NUMBERS,
    "temperature": plain.NUMBER,
    "elapsed": plain.NUMBER,
    "balance": plain.optional(plain.NUMBER),
    "predicted_interval": plain.NUMBERS,
    "expected": plain.optional(plain.POSITIVE),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One measured point of the grid, and what was expected of it before it ran."""

    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    number: int  # from 0, the baseline
    # baseline; annealed, random: how the point was chosen; balanced: the best so far under a corrected allocation;
    # shared: measured in the process of another trial
    role: str
    changes: dict[str, Any]  # to the starting configuration, by path: the point
    config: dict[str, Any]  # complete, allocation included
    measurement: Measurement
    # Seconds an environment step expected by the analytic base before any calibration, by the calibrated base alone, and by the
    # base with the graph network's residual.
    predicted_uncalibrated: float
    predicted_base: float
    predicted: float
    predicted_use: tuple[float, ...]  # cores, bytes of memory, bytes of device memory
    temperature: float  # relative to the first
    elapsed: float  # seconds of tuning when it ended
    balance: float | None = None  # the balance factor, where it ran
    # Between these two seconds nine of ten measurements were expected before it ran; none of a tuning by an earlier version.
    predicted_interval: tuple[float, ...] = ()
    # Seconds expected by all that was known: the predictor, and what the trials before it said beyond that; none of a tuning by
    # an earlier version.
    expected: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Trial:
        """The inverse of :meth:`to_dict`. Raises SchemaError, or ConfigError for its configuration."""
        needed = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(cls)}
        wrong = {name for name, must in needed.items() if must and name not in tree} | (set(tree) - set(needed))
        if wrong:
            raise SchemaError(f"Trial: {', '.join(sorted(wrong))} missing or unknown")
        plain.check("Trial", {"balance": None, "predicted_interval": (), "expected": None, **tree}, _RULES)
        Config.from_dict(tree["config"])  # raises ConfigError
        tuples: dict[str, Any] = {name: tuple(tree[name]) for name in ("predicted_use", "predicted_interval") if name in tree}
        measurement = Measurement.from_dict(tree["measurement"])
        plain.check("Trial.measurement", vars(measurement), {"seconds_per_env_step": plain.optional(plain.POSITIVE)})
        values: dict[str, Any] = {**tree, **tuples, "measurement": measurement}
        return cls(**values)

    @property
    def seconds(self) -> float | None:
        """Measured seconds an environment step; None where it failed."""
        return self.measurement.seconds_per_env_step

    @property
    def foreseen(self) -> float:
        """Seconds an environment step that it was to take, by all that was known or, where that was not kept, the predictor."""
        return self.predicted if self.expected is None else self.expected


class TuneDir:
    """Paths and files of one tuning."""

    def __init__(self, path: str | Path):
        if not str(path):
            raise UserError("directory", "", "must not be empty")
        self.path = Path(path)
        self.start_file = self.path / "start.toml"
        self.tuned_file = self.path / "tuned.toml"
        self.result_file = self.path / "result.json"
        self.drift_file = self.path / "drift.json"
        self.goal_file = self.path / "goal.json"
        self.plot_file = self.path / "tuning.png"
        self.report_file = self.path / "report.html"
        self._trials: Store | None = None

    def check(self) -> None:
        """Raises UserError when the folder holds something else than a tuning, or cannot be written. Writes nothing."""
        with saving("--out", self.path):
            begun, left = self.start_file.exists(), (self.path / "trials").exists()
        if left and not begun:
            raise UserError("--out", str(self.path), "holds trials of a tuning, but no start.toml; give another --out")
        if not begun:
            RunDir(self.path).check_new()

    def create(self, config: Config) -> None:
        """Makes the folder and writes the starting configuration, or checks that it is the one already there.

        Raises:
          UserError: it holds something else, or cannot be written.
        """
        self.check()
        with saving("--out", self.path):
            if self.start_file.exists():
                if load_config(self.start_file) != config:
                    rule = "holds a tuning that started from another configuration; give another --out"
                    raise UserError("--out", str(self.path), rule)
                return
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.start_file, toml(config))

    def lock(self) -> IO[str]:
        """Holds the folder until the file is closed or the process dies.

        Raises:
          UserError: another process does, or it cannot be written or locked.
        """
        with saving("--out", self.path):
            handle = open(self.path / ".lock", "w")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise UserError("--out", str(self.path), "another process is tuning in it") from None
        except OSError as error:  # not every file system has locks
            handle.close()
            raise UserError("--out", str(self.path), f"cannot be locked: {error.strerror}") from None
        return handle

    def _store(self) -> Store:
        if self._trials is None:
            self._trials = Store(self.path / "trials")
        return self._trials

    def trials(self) -> list[Trial]:
        """Every trial so far, in order; of several with a number the last. Raises UserError for a damaged file, or a lost one."""
        where = str(self.path / "trials")
        try:
            by_number = {trial.number: trial for trial in map(Trial.from_dict, self._store().rows())}
        except OtherVersion:
            raise UserError("--out", str(self.path), "holds a tuning by another version; give another --out") from None
        except ValueError as error:  # StoreError and SchemaError are such
            raise UserError(where, None, str(error).removeprefix(f"{where}: ")) from None
        lost = next((number for number in range(len(by_number)) if number not in by_number), None)
        if lost is not None:  # a new one would be counted like one that is there, and take its place
            raise UserError(where, None, f"trial {lost} of {max(by_number) + 1} is missing; give another --out")
        if by_number and by_number[0].role != "baseline":
            raise UserError(where, None, f"trial 0 is {by_number[0].role}, and must be baseline; give another --out")
        return [by_number[number] for number in range(len(by_number))]

    def check_same(self, choices: Mapping[str, Collection[Any]], objective: str) -> None:
        """Raises UserError when its trials moved other knobs than these, to other choices, or it ended with another objective."""
        env = load_config(self.start_file).env
        for trial in self.trials():
            if (other := trial.config.get("env")) != env:
                rule = f"trial {trial.number} is of {other}, not {env}; give another --out"
                raise UserError(str(self.path / "trials"), None, rule)
            if set(trial.changes) != set(choices):
                raise UserError("--out", str(self.path), "holds a tuning with other --knobs; give those, or another --out")
            for path, value in trial.changes.items():
                if value not in choices[path]:  # of another version or machine, or more cores than may be had now
                    rule = f"holds a trial with {path} = {value}, which is no choice here and now; give another --out"
                    raise UserError("--out", str(self.path), rule)
        ended = self.result() or {}
        if (other := ended.get("objective", objective)) != objective:
            rule = f"holds a tuning with --objective {other}, not {objective}; give that, or another --out"
            raise UserError("--out", str(self.path), rule)

    def keep_goal(self, terms: Mapping[str, str | float]) -> None:
        """Writes what is minimised, by the options that say so; raises UserError when it is not what the folder's tuning did.

        Of an earlier version's tuning, which does not say, it is taken to be.
        """
        before = _kept_object(self.goal_file, "is no goal; delete it to go on with the one that is given")
        if before is None:
            with saving("--out", self.path):
                write_atomically(self.goal_file, json.dumps(dict(terms)) + "\n")
            return
        for option in terms:
            if before.get(option) != terms[option]:
                rule = f"holds a tuning with {option} {before.get(option)}, not {terms[option]}; give that, or another --out"
                raise UserError("--out", str(self.path), rule)

    def append(self, trial: Trial) -> None:
        """Keeps a trial; when this returns it is on disk. Raises UserError when it cannot be."""
        with saving("--out", self.path):
            self._store().append(trial.to_dict())

    def result(self) -> dict[str, Any] | None:
        """What ``save_result`` wrote; None before. Raises UserError when it is damaged."""
        return _kept_object(self.result_file, "is not a result; delete it to compare again")

    def ended_after(self) -> float:
        """Seconds after which the tuning ended last; 0 where it never did. Raises UserError as :meth:`result` does."""
        seconds = (self.result() or {}).get("seconds")
        return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else 0.0

    def drifts(self) -> list[Drift]:
        """What is known of precision levels, in the order it was found. Raises UserError for a damaged file."""
        text = kept(self.drift_file)
        if text is None:
            return []
        try:
            return [Drift.from_dict(tree) for tree in json.loads(text)]
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(str(self.drift_file), None, f"is no list of drifts ({error}); delete it to measure again") from None

    def save_drifts(self, drifts: Sequence[Drift]) -> None:
        """Writes ``drift.json``, whole or not at all."""
        with saving("--out", self.path):
            write_atomically(self.drift_file, json.dumps([drift.to_dict() for drift in drifts], indent=1) + "\n")

    def save_tuned(self, config: Config) -> None:
        """Writes ``tuned.toml``, whole or not at all."""
        with saving("--out", self.path):
            write_atomically(self.tuned_file, toml(config))

    def save_result(self, result: dict[str, Any]) -> None:
        """Writes ``result.json``, whole or not at all; a report of what was before it is gone."""
        with saving("--out", self.path):
            self.report_file.unlink(missing_ok=True)
            write_atomically(self.result_file, json.dumps(result, indent=1) + "\n")


def _kept_object(file: Path, otherwise: str) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file. Raises UserError, whose rule is ``otherwise``, if it holds none."""
    text = kept(file)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(str(file), None, otherwise)
    return found


def shared_store(hardware_id: str) -> Store:
    """What every tuning and measuring on this kind of machine adds to, and predictions learn from. Raises UserError."""
    with saving("MUZEROX_HOME", home()):
        return Store(home() / "measurements" / hardware_id)


def share(measurement: Measurement, store: Store) -> None:
    """Adds to what :func:`shared_store` gave. Raises UserError when it cannot be written."""
    with saving("MUZEROX_HOME", home()):
        store.append(measurement.to_dict())


def shared_measurements(hardware_id: str, say: Callable[[str], None]) -> list[Measurement]:
    """Every measurement of this kind of machine; others, and those of other versions, are left out, and ``say`` is told so.

    Raises:
      UserError: a store that is damaged or may not be read.
    """
    folder = home() / "measurements" / hardware_id
    try:
        if not folder.exists():
            return []
    except OSError as error:
        raise UserError("MUZEROX_HOME", str(home()), f"cannot be read: {error.strerror}") from None
    found, others = [], 0
    try:
        for row in Store(folder).rows():
            try:
                found.append(Measurement.from_dict(row))
            except OtherVersion:
                others += 1
    except ValueError as error:
        raise UserError(str(folder), None, f"{error}; move it away to start with an empty history") from None
    if others:
        say(f"{others} measurements in {folder} are another version's and are left out")
    here = [measurement for measurement in found if measurement.hardware.id == hardware_id]
    if len(here) < len(found):
        say(f"{len(found) - len(here)} measurements in {folder} are another machine's and are left out")
    return here
