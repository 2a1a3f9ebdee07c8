"""LightZero (Gumbel MuZero) on gymnasium's CartPole-v1: its own ``train_muzero`` on its own environment, with its C++ tree.

Threads are torch's. LightZero collects whole episodes, then updates: counts are marked where a collection begins. Its
``replay_ratio`` counts updates an environment step, not sequences, and is rounded down to whole updates a collection. Of what was
tried, the faster: environments in its own process rather than in one each, and four episodes an environment in a
collection rather than one. Layers as wide as asked for; their number is LightZero's own.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from ding.worker import BaseLearner
from easydict import EasyDict
from lzero.entry import train_muzero
from lzero.worker import MuZeroCollector
from steady import CAPACITY, ENV, Window, make_parser

NEVER = 1_000_000_000


def count(window: Window) -> None:
    """Tells the window how far LightZero has come each time it begins to collect."""
    learners: list[BaseLearner] = []
    make, collect = BaseLearner.__init__, MuZeroCollector.collect

    def made(self: BaseLearner, *args: Any, **kwargs: Any) -> None:
        learners.append(self)
        make(self, *args, **kwargs)

    def collecting(self: MuZeroCollector, *args: Any, **kwargs: Any) -> Any:
        window.mark(self.envstep, learners[0].train_iter)
        return collect(self, *args, **kwargs)

    BaseLearner.__init__, MuZeroCollector.collect = made, collecting


def main() -> None:
    args = make_parser(__doc__, threads="threads of torch").parse_args()
    torch.set_num_threads(args.threads)
    settings = {
        "exp_name": "run",
        "env": {
            "env_id": ENV,
            "continuous": False,
            "manually_discretization": False,
            "collector_env_num": args.envs,
            "evaluator_env_num": 1,
            "n_evaluator_episode": 1,
            "stop_value": NEVER,
            "manager": {"shared_memory": False},
        },
        "policy": {
            "model": {
                "model_type": "mlp",
                "observation_shape": 4,
                "action_space_size": 2,
                "latent_state_dim": args.width,
                "discrete_action_encoding_type": "one_hot",
                "norm_type": "BN",
                "self_supervised_learning_loss": False,
                "support_scale": args.bins // 2,
                "reward_support_size": args.bins,
                "value_support_size": args.bins,
            },
            "model_path": None,
            "cuda": torch.cuda.is_available(),
            "env_type": "not_board_games",
            "num_simulations": args.simulations,
            "max_num_considered_actions": 2,
            "batch_size": args.batch,
            "update_per_collect": None,
            "replay_ratio": args.replay_ratio / args.batch,
            "reanalyze_ratio": args.reanalyze,
            "num_unroll_steps": args.unroll,
            "td_steps": args.td_steps,
            "game_segment_length": 50,
            "collector_env_num": args.envs,
            "n_episode": 4 * args.envs,
            "evaluator_env_num": 1,
            "eval_freq": NEVER,
            "replay_buffer_size": CAPACITY,
            "optim_type": "Adam",
            "learning_rate": 0.003,
            "piecewise_decay_lr_scheduler": False,
            "ssl_loss_weight": 0,
        },
    }
    parts = {
        "env": {"type": "cartpole_lightzero", "import_names": ["zoo.classic_control.cartpole.envs.cartpole_lightzero_env"]},
        "env_manager": {"type": "base"},
        "policy": {"type": "gumbel_muzero", "import_names": ["lzero.policy.gumbel_muzero"]},
    }
    os.chdir(tempfile.mkdtemp())  # where it writes its logs
    count(Window(args, ("LightZero", "DI-engine", "torch", "gymnasium")))
    train_muzero([EasyDict(settings), EasyDict(parts)], seed=args.seed)


if __name__ == "__main__":
    main()
