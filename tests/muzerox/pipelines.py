"""Small pipelines of threads over an environment that counts, for tests."""

from __future__ import annotations

from typing import Any

from toys import counting_env, small_config

from muzerox.algorithms import make_algorithm
from muzerox.config import Config
from muzerox.envs.host import on_host
from muzerox.runtimes import make_runtime
from muzerox.types import HostEnvironment, Runtime

HOST = on_host(counting_env())


def pipeline_config(**changes: Any) -> Config:
    return small_config(
        "gymnasium:CartPole-v1",
        **{
            "runtime__kind": "sebulba",
            "runtime__selfplay_workers": 2,
            "replay__capacity": 1024,
            "runtime__loop_count": 3,
            **changes,
        },
    )


def make(config: Config, env: HostEnvironment = HOST) -> Runtime:
    return make_runtime(config, env, make_algorithm(config, env.spec))
