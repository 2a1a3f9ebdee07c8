"""Where one self-play step and one update go: each part as a program of its own, timed in alternation with the whole.

Parts do not add up to the whole: XLA fuses across them, and a program of its own pays for its call. ``network`` is the floor
of the search, as many sequential evaluations as it makes; ``tree`` is what the search takes beyond that. Self-play steps a
second are given for every search engine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import finish, make_parser, use_device

ENVIRONMENTS = ("gymnax:CartPole-v1", "gymnax:Breakout-MinAtar", "pgx:connect_four")


def make_parts(config: Any) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]]]:
    """By name, compiled calls: of a self-play step, and of an update."""
    import jax
    import jax.numpy as jnp

    from muzerox import replay
    from muzerox.algorithms import make_algorithm
    from muzerox.envs import auto_reset, make_env
    from muzerox.learner import make_batch, make_update
    from muzerox.networks import make_model
    from muzerox.precision import POLICIES, resolve
    from muzerox.runtimes import make_runtime
    from muzerox.search import ENGINES
    from muzerox.selfplay import EpisodeStats, make_act
    from muzerox.types import Algorithm, Environment

    env = make_env(config.env)
    if not isinstance(env, Environment):
        raise SystemExit(f"{config.env}: runs on the host; this takes Anakin apart, whose environments are in JAX")
    spec, train = env.spec, config.train
    algorithm = make_algorithm(config, spec)
    model = make_model(config.network, spec, POLICIES[resolve(config.precision).level])
    runtime = make_runtime(config, env, algorithm)
    state = runtime.prefill(runtime.init(jax.random.key(0)))
    key, params, actors, ring = jax.random.key(1), state.learner.params, state.actors, state.replay
    now = actors.timestep
    legal = now.legal if spec.has_legal else None

    def play(search: Algorithm) -> Callable[..., Any]:
        return make_act(env, search, random_action=train.random_action)

    def network(params: Any, observation: jax.Array) -> jax.Array:
        hidden = model.represent(params, observation)
        logits, value = model.predict(params, hidden)

        def step(_: jax.Array, carry: tuple) -> tuple:
            hidden, action, total = carry
            hidden, reward = model.dynamics(params, hidden, action)
            logits, value = model.predict(params, hidden)
            return hidden, jnp.argmax(logits, axis=-1).astype(jnp.int32), total + value[:, 0] + reward[:, 0]

        start = (hidden, jnp.argmax(logits, axis=-1).astype(jnp.int32), value[:, 0])
        return jax.lax.fori_loop(0, config.search.num_simulations, step, start)[2]

    def environment(key: jax.Array, actors: Any, action: jax.Array) -> Any:
        return jax.vmap(auto_reset(env).step)(jax.random.split(key, action.shape[0]), actors.env_state, action)

    start = replay.sample(config.replay, key, ring, train.batch_size, config.sequence_length)
    batch = make_batch(key, config, spec, algorithm, params, ring, start)
    targets = algorithm.targets(params, batch)

    def sample(key: jax.Array, params: Any, ring: Any) -> Any:
        start = replay.sample(config.replay, key, ring, train.batch_size, config.sequence_length)
        return make_batch(key, config, spec, algorithm, params, ring, start)

    def loss(params: Any, batch: Any, targets: Any) -> jax.Array:
        return jnp.mean(algorithm.loss(params, batch, targets).loss)

    def update(key: jax.Array, learner: Any, ring: Any) -> Any:
        learner, ring, metrics = make_update(config, spec, algorithm)(key, learner, ring)
        return learner, ring.replace(storage=None), metrics  # in a training the ring is donated; here it would be copied

    def call(function: Callable[..., Any], *arguments: Any, static: tuple[int, ...] = ()) -> Callable[[], Any]:
        program = jax.jit(function, static_argnums=static)
        return lambda: jax.block_until_ready(program(*arguments))

    acting = {
        "whole": call(play(algorithm), key, params, actors, EpisodeStats.zero()),
        "search": call(algorithm.act, key, params, now.observation, legal, True, static=(4,)),
        "network": call(network, params, now.observation),
        "environment": call(environment, key, actors, jnp.zeros(config.runtime.num_envs, jnp.int32)),
    }
    for engine in ENGINES:
        search = make_algorithm(config.replace({"search.engine": engine}), spec)
        acting[f"whole, {engine}"] = call(play(search), key, params, actors, EpisodeStats.zero())
    learning = {
        "whole": call(update, key, state.learner, ring),
        "sample": call(sample, key, params, ring),
        "targets": call(algorithm.targets, params, batch),
        "forward": call(loss, params, batch, targets),
        "gradient": call(jax.grad(loss), params, batch, targets),
    }
    return acting, learning


def measure(parts: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each."""
    for part in parts.values():
        part()
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            before = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - before)
    return {name: 1e3 * statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--env", action="append", help=f"preset to profile (default {' and '.join(ENVIRONMENTS)})")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the preset")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    use_device(args.device)
    from muzerox import Config
    from muzerox.config_io import parse_assignment

    figures: dict[str, Any] = {}
    for env in args.env or ENVIRONMENTS:
        config = Config.preset(env).replace(dict(parse_assignment(setting) for setting in args.set))
        acting, learning = (measure(parts, args.rounds) for parts in make_parts(config))
        acting["tree"] = acting["search"] - acting["network"]
        steps = config.train.batch_size / config.train.replay_ratio / config.runtime.num_envs  # of all environments, an update
        figures[env] = {"self_play_ms": acting, "update_ms": learning, "self_play_steps_an_update": steps}
        for title, parts in (("self-play step", acting), ("update", learning)):
            print(f"{env}, one {title} of {parts['whole']:.2f} ms", file=sys.stderr)
            for name, ms in parts.items():
                if not name.startswith("whole"):
                    print(f"  {name:12} {ms:9.2f} ms {100 * ms / parts['whole']:5.0f}%", file=sys.stderr)
        for name, ms in acting.items():
            if name.startswith("whole, "):
                rate = 1e3 * config.runtime.num_envs / ms
                print(f"  self-play with {name.removeprefix('whole, ')}: {rate:,.0f} environment steps/s", file=sys.stderr)
        share = steps * acting["whole"] / (steps * acting["whole"] + learning["whole"])
        print(f"  of a training, {100 * share:.0f}% is self-play", file=sys.stderr, flush=True)
    finish("breakdown", {"environments": figures}, record=args.record)


if __name__ == "__main__":
    main()
