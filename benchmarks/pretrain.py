"""Makes what ships with the predictor: a graph network trained on simulated pipelines, and a predictor fitted to measurements.

Pipelines that the network was not trained on are simulated too: the share of the variance of log simulated over base seconds
that its features explain, by a linear function of them, is recorded. The predictor then learns from everything that
``collect.py`` measured. With ``--save`` both replace those in the package; with ``--keep-network`` only the predictor is made.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from collected import load
from common import DATA, finish, make_parser, use_device


def explained(features: Any, target: Any) -> float:
    """Share of the variance of the second half that a ridge regression on the first half explains."""
    half = len(target) // 2
    design = np.concatenate([np.ones((len(target), 1)), features], axis=1)
    gram = design[:half].T @ design[:half] + 1e-3 * half * np.eye(design.shape[1])
    weights = np.linalg.solve(gram, design[:half].T @ target[:half])
    left = target[half:] - design[half:] @ weights
    return float(1.0 - np.mean(left**2) / np.var(target[half:]))


def make_network(args: Any, figures: dict[str, Any]) -> Any:
    """The trained network; what it learnt is added to the figures."""
    import jax

    from predictor import pretrain

    start = time.perf_counter()
    task, test = pretrain.make_task(0, args.pipelines), pretrain.make_task(1, args.held_out)
    simulated = time.perf_counter() - start
    network = pretrain.pretrain(jax.random.key(0), task, steps=args.steps)
    figures |= {
        "pipelines": args.pipelines,
        "steps": args.steps,
        "simulated_a_second": (args.pipelines + args.held_out) / simulated,
        "train_seconds": time.perf_counter() - start - simulated,
    }
    threads = np.asarray(test.workload.sebulba) > 0.0
    for name, candidate in (("trained", network), ("untrained", pretrain.pretrain(jax.random.key(0), task, steps=0))):
        features = pretrain.features(candidate, test)
        figures[f"explained_{name}"] = explained(features[threads], test.targets[threads, 0])
    return network


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pipelines", type=int, default=16_000)
    parser.add_argument("--held-out", type=int, default=2_048)
    parser.add_argument("--steps", type=int, default=4_000, help="of gradient descent, each on 128 pipelines")
    parser.add_argument("--data", type=Path, default=DATA / "collected", help="folder of what was measured")
    parser.add_argument("--keep-network", action="store_true", help="fit the predictor about the network in the package")
    parser.add_argument("--save", action="store_true", help="replace what is in the package")
    args = parser.parse_args()
    use_device(args.device)
    from predictor import RuntimePredictor, artifact, pretrain

    figures: dict[str, Any] = {}
    if not args.keep_network:
        network = make_network(args, figures)
        if args.save:
            artifact.save(pretrain.SHIPPED / "network", network, {"made by": "benchmarks/pretrain.py", **figures})
            pretrain.load.cache_clear()
    data = load(args.data)
    if not args.keep_network and not args.save:
        print("fitted about the network in the package, which was not replaced: --save does that", file=sys.stderr)
    model = RuntimePredictor().fit([*data.failures, *data.measurements]).elsewhere()
    assert model.report is not None
    figures |= {f"fit_{name}": value for name, value in dataclasses.asdict(model.report).items()}
    if args.save:
        files = sorted(file.name for file in args.data.glob("*.jsonl"))
        card = {
            "made by": "benchmarks/pretrain.py, from benchmarks/data/collected (README.md there tells how it was measured)",
            "files": files,
            "machines": sorted({f"{m.hardware.cpu}, {m.hardware.cores} cores, {m.hardware.device}" for m in data.measurements}),
            "configurations": len(data.measurements),
        }
        model.save(pretrain.SHIPPED / "predictor", card)
    finish("pretrain", figures, record=args.record)


if __name__ == "__main__":
    main()
