"""What the predictor must beat, by the libraries people would use; the extra ``muzerox[benchmarks]`` installs them.

A baseline is ``(table of training, table of test) -> log seconds of test``. Those named "base, ..." learn what is left of the
analytic base, which is fitted to the same measurements; the others see a configuration's numbers, and the machine's, as
logarithms. To add one, add a row to ``BASELINES``.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from predictor import pretrain
from predictor.analytic import Rates, stack, stack_rates, stages
from predictor.coefficients import fit_coefficients
from predictor.fit import apply_network, build_graph, padded, program, train_network
from predictor.model import Network
from predictor.overlap import bound_weights, total
from predictor.posterior import number
from predictor.schema import Measurement, Workload

_TRIES = 12  # of settings, when trees are tuned
_FOLDS = 4


class Table(NamedTuple):
    """Measurements as arrays of n rows."""

    workload: Workload  # fields [n]
    hardware: Rates  # fields [n]
    stage_seconds: np.ndarray  # [n, S]
    knobs: np.ndarray  # [n, F] logarithms of the numbers of workload and machine
    log_seconds: np.ndarray  # [n]
    programs: np.ndarray  # [n] int, the same for measurements of one program

    def rows(self, chosen: np.ndarray) -> Table:
        """Some of the rows."""
        return jax.tree.map(lambda x: np.asarray(x)[chosen], self)


Baseline = Callable[[Table, Table], np.ndarray]


def make_table(measurements: Sequence[Measurement]) -> Table:
    """Measurements as arrays; log seconds are NaN where a measurement tells none."""
    workload = stack([m.workload for m in measurements])
    hardware = stack_rates([m.hardware for m in measurements])
    numbers = np.stack([*jax.tree.leaves(workload), *hardware], axis=1)
    return Table(
        workload,
        hardware,
        np.asarray(jax.jit(stages)(workload, hardware)),
        np.log2(np.maximum(numbers, 1e-9)),
        np.log([m.seconds_per_env_step or np.nan for m in measurements]),
        number(program(m.workload) for m in measurements),
    )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{name} is missing: pip install 'muzerox[benchmarks]'") from None


def _standardised(train: Table, test: Table, columns: Callable[[Table], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Columns by mean and deviation over the training rows; those that do not vary there are 0."""
    x, y = columns(train), columns(test)
    mean, deviation = x.mean(0), x.std(0)
    scale = np.where(deviation > 1e-6, 1.0 / np.maximum(deviation, 1e-6), 0.0)
    return (x - mean) * scale, (y - mean) * scale


def _knobs(table: Table) -> np.ndarray:
    return table.knobs


def _knobs_and_stages(table: Table) -> np.ndarray:
    """What the graph's nodes and edges are made of: numbers, and the shares of stages."""
    shares = table.stage_seconds / table.stage_seconds.sum(1, keepdims=True)
    return np.concatenate([table.knobs, np.log(shares + 1e-4), np.log(table.stage_seconds.sum(1, keepdims=True))], axis=1)


def mean(train: Table, test: Table) -> np.ndarray:
    """The geometric mean."""
    return np.full(len(test.log_seconds), train.log_seconds.mean())


def ridge(train: Table, test: Table) -> np.ndarray:
    """Ridge regression, its weight by leave-one-out."""
    x, y = _standardised(train, test, _knobs)
    model = _module("sklearn.linear_model").RidgeCV(alphas=np.logspace(-2, 3, 11)).fit(x, train.log_seconds)
    return model.predict(y)


def forest(train: Table, test: Table) -> np.ndarray:
    """Random forest (Breiman, 2001)."""
    model = _module("sklearn.ensemble").RandomForestRegressor(300, random_state=0, n_jobs=1)
    return model.fit(train.knobs, train.log_seconds).predict(test.knobs)


