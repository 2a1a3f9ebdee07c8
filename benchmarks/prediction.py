"""Candidates a second that the predictor scores, base alone and with the graph network, and seconds a fit takes.

The floor of the network is its multiplications, by the rate at which this machine multiplies large matrices, in the same run.

The measurements are random workloads of made-up cost: what is timed does not depend on what was measured.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from common import finish, make_parser, use_device

BATCH = {"cpu": 1024, "gpu": 2**17, "tpu": 2**17}  # by default: what fits a processor's cache, what fills an accelerator
PEER = {"graph_network_candidates_per_second": 385_000}  # 16 wide, 2 layers, 4 heads, batch 1024, on a machine of 2 cores


def make_measurements(count: int, seed: int) -> list[Any]:
    import numpy as np

    from predictor import Hardware, Measurement, Outcome, Workload

    rng = np.random.default_rng(seed)
    hardware = Hardware(
        cpu="example",
        cores=2,
        memory_bytes=2**34,
        platform="cpu",
        device="cpu",
        devices=1,
        device_memory_bytes=2**34,
        float32_flops=4e11,
        bfloat16_flops=3e11,
        copy_bytes_per_second=5e10,
        dispatch_seconds=1e-5,
        operation_seconds=2e-7,
        one_core_flops=2e11,
    )
    # Every field is drawn, whether or not such a configuration makes sense.
    names = list(Workload.__dataclass_fields__)
    return [
        Measurement(
            hardware=hardware,
            workload=Workload(**{name: float(2.0 ** rng.integers(0, 9)) for name in names}),
            outcome=Outcome.OK,
            seconds_per_env_step=float(rng.lognormal(-9.0, 1.0)),
        )
        for _ in range(count)
    ]


def multiply_adds(network: Any) -> int:
    """That the network needs for a candidate: projections of features, and of every layer."""
    from predictor.graph import EDGE_WIDTH, EDGES, NODE_WIDTH, NODES

    width, later = network["node_in"].shape[-1], len(network["layers"]) - 1
    features = len(NODES) * NODE_WIDTH + len(EDGES) * EDGE_WIDTH * 4  # the first layer's edges are projected from them, too
    # Of a node: query, key, value, both ends' part in an edge, and what it attended to. Of an edge: key, value, itself.
    return features * width + width**2 * (len(NODES) * 6 * (later + 1) + len(EDGES) * 3 * later)


def product_rate(repeats: int) -> float:
    """Multiplications with an addition a second, of a product of large matrices."""
    import jax
    import jax.numpy as jnp

    size = 2048
    matrix, times = jnp.ones((size, size)), []
    product = jax.jit(jnp.matmul)
    for _ in range(repeats):
        start = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        times.append(time.perf_counter() - start)
    return size**3 / statistics.median(times)


def measure(repeats: int, batch: int) -> dict[str, Any]:
    import jax
    import numpy as np

    from predictor import RuntimePredictor, stack

    def fit_seconds(count: int, seed: int) -> float:
        measurements = make_measurements(count, seed)
        start = time.perf_counter()
        RuntimePredictor().fit(measurements)
        return time.perf_counter() - start

    figures: dict[str, Any] = {"fit_seconds_cold": fit_seconds(30, 0)}
    figures["fit_seconds_warm_32"] = statistics.median(fit_seconds(32 - i, i + 1) for i in range(3))
    fit_seconds(64, 9)
    figures["fit_seconds_warm_64"] = statistics.median(fit_seconds(64 - i, i + 1) for i in range(3))

    rows = make_measurements(min(batch, 1024), 1)
    few, hardware = stack([m.workload for m in rows]), rows[0].hardware
    candidates = jax.device_put(jax.tree.map(lambda x: np.resize(x, (batch, *x.shape[1:])), few))
    params = RuntimePredictor().params._replace(shrinkage=np.float32(0.5), limit=np.float32(1.0))
    predictor = RuntimePredictor(params)  # its network is evaluated, whatever it says
    for name, score in (("base", predictor.base_log_seconds), ("graph_network", predictor.log_seconds)):
        start = time.perf_counter()
        jax.block_until_ready(score(candidates, hardware))
        figures[f"{name}_compile_seconds"] = time.perf_counter() - start
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(score(candidates, hardware))
            times.append(time.perf_counter() - start)
        figures[f"{name}_candidates_per_second"] = batch / statistics.median(times)
    limit = product_rate(10) / multiply_adds(params.network)
    figures["graph_network_limit"] = limit
    figures["graph_network_ratio_to_limit"] = figures["graph_network_candidates_per_second"] / limit
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--batch", type=int, help=f"candidates scored at once (default by backend: {BATCH})")
    args = parser.parse_args()
    use_device(args.device)
    import jax

    batch = BATCH[jax.default_backend()] if args.batch is None else args.batch
    if batch < 1:
        parser.error(f"--batch ({batch}) must be at least 1")
    figures = measure(args.repeats, batch)
    ratios = {name: figures[name] / value for name, value in PEER.items()}
    finish("prediction", {"batch": batch, **figures, "peer": PEER, "ratio_to_peer": ratios}, record=args.record)


if __name__ == "__main__":
    main()
