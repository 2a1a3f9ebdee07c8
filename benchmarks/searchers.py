"""Ways to search a grid of configurations, ours and what people would use instead; see ``tuner.py``.

A searcher is ``(problem, seed)``; it asks :meth:`Problem.measure` for one point after the other until that raises :class:`Spent`.
The first point is the same for all. To add one, add a row to ``SEARCHERS``. Those of libraries need ``muzerox[searchers]``.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Point = tuple[int, ...]
_DRAWN = 32


class Spent(Exception):
    """As many configurations were measured as there is budget for."""


class Trial(NamedTuple):
    """A configuration that was measured."""

    point: Point
    seconds: float  # an environment step; infinite where it failed
    elapsed: float  # seconds of measuring (compiling included) and of searching until then


class Problem:
    """A grid whose configurations were all measured, played back to a searcher."""

    def __init__(self, grid: Any, start: Point, budget: int):
        self.grid, self.start, self.budget = grid, start, budget
        self.trials: list[Trial] = []
        self._seen: dict[Point, float] = {}
        self._asked, self._measuring, self._began = 0, 0.0, time.perf_counter()

    @property
    def sizes(self) -> np.ndarray:
        """[D] number of choices by axis."""
        return self.grid.space.sizes

    def measure(self, point: Sequence[int] | np.ndarray, *, same_process: bool = False) -> float:
        """Log seconds of a point; as if it were twice the slowest there is where it failed. Raises Spent.

        Asking again costs nothing: nobody would measure the same twice. ``same_process``: as the one before, nothing to compile.
        """
        at = tuple(int(x) for x in point)
        self._asked += 1
        if self._asked > 10 * self.budget:  # it only repeats itself
            raise Spent
        if at not in self._seen:
            if len(self.trials) == self.budget:
                raise Spent
            seconds = self.grid.seconds.get(at, math.inf)
            self._seen[at] = math.log(seconds) if math.isfinite(seconds) else self.grid.worst + math.log(2.0)
            self._measuring += self.grid.burst_seconds(at) if same_process else self.grid.wall_seconds(at)
            self.trials.append(Trial(at, seconds, self._measuring + time.perf_counter() - self._began))
        return self._seen[at]


Searcher = Callable[[Problem, int], None]


def random(problem: Problem, seed: int) -> None:
    """Points in a random order."""
    rng = np.random.default_rng(seed)
    problem.measure(problem.start)
    while True:
        problem.measure(rng.integers(problem.sizes))


def ours(
    problem: Problem,
    seed: int,
    *,
    pretrained: bool = True,
    network: bool = True,
    anneal: bool = True,
    curiosity: float | None = None,
) -> None:
    """The tuner's proposals; processes that time several loop counts count each of them.

    Without ``anneal`` the best by the same energy of a few points drawn at random is measured.
    """
    import jax

    from predictor import RuntimePredictor
    from tuner.objective import STALENESS_PRICE
    from tuner.proposer import CURIOSITY, Proposer

    class Deaf(RuntimePredictor):
        """Whose network is never heard."""

        def fit(self, *args: Any, **options: Any) -> RuntimePredictor:
            found = super().fit(*args, **options)
            return Deaf(found.params._replace(shrinkage=np.float32(0.0)), found.report, found.machines, found.about)

    grid, rng = problem.grid, np.random.default_rng(seed)
    taught = RuntimePredictor.pretrained() if pretrained else RuntimePredictor()
    taught = taught if network else Deaf(taught.params, taught.report, taught.machines, taught.about)
    price = STALENESS_PRICE / grid.target_period
    curiosity = CURIOSITY if curiosity is None else curiosity
    proposer = Proposer(grid.space, grid.hardware, taught, jax.random.key(seed), price, curiosity=curiosity)
    loop_axis = [knob.path for knob in grid.space.knobs].index("runtime.loop_count")
    known: dict[Point, Any] = {}

    def drawn() -> Point | None:
        points = np.stack([rng.integers(problem.sizes) for _ in range(_DRAWN)])
        energies = proposer.energies(points)
        best = int(np.argmin(energies))
        return tuple(int(x) for x in points[best]) if np.isfinite(energies[best]) else None

    point: Point | None = problem.start
    while point is not None:
        further = proposer.further_loop_counts(point)
        problem.measure(point)
        known[point] = grid.measurement(point)
        for count in further:
            other = tuple(grid.space.choices[axis].index(count) if axis == loop_axis else x for axis, x in enumerate(point))
            if other not in known:
                problem.measure(other, same_process=True)
                known[other] = grid.measurement(other)
        proposer.learn(list(known.items()))
        point = proposer.propose(len(problem.trials)) if anneal else drawn()


def _optuna(make_sampler: Callable[[Any, int], Any]) -> Searcher:
    def search(problem: Problem, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        names = [knob.path for knob in problem.grid.space.knobs]
        ordered = [knob.scale != "name" for knob in problem.grid.space.knobs]

        def objective(trial: Any) -> float:
            return problem.measure(
                [
                    trial.suggest_int(name, 0, size - 1) if order else trial.suggest_categorical(name, list(range(size)))
                    for name, size, order in zip(names, problem.sizes.tolist(), ordered, strict=True)
                ]
            )

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samplers that are experimental
            study = optuna.create_study(sampler=make_sampler(optuna, seed))
            study.enqueue_trial(dict(zip(names, problem.start, strict=True)))
            study.optimize(objective, n_trials=10 * problem.budget)

    return search


def _columns(problem: Problem, points: np.ndarray) -> np.ndarray:
    """Points [n, D] for models: ordered axes as numbers between 0 and 1, others one-hot."""
    columns = []
    for axis, (knob, size) in enumerate(zip(problem.grid.space.knobs, problem.sizes, strict=True)):
        one_hot = knob.scale == "name"
        columns += [points[:, axis] == choice for choice in range(size)] if one_hot else [points[:, axis] / max(size - 1, 1)]
    return np.stack(columns, axis=1).astype(float)


def _model_based(choose: Callable[[np.ndarray, np.ndarray, np.ndarray, np.random.Generator], int], initial: int = 8) -> Searcher:
    """Random points first, then what ``choose(columns, log seconds, columns of all points, rng)`` says: every one is scored."""

    def search(problem: Problem, seed: int) -> None:
        rng = np.random.default_rng(seed)
        axes = np.meshgrid(*(np.arange(n) for n in problem.sizes), indexing="ij")
        points = np.stack(axes, axis=-1).reshape(-1, len(problem.sizes))
        columns = _columns(problem, points)
        left = {tuple(point): row for row, point in enumerate(points.tolist())}
        order: list[int] = []
        values: list[float] = []
        next_row = left[problem.start]
        while True:
            values.append(problem.measure(points[next_row]))
            order.append(next_row)
            del left[tuple(points[next_row].tolist())]
            if not left:
                raise Spent
            rows = np.array(list(left.values()))
            if len(order) < initial:
                next_row = int(rng.choice(rows))
            else:
                next_row = int(rows[choose(columns[order], np.array(values), columns[rows], rng)])

    return search


def _trees(seen: np.ndarray, values: np.ndarray, candidates: np.ndarray, rng: np.random.Generator) -> int:
    """AutoTVM's recipe (arXiv:1805.08166): gradient-boosted trees as the cost model, one in twenty at random."""
    import xgboost

    if rng.random() < 0.05:
        return int(rng.integers(len(candidates)))
    model = xgboost.XGBRegressor(n_estimators=100, max_depth=4, learning_rate=0.2, min_child_weight=1, n_jobs=1, random_state=0)
    return int(np.argmin(model.fit(seen, values).predict(candidates)))


