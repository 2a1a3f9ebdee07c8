"""Predicts what a training configuration costs on given hardware, before it runs.

Physics first (stages of the program over measured rates), a graph attention network for what physics misses, offsets for what
this machine does today. Nothing here knows ``muzerox``: a :class:`Workload` is a configuration in numbers.

    store = Store("measurements/my-machine")
    measurements = [Measurement.from_dict(row) for row in store.rows()]
    model = RuntimePredictor.pretrained().fit(measurements)
    print(model.predict(workload, hardware).interval, model.report)

An annealer scores thousands of candidates at once, and takes the fitted arrays as an argument, so that a refit predictor
does not compile it again:

    energies = jax.jit(log_seconds)(model.params, candidates, hardware_rates(hardware))  # fields float32 [C] -> [C]
"""

from predictor.analytic import STAGES, Rates, hardware_rates, stack, stages
from predictor.artifact import ArtifactError
from predictor.fit import FitReport, program, usable
from predictor.memory import resident_bytes
from predictor.overlap import batch_staleness, staleness
from predictor.runtime_predictor import Params, RuntimePredictor, base_log_seconds, log_seconds
from predictor.schema import Hardware, Measurement, OtherVersion, Outcome, Prediction, SchemaError, Workload
from predictor.store import Store, StoreError

__all__ = [
    "STAGES",
    "ArtifactError",
    "FitReport",
    "Hardware",
    "Measurement",
    "OtherVersion",
    "Outcome",
    "Params",
    "Prediction",
    "Rates",
    "RuntimePredictor",
    "SchemaError",
    "Store",
    "StoreError",
    "Workload",
    "base_log_seconds",
    "batch_staleness",
    "hardware_rates",
    "log_seconds",
    "program",
    "resident_bytes",
    "stack",
    "stages",
    "staleness",
    "usable",
]