def _tuned(make: Callable[[dict[str, Any]], Any], x: np.ndarray, target: np.ndarray, programs: np.ndarray) -> Any:
    """The settings, of some drawn at random, with the least error on programs that are held out; fitted to everything."""
    rng = np.random.default_rng(0)
    numbers = number(programs)
    fold = rng.permutation(max(numbers) + 1)[numbers] % _FOLDS
    best: tuple[float, Any] = (np.inf, None)
    for _ in range(_TRIES):
        settings = {
            "n_estimators": int(rng.choice([50, 100, 200, 400])),
            "max_depth": int(rng.integers(2, 7)),
            "learning_rate": float(10 ** rng.uniform(-1.7, -0.5)),
            "subsample": float(rng.uniform(0.6, 1.0)),
            "reg_lambda": float(10 ** rng.uniform(-1.0, 1.0)),
        }
        errors = [
            np.abs(make(settings).fit(x[fold != k], target[fold != k]).predict(x[fold == k]) - target[fold == k])
            for k in range(max(fold) + 1)
        ]
        best = min(best, (float(np.mean(np.concatenate(errors))), settings), key=lambda found: found[0])
    return make(best[1]).fit(x, target)


def _xgboost(settings: dict[str, Any]) -> Any:
    return _module("xgboost").XGBRegressor(**settings, min_child_weight=1, n_jobs=1, random_state=0)


def _lightgbm(settings: dict[str, Any]) -> Any:
    few = {"min_child_samples": 3, "min_data_in_bin": 1}  # its defaults are for thousands of rows
    return _module("lightgbm").LGBMRegressor(**settings, **few, subsample_freq=1, n_jobs=1, random_state=0, verbose=-1)


def xgboost(train: Table, test: Table) -> np.ndarray:
    """XGBoost (Chen and Guestrin, 2016), tuned by cross-validation."""
    return _tuned(_xgboost, train.knobs, train.log_seconds, train.programs).predict(test.knobs)


def lightgbm(train: Table, test: Table) -> np.ndarray:
    """LightGBM (Ke et al., 2017), tuned by cross-validation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names of features that an array does not have
        return _tuned(_lightgbm, train.knobs, train.log_seconds, train.programs).predict(test.knobs)


def _process(x: np.ndarray, target: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A Gaussian process with one length for all columns and noise, by marginal likelihood."""
    kernels = _module("sklearn.gaussian_process.kernels")
    kernel = kernels.ConstantKernel(1.0, (1e-3, 1e3)) * kernels.RBF(5.0, (0.5, 100.0)) + kernels.WhiteKernel(0.05, (1e-4, 10.0))
    process = _module("sklearn.gaussian_process").GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=1, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lengths at the end of their range
        return process.fit(x, target).predict(y)


def process(train: Table, test: Table) -> np.ndarray:
    """Gaussian process."""
    x, y = _standardised(train, test, _knobs)
    return _process(x, train.log_seconds, y)


