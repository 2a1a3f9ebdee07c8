"""Baselines learn what can be learnt; those of libraries are tried where the libraries are."""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import numpy as np
import pytest

from predictor import Hardware, Measurement, Workload, hardware_rates, stack, stages
from predictor.baselines import BASELINES, Table, from_scratch, make_table, without_attention
from predictor.fit import train_network
from predictor.graph import make_graph

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
    if not any(sign in name for sign in ("mean", "added", "p-norm", "graph network")):
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


def test_without_attention_every_neighbour_counts_the_same_however_long_it_is_trained(
    family: Family, hardware: Hardware, measure: Callable[..., Measurement]
) -> None:
    train, _ = tables(family, hardware, measure)
    graph = make_graph(train.workload, train.hardware, train.stage_seconds)
    target, weights = np.linspace(-1.0, 1.0, 48, dtype=np.float32), np.ones((1, 48), np.float32)
    blind = without_attention(from_scratch())
    networks, _ = train_network(blind, graph, target, weights)
    width = len(blind["node_out"])
    for before, after in zip(blind["layers"], networks["layers"], strict=True):
        for name, part in (("node", 0), ("node", 2), ("edge", 0)):
            assert np.all(np.asarray(after[name])[0, :, part * width : (part + 1) * width] == 0.0)
        assert np.any(np.asarray(after["node"])[0] != before["node"])
