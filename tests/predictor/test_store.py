"""Nothing acknowledged is lost, nothing corrupt is read in silence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor import Hardware, Measurement, OtherVersion, Outcome, SchemaError, Store, StoreError, Workload
from predictor.schema import SCHEMA

ROWS = st.lists(
    st.dictionaries(
        st.text(max_size=8),
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        max_size=4,
    ),
    max_size=8,
)


@given(ROWS, st.integers(0, 200))
def test_rows_come_back_in_order_whatever_was_torn_off(rows: list[dict], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        for row in rows:
            store.append(row)
        assert Store(folder).rows() == rows
        for file in Path(folder).iterdir():
            text = file.read_bytes()
            kept = text[: max(len(text) - cut, 0)]
            file.write_bytes(kept)
            assert Store(folder).rows() == rows[: kept.count(b"\n")]
        store.close()


def test_two_writers_have_a_file_each(tmp_path: Path) -> None:
    first, second = Store(tmp_path), Store(tmp_path)
    for i in range(6):
        (first, second)[i % 2].append({"i": i})
    assert len(list(tmp_path.iterdir())) == 2
    assert [row["i"] for row in first.rows()] == list(range(6))
    first.close()
    first.append({"i": 6})
    assert len(list(tmp_path.iterdir())) == 3
    assert [row["i"] for row in second.rows()] == list(range(7))
    first.close()
    second.close()


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for i in range(3):
        store.append({"i": i})
    store.close()
    (file,) = tmp_path.iterdir()
    lines = file.read_bytes().split(b"\n")
    times = (
        b'{"time": 1}',
        b'{"time": "x", "row": {}}',
        b'{"time": NaN, "row": {}}',
        b'{"time": 1' + b"0" * 400 + b', "row": {}}',
    )
    for bad in (b"{", b"[]", *times, b'{"time": 1, "row": 3}', b"\xff", b"", b"[" * 100_000):
        file.write_bytes(b"\n".join([lines[0], bad, *lines[2:]]))
        with pytest.raises(StoreError) as error:
            store.rows()
        assert f"{file}:2: not a row" in str(error.value)
        assert "\n" not in str(error.value)


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "below"):
        with pytest.raises(StoreError, match="file"):
            Store(folder)
    store = Store(tmp_path / "store")
    for row in ({"x": float("nan")}, {"x": object()}, {("a", "b"): 1}):
        with pytest.raises(StoreError, match="JSON cannot hold"):
            store.append(row)
    assert store.rows() == []
    (tmp_path / "store").rmdir()
    with pytest.raises(StoreError, match="No such file"):
        store.append({})


WRITER = """
import sys
from predictor import Store
store = Store(sys.argv[1])
for i in range(1_000_000):
    store.append({"i": i, "filling": "x" * 5000})
    print(i, flush=True)
"""


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(50)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout if line.endswith("\n")]
    found = [row["i"] for row in Store(tmp_path).rows()]
    assert found[: len(acknowledged)] == acknowledged == list(range(len(acknowledged)))
    assert len(found) - len(acknowledged) in (0, 1)


def test_measurements_go_through_the_store(
    tmp_path: Path, make_workload: Callable[..., Workload], measure: Callable[..., Measurement]
) -> None:
    runs = [
        measure(make_workload(), 1e-4, repeats=(1e-4, 2e-4), cpu_use=1.5),
        measure(make_workload(num_actions=18.0), None, outcome=Outcome.TIMEOUT, error="took too long"),
        measure(make_workload(num_envs=8.0), 3e-4),
    ]
    store = Store(tmp_path)
    for run in runs:
        store.append(run.to_dict())
    store.close()
    found = [Measurement.from_dict(row) for row in Store(tmp_path).rows()]
    assert found == runs
    with pytest.raises(SchemaError, match="Measurement: lacks"):
        Measurement.from_dict({"schema": SCHEMA})


def test_rows_of_threads_come_back_whole(make_threaded: Callable[..., Workload], measure: Callable[..., Measurement]) -> None:
    run = measure(make_threaded(), 1e-4, waits={"batch_get": 0.25, "targets": 1.5}, batch_staleness=12.0, acting_staleness=3.0)
    assert Measurement.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    with pytest.raises(SchemaError, match=r"Measurement\.waits\.batch_get = 'long'"):
        Measurement.from_dict({**run.to_dict(), "waits": {"batch_get": "long"}})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seconds_per_env_step", -1e-4, "must be a finite number, and not negative"),
        ("wall_seconds", 10**400, "must be a finite number"),
        ("cpu_use", float("nan"), "must be a finite number"),
        ("hardware", None, "must be"),
    ],
)
def test_impossible_numbers_are_refused(
    make_workload: Callable[..., Workload], measure: Callable[..., Measurement], field: str, value: object, message: str
) -> None:
    with pytest.raises(SchemaError, match=rf"Measurement\.{field} = .*{message}") as error:
        Measurement.from_dict({**measure(make_workload(), 1e-4).to_dict(), field: value})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("field", "value"), [("cores", 0), ("float32_flops", 0.0), ("operation_seconds", -1.0), ("cores", 10**400)]
)
def test_a_machine_without_cores_or_speed_is_refused(hardware: Hardware, field: str, value: float) -> None:
    assert Hardware.from_dict({**hardware.to_dict(), "narrowing_seconds": 0.0}) == hardware
    with pytest.raises(SchemaError, match=rf"Hardware\.{field} = "):
        Hardware.from_dict({**hardware.to_dict(), field: value})
    with pytest.raises(SchemaError, match="must have fields by name"):
        Hardware.from_dict(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [None, 1, SCHEMA - 1, SCHEMA + 1, "x"])
def test_rows_of_another_version_are_told_apart(
    make_workload: Callable[..., Workload], measure: Callable[..., Measurement], version: object
) -> None:
    row = measure(make_workload(), 1e-4).to_dict()
    assert row.pop("schema") == SCHEMA
    with pytest.raises(OtherVersion, match="written by another version") as error:
        Measurement.from_dict(row if version is None else {**row, "schema": version})
    assert "\n" not in str(error.value)
