"""Environment steps and learner updates a second of the Anakin runtime on CartPole-v1, next to published peers.

The settings are the peers': same simulations, environments, batch, replay ratio and bins; network widths as near as they come
(Stoix has a GRU beside its layers). Peers' figures are of another session, by their own code on two cores of the first record's
kind: ratios to them on any other machine say nothing, and ``peers.py`` measures peers in turns. The floor is what the network
alone costs: simulations + 1 evaluations a step, and forward and backward of the loss an update.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from common import finish, make_parser, use_device

STOIX = {
    "search.num_simulations": 25,
    "runtime.num_envs": 64,
    "train.batch_size": 256,
    "train.replay_ratio": 4.0,
    "network.num_bins": 601,
}
MUJAX = {
    "search.num_simulations": 16,
    "runtime.num_envs": 16,
    "train.batch_size": 256,
    "train.replay_ratio": 2.0,
    "train.reanalyze_fraction": 0.5,
    "network.width": 128,
    "network.num_bins": 255,
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "stoix_puct": ({**STOIX, "search.algorithm": "muzero"}, {"env_steps_per_second": 2000, "updates_per_second": 31}),
    "stoix_gumbel": (STOIX, {"env_steps_per_second": 2300, "updates_per_second": 36}),
    "mujax_gumbel": (MUJAX, {"env_steps_per_second": 1090, "updates_per_second": 8.5}),
    "preset": ({}, {}),
}


def measure(changes: dict[str, Any], repeats: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from muzerox import Config
    from muzerox.algorithms import make_algorithm
    from muzerox.envs import make_env
    from muzerox.runtimes import make_runtime

    config = Config.preset("gymnax:CartPole-v1").replace({"train.unroll_steps": 5, **changes} if changes else {})
    env = make_env(config.env)
    algorithm = make_algorithm(config, env.spec)
    before = time.perf_counter()
    runtime = make_runtime(config, env, algorithm)
    state, report = runtime.run(runtime.init(jax.random.key(0)), 1)
    compile_seconds = time.perf_counter() - before
    env_rates, update_rates = [], []
    for _ in range(repeats):
        start, steps, updates = time.perf_counter(), report.env_steps, report.updates
        state, report = runtime.run(state, 10)
        seconds = time.perf_counter() - start
        env_rates.append((report.env_steps - steps) / seconds)
        update_rates.append((report.updates - updates) / seconds)

    evaluations = config.search.num_simulations + 1

    @jax.jit
    def network(observation: jax.Array) -> jax.Array:
        """As many sequential evaluations as a step's search makes."""
        return jax.lax.fori_loop(
            0, evaluations * 100, lambda _, x: x + jnp.mean(algorithm.value(state.learner.params, x)) * 1e-9, observation
        )

    observation = state.actors.timestep.observation
    jax.block_until_ready(network(observation))
    start = time.perf_counter()
    jax.block_until_ready(network(observation))
    network_seconds = (time.perf_counter() - start) / 100
    return {
        "changes": changes,
        "compile_seconds": compile_seconds,
        "env_steps_per_second": statistics.median(env_rates),
        "updates_per_second": statistics.median(update_rates),
        "network_seconds_per_row": network_seconds,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=sorted(SETTINGS), action="append")
    args = parser.parse_args()
    use_device(args.device)
    figures: dict[str, Any] = {}
    for name, (changes, peer) in SETTINGS.items():
        if args.only and name not in args.only:
            continue
        figures[name] = row = measure(changes, args.repeats)
        row["peer"] = peer
        row["ratio_to_peer"] = {key: row[key] / value for key, value in peer.items()}
        ratio = "".join(f", {value:.1f}x {key}" for key, value in row["ratio_to_peer"].items())
        print(
            f"{name}: {row['env_steps_per_second']:,.0f} environment steps/s, {row['updates_per_second']:,.0f} updates/s{ratio}",
            file=sys.stderr,
            flush=True,
        )
    finish("throughput", figures, record=args.record)


if __name__ == "__main__":
    main()
