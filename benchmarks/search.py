"""Our search loop against mctx's, and both against the network alone, at several shapes.

The network alone is as many sequential evaluations of the recurrent function as a search makes. Programs of a shape are timed
in alternation, one call each a round; figures are medians over rounds. Networks are random, heads included, so that trees
are neither lines nor stars. What is computed is what self-play reads (action, policy, root value); ``--tree`` asks for the
whole tree. Memory is what XLA plans for temporaries and results. Seconds of compilation are of one program at a time, unless
``--jobs`` compiles several at once.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import finish, make_parser, use_device

# batch, simulations, actions; and what is aimed at: times faster than mctx, Gumbel and PUCT.
SHAPES: dict[str, tuple[tuple[int, int, int], tuple[float, float]]] = {
    "mlp 256, 16, 2": ((256, 16, 2), (1.2, 2.0)),
    "mlp 1024, 50, 2": ((1024, 50, 2), (2.5, 3.0)),
    "mlp 256, 50, 18": ((256, 50, 18), (3.0, 10.0)),
    "mlp 64, 200, 82": ((64, 200, 82), (8.0, 12.0)),
    "mlp 8, 16, 2": ((8, 16, 2), (1.0, 1.0)),
    "mlp 8, 50, 18": ((8, 50, 18), (1.0, 1.0)),
    "mlp 64, 25, 2": ((64, 25, 2), (1.0, 1.0)),
    "resnet 64, 32, 7": ((64, 32, 7), (1.0, 1.0)),
}
POLICIES = ("gumbel_muzero_policy", "muzero_policy")


def make_programs(name: str, whole_tree: bool, side_by_side: bool = False) -> dict[str, Callable[[], Any]]:
    """By name: compiles a program, and returns how to call it, seconds of compilation and bytes."""
    import jax
    import jax.numpy as jnp
    import mctx

    from muzerox.compilation import compiler_options
    from muzerox.config import NetworkConfig
    from muzerox.networks import make_model
    from muzerox.precision import POLICIES as PRECISION
    from muzerox.search import fused
    from muzerox.transforms import expected_value
    from muzerox.types import EnvSpec

    batch, simulations, actions = SHAPES[name][0]
    if name.startswith("mlp"):
        shape: tuple[int, ...] = (64,)
        network = NetworkConfig(kind="mlp", width=64, depth=2)
    else:
        shape, network = (6, 7, 2), NetworkConfig(kind="resnet", width=64, depth=4)
    spec = EnvSpec(id="search:random", observation_shape=shape, observation_dtype="float32", num_actions=actions)
    model = make_model(network, spec, PRECISION["O0"])
    leaves, tree = jax.tree.flatten(model.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = jax.tree.unflatten(tree, [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])
    observation = jax.random.normal(jax.random.key(2), (batch, *shape))

    def recurrent(params: Any, key: jax.Array, action: jax.Array, hidden: jax.Array) -> tuple[Any, jax.Array]:
        del key
        hidden, reward = model.dynamics(params, hidden, action)
        prior, value = model.predict(params, hidden)
        output = mctx.RecurrentFnOutput(
            reward=expected_value(reward, network.reward_bound),
            discount=jnp.full(action.shape, 0.99),
            prior_logits=prior,
            value=expected_value(value, network.value_bound),
        )
        return output, hidden

    @jax.jit
    def prepare() -> Any:
        hidden = model.represent(params, observation)
        prior, value = model.predict(params, hidden)
        return mctx.RootFnOutput(prior_logits=prior, value=expected_value(value, network.value_bound), embedding=hidden)

    root, key = prepare(), jax.random.key(3)

    def alone(params: Any, key: jax.Array, root: Any) -> Any:
        def step(_: jax.Array, carry: tuple) -> tuple:
            action, total, hidden = carry
            output, hidden = recurrent(params, key, action, hidden)
            total = total + output.value + output.reward
            return jnp.argmax(output.prior_logits, axis=-1).astype(jnp.int32), total, hidden

        return jax.lax.fori_loop(0, simulations, step, (jnp.zeros(batch, jnp.int32), root.value, root.embedding))

    def searching(policy: Callable[..., Any]) -> Callable[..., Any]:
        def run(params: Any, key: jax.Array, root: Any) -> Any:
            output = policy(params, key, root, recurrent, simulations)
            return output if whole_tree else (output.action, output.action_weights, output.search_tree.node_values[:, 0])

        return run

    functions = {"network": alone}
    for module in (mctx, fused):
        engine = module.__name__.rpartition(".")[2]
        functions |= {f"{engine}.{policy}": searching(getattr(module, policy)) for policy in POLICIES}

    if side_by_side:
        functions["side by side"] = searching(functools.partial(fused.gumbel_muzero_policy, side_by_side=True))

    def compiled(function: Callable[..., Any]) -> Callable[[], Any]:
        def build() -> Any:
            before = time.perf_counter()
            program = jax.jit(function, compiler_options=compiler_options()).lower(params, key, root).compile()
            seconds = time.perf_counter() - before
            memory = program.memory_analysis()
            bytes_ = None if memory is None else memory.temp_size_in_bytes + memory.output_size_in_bytes
            return (lambda: jax.block_until_ready(program(params, key, root))), seconds, bytes_

        return build

    return {program: compiled(function) for program, function in functions.items()}


def measure(name: str, rounds: int, whole_tree: bool, side_by_side: bool, jobs: int) -> dict[str, Any]:
    builds = make_programs(name, whole_tree, side_by_side)
    with ThreadPoolExecutor(jobs) as pool:
        programs = dict(zip(builds, pool.map(lambda build: build(), builds.values()), strict=True))
    for call, _, _ in programs.values():
        call()
    seconds: dict[str, list[float]] = {program: [] for program in programs}
    for _ in range(rounds):
        for program, (call, _, _) in programs.items():
            before = time.perf_counter()
            call()
            seconds[program].append(time.perf_counter() - before)
    medians = {program: statistics.median(times) for program, times in seconds.items()}
    row: dict[str, Any] = {
        "milliseconds": {program: 1e3 * median for program, median in medians.items()},
        "compile_seconds": {program: x[1] for program, x in programs.items()},
        "bytes": {program: x[2] for program, x in programs.items()},
    }
    for policy, aim in zip(POLICIES, SHAPES[name][1], strict=True):
        mctx, ours = f"mctx.{policy}", f"fused.{policy}"
        pairs = zip(seconds[mctx], seconds[ours], strict=True)
        row[policy] = {
            "speedup": statistics.median(theirs / our for theirs, our in pairs),
            "aim": aim,
            "mctx_to_network": medians[mctx] / medians["network"],
            "fused_to_network": medians[ours] / medians["network"],
        }
    return row


def shape(text: str) -> tuple[int, int, int]:
    """``"16,32,3"``. Raises ValueError."""
    batch, simulations, actions = (int(part) for part in text.split(","))
    if min(batch, simulations) < 1 or actions < 2:
        raise ValueError(text)
    return batch, simulations, actions


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", choices=list(SHAPES), action="append")
    parser.add_argument("--jobs", type=int, default=1, help="programs to compile at once (default 1)")
    parser.add_argument("--side-by-side", action="store_true", help="time our Gumbel search with side_by_side=True, too")
    parser.add_argument("--tree", action="store_true", help="compute the whole tree, not only what self-play reads of it")
    parser.add_argument(
        "--mlp",
        type=shape,
        action="append",
        default=[],
        metavar="B,N,A",
        help="roots, simulations and actions of a shape instead",
    )
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs ({args.jobs}) must be at least 1")
    use_device(args.device)
    own = {f"mlp {batch}, {simulations}, {actions}": (batch, simulations, actions) for batch, simulations, actions in args.mlp}
    SHAPES.update({name: SHAPES.get(name, (numbers, (1.0, 1.0))) for name, numbers in own.items()})
    rows: dict[str, Any] = {}
    columns = ("shape", "policy", "network", "mctx", "fused", "speedup", "aim", "to network", "compile s", "MiB")
    print("{:18} {:21} {:>9} {:>9} {:>9} {:>8} {:>6} {:>11} {:>13} {:>13}".format(*columns), file=sys.stderr)
    for name in [*own, *(args.only or [])] or SHAPES:
        rows[name] = row = measure(name, args.rounds, args.tree, args.side_by_side, args.jobs)
        for policy in POLICIES:
            ms, figures = row["milliseconds"], row[policy]
            mctx, ours = f"mctx.{policy}", f"fused.{policy}"
            mib = [x / 2**20 if x is not None else float("nan") for x in (row["bytes"][mctx], row["bytes"][ours])]
            print(
                f"{name:18} {policy:21} {ms['network']:9.2f} {ms[mctx]:9.2f} {ms[ours]:9.2f} {figures['speedup']:7.2f}x"
                f" {figures['aim']:5.1f}x {figures['mctx_to_network']:4.1f} to {figures['fused_to_network']:3.1f}"
                f" {row['compile_seconds'][mctx]:5.1f} to {row['compile_seconds'][ours]:4.1f}"
                f" {mib[0]:5.1f} to {mib[1]:4.1f}",
                file=sys.stderr,
                flush=True,
            )
        if args.side_by_side:
            ms, seconds = row["milliseconds"], row["compile_seconds"]
            beside = f"{ms['side by side']:9.2f}, compiled in {seconds['side by side']:.1f} s"
            print(f"{name:18} {'Gumbel, side by side':21} {beside:>29}", file=sys.stderr, flush=True)
    finish("search", {"whole_tree": args.tree, "shapes": rows}, record=args.record)


if __name__ == "__main__":
    main()
