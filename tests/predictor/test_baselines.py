"""Baselines learn what can be learnt; those of libraries are tried where the libraries are."""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest

from predictor import Hardware, Measurement, Workload, hardware_rates, stack, stages
from predictor.baselines import BASELINES, Table, make_table

Family = Callable[[int, int], list[Workload]]
NEEDS = {"XGBoost": "xgboost", "LightGBM": "lightgbm"}


def tables(family: Family, hardware: Hardware, measure: Callable[..., Measurement]) -> tuple[Table, Table]:
    """Of a machine that is three times slower than its rates say."""

    def make(seed: int, count: int) -> Table:
        workloads = family(seed, count)
        seconds = np.asarray(jax.jit(stages)(stack(workloads), hardware_rates(hardware))).sum(-1) * 3.0
        return make_table([measure(w, float(s)) for w, s in zip(workloads, seconds, strict=True)])

    return make(0, 48), make(1, 24)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_beats_the_mean(name: str, family: Family, hardware: Hardware, measure: Callable[..., Measurement]) -> None:
    for sign, module in NEEDS.items():
        if sign in name:
            pytest.importorskip(module)
    if not name.startswith("base, added") and not name.startswith("base, p"):
        pytest.importorskip("sklearn")
    train, test = tables(family, hardware, measure)
    predicted = BASELINES[name](train, test)
    assert predicted.shape == test.log_seconds.shape
    error, alone = (np.mean(np.abs(x - test.log_seconds)) for x in (predicted, train.log_seconds.mean()))
    assert error < (1.001 if name == "mean" else 0.75 if not name.startswith("base") else 0.2) * alone


def test_a_table_holds_its_rows(family: Family, hardware: Hardware, measure: Callable[..., Measurement]) -> None:
    train, _ = tables(family, hardware, measure)
    some = train.rows(np.array([3, 1]))
    np.testing.assert_array_equal(some.log_seconds, train.log_seconds[[3, 1]])
    np.testing.assert_array_equal(some.workload.num_envs, np.asarray(train.workload.num_envs)[[3, 1]])


def test_a_missing_library_is_one_line(
    family: Family, hardware: Hardware, measure: Callable[..., Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = tables(family, hardware, measure)
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"sklearn.linear_model is missing: pip install 'muzerox\[benchmarks\]'"):
        BASELINES["ridge on logs"](train, test)
