"""mujax (Gumbel MuZero) on gymnasium's CartPole-v1: its own ``run_experiment``, with environments as its command makes them.

Threads are its actors, each with a vector environment of gymnasium's that steps on the host. Counts come from what it logs at
the end of an episode, at most once a second: both are of one counter. Its representation, dynamics and two heads have
the layers asked for each, around an embedding of 32 as in its preset of that width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from mujax import ExperimentConfig, GMZConfig, run_experiment
from steady import CAPACITY, ENV, MIN_SIZE, Window, make_parser


class Counts:
    """A writer of mujax's metrics that keeps only how far it has come."""

    def __init__(self, window: Window):
        self._window = window

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if "actor/actor_steps" in scalars:
            self._window.mark(int(scalars["actor/actor_steps"]), step)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Nothing to keep."""

    def close(self) -> None:
        """Nothing to close."""


def main() -> None:
    args = make_parser(__doc__, threads="actor threads, each with its share of the environments").parse_args()
    layers = (args.width,) * args.depth
    config = GMZConfig(
        num_simulations=args.simulations,
        batch_size=args.batch,
        replay_ratio=args.replay_ratio,
        reanalyze_ratio=args.reanalyze,
        num_unroll_steps=args.unroll,
        num_bootstrapping=args.td_steps,
        num_bins=args.bins,
        representation_layer_sizes=layers,
        prediction_layer_sizes=layers,
        dynamics_layer_sizes=layers,
        embedding_dim=32,
        max_replay_size=CAPACITY,
        min_replay_size=MIN_SIZE,
    )

    def environments(_seed: int) -> gymnasium.vector.VectorEnv:
        kwargs = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
        return gymnasium.make_vec(ENV, args.envs // args.threads, vectorization_mode="sync", vector_kwargs=kwargs)

    window = Window(args, ("mujax", "jax", "gymnasium"))
    run_experiment(
        ExperimentConfig(config, environments, num_actors=args.threads, seed=args.seed, writer=Counts(window)),
    )


if __name__ == "__main__":
    main()