def _process(seen: np.ndarray, values: np.ndarray, candidates: np.ndarray, _: np.random.Generator) -> int:
    """A Gaussian process with a length for each column, and expected improvement."""
    from scipy.stats import norm
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    lengths = np.ones(seen.shape[1])
    kernel = ConstantKernel(1.0) * Matern(lengths, (0.05, 50.0), nu=2.5) + WhiteKernel(1e-2, (1e-5, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lengths at the end of their range
        mean, deviation = (
            GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
            .fit(seen, values)
            .predict(candidates, return_std=True)
        )
    gain = (values.min() - mean) / np.maximum(deviation, 1e-9)
    return int(np.argmax(deviation * (gain * norm.cdf(gain) + norm.pdf(gain))))


def _botorch(seen: np.ndarray, values: np.ndarray, candidates: np.ndarray, rng: np.random.Generator) -> int:
    """BoTorch as its tutorials have it: its default Gaussian process, and the logarithm of expected improvement."""
    import torch
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    torch.set_num_threads(1)  # matrices of a few dozen rows: more threads only wait for one another
    torch.manual_seed(int(rng.integers(2**31)))
    points, gains = torch.tensor(seen, dtype=torch.double), -torch.tensor(values, dtype=torch.double)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of inputs that are the same in a column
        model = SingleTaskGP(points, gains)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        with torch.no_grad():
            scores = LogExpectedImprovement(model, gains.max())(torch.tensor(candidates, dtype=torch.double)[:, None, :])
    return int(scores.argmax())


def dual_annealing(problem: Problem, seed: int) -> None:
    """scipy's generalised simulated annealing of measurements themselves."""
    from scipy.optimize import dual_annealing as search

    upper = problem.sizes.astype(float)

    def objective(x: np.ndarray) -> float:
        return problem.measure(np.minimum(x, upper - 1e-6).astype(int))

    bounds = [(0.0, size) for size in upper]
    search(objective, bounds, x0=np.array(problem.start) + 0.5, seed=seed, no_local_search=True, maxiter=10**6)


SEARCHERS: dict[str, Searcher] = {
    "ours": ours,
    "ours, nothing pretrained": functools.partial(ours, pretrained=False),
    "ours, no graph network": functools.partial(ours, network=False),
    "ours, not annealed": functools.partial(ours, anneal=False),
    "ours, not curious": functools.partial(ours, curiosity=0.0),
    "random": random,
    "Optuna TPE": _optuna(lambda optuna, seed: optuna.samplers.TPESampler(seed=seed)),
    # What version 5 takes by default is the multivariate one; before, it was this.
    "Optuna TPE, knob by knob": _optuna(lambda optuna, seed: optuna.samplers.TPESampler(seed=seed, multivariate=False)),
    "Optuna GP": _optuna(lambda optuna, seed: optuna.samplers.GPSampler(seed=seed)),
    "Optuna CMA-ES": _optuna(lambda optuna, seed: optuna.samplers.CmaEsSampler(seed=seed)),
    "GP, expected improvement": _model_based(_process),
    "BoTorch": _model_based(_botorch),
    "XGBoost, as AutoTVM": _model_based(_trees),
    "scipy dual_annealing": dual_annealing,
}

# Packages of the extras ``benchmarks`` and ``searchers``, the last of which is large: these are left out where they are missing.
NEEDS = {
    **{name: ("optuna",) for name in SEARCHERS if name.startswith("Optuna")},
    "Optuna GP": ("optuna", "torch"),
    "Optuna CMA-ES": ("optuna", "cmaes"),
    "GP, expected improvement": ("sklearn",),
    "BoTorch": ("botorch",),
    "XGBoost, as AutoTVM": ("xgboost",),
}
