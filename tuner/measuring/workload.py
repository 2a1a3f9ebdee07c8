"""A configuration in numbers, as the predictor takes it: networks counted from their traces, environments on the host timed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import operator
import platform as host
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from predictor import Hardware, Outcome, RuntimePredictor, Workload
from tuner.bridge import (
    ENGINES,
    GIB,
    POLICIES,
    Config,
    HostEnvironment,
    NetworkConfig,
    RunFailed,
    available_cores,
    cached_rows,
    environment,
    home,
    in_process,
    make_model,
    source_of,
    write_atomically,
)
from tuner.disk import saving
from tuner.measuring.flops import Cost, count_cost


def describe(config: Config) -> Workload:
    """A concrete configuration in numbers. Its networks are only traced; its environment, where it runs on the host, is timed.

    Raises:
      UserError: an environment that cannot be served or does not fit the networks.
      RunFailed: an environment that fails when it is stepped.
    """
    spec = environment(config.env).spec
    policy = POLICIES[config.precision.level]
    search, train = config.search, config.train
    bits = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
    return Workload(
        observation_bytes=float(math.prod(spec.observation_shape) * np.dtype(spec.observation_dtype).itemsize),
        num_actions=float(spec.num_actions),
        num_players=float(spec.num_players),
        num_envs=float(config.runtime.num_envs),
        **_describe_networks(config.env, config.network, config.precision.level),
        num_bins=float(config.network.num_bins),
        num_simulations=float(search.num_simulations),
        puct=float(search.algorithm == "muzero"),
        search_split=float(search.split),
        search_engine=float(list(ENGINES).index(search.engine)),
        capacity=float(config.replay.capacity),
        # A failure may cut any episode under sebulba.
        stored_observations=1.0 + float(spec.can_truncate or config.runtime.kind == "sebulba"),
        replay_ratio=float(config.replay_ratio),
        prioritized=float(config.replay.kind == "prioritized"),
        replay_on_host=float(config.replay.placement == "host"),
        batch_size=float(train.batch_size),
        unroll_steps=float(train.unroll_steps),
        td_steps=float(train.td_steps),
        reanalyze_fraction=config.reanalyzed / train.batch_size,
        loop_count=float(config.runtime.loop_count),
        compute_bits=bits[policy.compute],
        embedding_bits=bits[policy.embedding],
        cores=float(config.allocation.cores or 1),
        memory_bytes=(config.allocation.memory_gib or 0.0) * GIB,
        device_share=config.allocation.device_memory or 1.0,
        **_describe_runtime(config),
    )


def whole_training(predictor: RuntimePredictor, config: Config, hardware: Hardware) -> dict[str, Any]:
    """What a concrete configuration is predicted to take to its last step, searches that deepen on the way included.

    Returns ``training_seconds``, without compiling, evaluating and saving, ``peak_bytes`` and ``device_peak_bytes``, which the
    deepest searches take, ``outcome`` and ``error`` of the first that do not fit, and where searches deepen
    ``seconds_per_env_step_by_simulations``. Raises as :func:`describe` does.
    """
    begins, simulations = zip(*config.deepenings, strict=True)
    steps = [end - begin for begin, end in itertools.pairwise([*begins, config.train.max_env_steps])]
    predicted = [predictor.predict(describe(config.searching(count)), hardware) for count in simulations]
    seconds = [one.seconds_per_env_step for one in predicted]
    short = next((one for one in predicted if one.outcome != Outcome.OK), predicted[0])
    told = {
        "training_seconds": sum(map(operator.mul, steps, seconds)),
        "peak_bytes": max(one.peak_bytes for one in predicted),
        "device_peak_bytes": max((one.device_peak_bytes for one in predicted if one.device_peak_bytes is not None), default=None),
        "outcome": short.outcome,
        "error": short.error,
    }
    return told | (
        {"seconds_per_env_step_by_simulations": dict(zip(simulations, seconds, strict=True))} if len(steps) > 1 else {}
    )


@functools.lru_cache(64)
def _describe_networks(env_id: str, network: NetworkConfig, level: str) -> dict[str, float]:
    """The fields of a Workload that networks alone decide, by their traces; most configurations of a tuning share them."""
    spec = environment(env_id).spec
    model = make_model(network, spec, POLICIES[level])
    params = jax.eval_shape(model.init, jax.random.key(0))

    def shapes_of(rows: int) -> tuple[jax.ShapeDtypeStruct, Any]:
        observations = jax.ShapeDtypeStruct((rows, *spec.observation_shape), spec.observation_dtype)
        return observations, jax.eval_shape(model.represent, params, observations)

    def costs_of(rows: int) -> dict[str, Cost]:
        observations, hidden = shapes_of(rows)
        return {
            "represent": count_cost(model.represent, params, observations),
            "dynamics": count_cost(model.dynamics, params, hidden, jax.ShapeDtypeStruct((rows,), np.int32)),
            "predict": count_cost(model.predict, params, hidden),
        }

    costs, of_two = costs_of(1), costs_of(2)
    return {
        **{f"{name}_flops": cost.flops for name, cost in costs.items()},
        **{f"{name}_params": cost.params for name, cost in costs.items()},
        **{f"{name}_layers": cost.layers for name, cost in costs.items()},
        # Of one row more: parameters are made narrower once, whatever the number of rows.
        **{f"{name}_elements": of_two[name].elements - cost.elements for name, cost in costs.items()},
        **{f"{name}_moved": of_two[name].moved - cost.moved for name, cost in costs.items()},
        "hidden_size": float(math.prod(shapes_of(1)[1].shape)),
        "cached_rows": float(cached_rows(model.row_bytes)),
    }


def _describe_runtime(config: Config) -> dict[str, float]:
    """The fields of a Workload that only one of the runtimes reads; of the other they are what they have no effect at."""
    runtime = config.runtime
    names = ("cpu_actors", "search_queue_size", "batch_queue_size", "acting_devices", "searching_devices", "learning_devices")
    sebulba = runtime.kind == "sebulba"
    return {
        "sebulba": float(sebulba),
        "selfplay_workers": float(config.selfplay_workers),
        **{name: float(getattr(runtime, name)) if sebulba else 0.0 for name in names},
        "role_threads": float(runtime.role_threads) if sebulba else 0.0,
        "step_in_process": float(sebulba and runtime.step_in == "process"),
        "host_step_seconds": host_step_seconds(config.env),
        "num_devices": 1.0 if sebulba else float(runtime.num_devices),
    }


_LEAST_STEP = 1e-7  # seconds; no environment in Python or C takes less


@functools.lru_cache(8)
def host_step_seconds(env_id: str) -> float:
    """Seconds of a step of one environment on the host, measured once a machine and version; 0 for one that is a program.

    Raises:
      RunFailed: it fails when it is stepped.
      UserError: what was measured cannot be kept.
    """
    if not isinstance(environment(env_id), HostEnvironment):
        return 0.0
    machine = [env_id, source_of(env_id), host.node(), host.machine(), len(available_cores())]
    file = _steps_folder() / f"{hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:12]}.json"
    if (kept := _kept_step_seconds(file)) is not None:
        return kept
    with saving("MUZEROX_HOME", home()):  # what cannot be kept is not measured first
        file.parent.mkdir(parents=True, exist_ok=True)
    seconds = _time_steps(env_id)
    with saving("MUZEROX_HOME", home()):
        write_atomically(file, json.dumps({"env": env_id, "step_seconds": seconds}) + "\n")
    return seconds


def forget_step_seconds() -> None:
    """Has environments timed again that were: what a module imports may have changed, which nobody sees.

    Raises:
      UserError: what was kept cannot be deleted.
    """
    with saving("MUZEROX_HOME", home()):
        for file in _steps_folder().glob("*.json"):
            file.unlink(missing_ok=True)
    host_step_seconds.cache_clear()


def _steps_folder() -> Path:
    return home() / "environments"


def _kept_step_seconds(file: Path) -> float | None:
    """What was measured before; None where it is to be measured (again): not yet, or the file is damaged."""
    try:
        kept = float(json.loads(file.read_text("utf-8"))["step_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return kept if kept >= _LEAST_STEP else None


def _time_steps(env_id: str, few: int = 2, many: int = 66, rows: int = 100) -> float:
    """By what a row takes longer with many environments than with few: what a row costs by itself is counted elsewhere.

    Rows of the two alternate, so that a machine that slows down meanwhile slows both. In processes of their own, so that an
    environment which crashes or hangs takes nothing with it.
    """
    actions = np.random.default_rng(0)
    passed: dict[int, list[float]] = {few: [], many: []}
    try:
        with contextlib.ExitStack() as stack:
            batches = {}
            for num_envs in passed:
                batches[num_envs] = in_process(env_id, num_envs, 0, 60.0)
                stack.callback(batches[num_envs].close)
            num_actions = {num_envs: batch.reset().legal.shape[1] for num_envs, batch in batches.items()}
            for _, (num_envs, batch) in itertools.product(range(rows), batches.items()):
                action = actions.integers(0, num_actions[num_envs], num_envs).astype(np.int32)
                start = time.perf_counter()
                batch.step(action)
                passed[num_envs].append(time.perf_counter() - start)
    except (RuntimeError, TimeoutError, OSError) as error:
        raise RunFailed(f"{env_id} fails when it is stepped: {' '.join(str(error).split())[:300]}") from None
    longer = statistics.median(b - a for a, b in zip(passed[few], passed[many], strict=True)) / (many - few)
    return float(f"{max(longer, _LEAST_STEP):.2g}")
