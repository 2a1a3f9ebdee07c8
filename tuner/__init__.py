"""Searches configurations with the predictor, measures the few that matter, allocates resources and trains.

result = tuner.tune(config, budget="5m", out="runs/tuning")
result.config, result.speedup, result.history
tuner.measure_config(config, hardware=hardware)  # tuner.measuring.fingerprint.fingerprint()
tuner.anneal.run(key, energy, sizes)  # any batched energy

Only ``tuner.bridge`` may import ``muzerox``, which import-linter enforces.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.loop import tune
    from tuner.measuring.measure import measure_config, measure_in_alternation
    from tuner.result import TuneResult

__all__ = ["TuneResult", "anneal", "measure_config", "measure_in_alternation", "tune"]

_MEASURE = "measuring.measure"
_HOMES = {"TuneResult": "result", "tune": "loop", "measure_config": _MEASURE, "measure_in_alternation": _MEASURE}


def __getattr__(name: str) -> Any:
    """Public names on first use: the worker of a measurement must take its allocation before anything imports jax."""
    import importlib

    if name == "anneal":
        return importlib.import_module("tuner.anneal")
    if name in _HOMES:
        return getattr(importlib.import_module(f"tuner.{_HOMES[name]}"), name)
    raise AttributeError(f"module tuner has no attribute {name}")