def _base(train: Table, test: Table, *, overlap: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Log seconds of training and test by the analytic base fitted to training; without ``overlap`` stages add up."""
    weights = np.asarray(bound_weights(train.workload, train.hardware)) if overlap else None
    coefficients = fit_coefficients(train.stage_seconds, np.exp(train.log_seconds), weights)

    def of(table: Table) -> np.ndarray:
        if not overlap:
            return np.log(table.stage_seconds @ coefficients)
        return np.log(np.asarray(total(coefficients * table.stage_seconds, table.workload, table.hardware)))

    return of(train), of(test)


def base_sum(train: Table, test: Table) -> np.ndarray:
    """The analytic base, its stages added up: non-negative least squares."""
    return _base(train, test, overlap=False)[1]


def base(train: Table, test: Table) -> np.ndarray:
    """The analytic base, its bounds combined by a p-norm."""
    return _base(train, test)[1]


def base_xgboost(train: Table, test: Table) -> np.ndarray:
    """XGBoost on what the base leaves."""
    fitted, predicted = _base(train, test)
    return predicted + _tuned(_xgboost, train.knobs, train.log_seconds - fitted, train.programs).predict(test.knobs)


def base_process(train: Table, test: Table) -> np.ndarray:
    """A Gaussian process on what the base leaves."""
    fitted, predicted = _base(train, test)
    x, y = _standardised(train, test, _knobs)
    return predicted + _process(x, train.log_seconds - fitted, y)


def base_mlp(train: Table, test: Table) -> np.ndarray:
    """Four small dense networks on what the base leaves, with the quantities that the graph is made of."""
    fitted, predicted = _base(train, test)
    x, y = _standardised(train, test, _knobs_and_stages)
    make = _module("sklearn.neural_network").MLPRegressor
    settings: dict[str, Any] = {"hidden_layer_sizes": (32, 32), "alpha": 1.0, "max_iter": 500, "learning_rate_init": 3e-3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of training that could go on
        found = [make(**settings, random_state=k).fit(x, train.log_seconds - fitted).predict(y) for k in range(4)]
    left = train.log_seconds - fitted
    return predicted + np.clip(np.mean(found, axis=0), left.min(), left.max())  # of few rows it goes anywhere


@functools.cache
def from_scratch() -> Network:
    """The graph network as it is before it is taught anything; it knows how quantities of pipelines are spread."""
    return pretrain.pretrain(jax.random.key(0), pretrain.make_task(0, 2048), steps=0)


def without_attention(network: Network) -> Network:
    """Every neighbour counts the same: without queries and keys scores are 0, and so are all gradients of queries and keys."""
    width = len(network["node_out"])

    def blank(matrix: np.ndarray, *parts: int) -> np.ndarray:
        matrix = np.array(matrix)
        for part in parts:
            matrix[:, part * width : (part + 1) * width] = 0.0
        return matrix

    layers = [layer | {"node": blank(layer["node"], 0, 2), "edge": blank(layer["edge"], 0)} for layer in network["layers"]]
    return network | {"layers": layers}


def base_graph(make_network: Callable[[], Network], *, edges: bool = True) -> Baseline:
    """The graph network on what the base leaves, always heard; without ``edges`` it sees which nodes interact, not how much."""

    def graph_of(table: Table, count: int) -> Any:
        """Graphs of the table, its last row repeated up to ``count``: few shapes, so that few programs are compiled."""
        rows = table.rows(np.minimum(np.arange(count), len(table.log_seconds) - 1))
        graph = build_graph(rows.workload, rows.hardware, rows.stage_seconds)
        return graph if edges else graph._replace(edges=graph.edges._replace(features=np.zeros_like(graph.edges.features)))

    def predict(train: Table, test: Table) -> np.ndarray:
        fitted, predicted = _base(train, test)
        left = train.log_seconds - fitted
        shapes = [padded(len(table.log_seconds)) for table in (train, test)]
        target = np.pad(left, (0, shapes[0] - len(left))).astype(np.float32)
        weights = (np.arange(shapes[0]) < len(left)).astype(np.float32)
        networks, _ = train_network(make_network(), graph_of(train, shapes[0]), target, weights[None])
        said = apply_network(jax.tree.map(lambda x: x[0], networks), graph_of(test, shapes[1]))
        return predicted + np.clip(np.asarray(said)[: len(predicted)], left.min(), left.max())

    return predict


BASELINES: dict[str, Baseline] = {
    "mean": mean,
    "ridge on logs": ridge,
    "random forest": forest,
    "XGBoost, tuned": xgboost,
    "LightGBM, tuned": lightgbm,
    "Gaussian process": process,
    "base, added up": base_sum,
    "base, p-norm": base,
    "base, XGBoost": base_xgboost,
    "base, Gaussian process": base_process,
    "base, MLP": base_mlp,
    "base, graph network": base_graph(pretrain.load),
    "base, graph network from scratch": base_graph(from_scratch),
    "base, graph network from scratch, no edge features": base_graph(from_scratch, edges=False),
    "base, graph network from scratch, no attention": base_graph(lambda: without_attention(from_scratch())),
}
