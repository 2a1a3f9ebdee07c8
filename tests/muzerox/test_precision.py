"""Precision levels in the programs they make, and loss scaling through the real update."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import TINY
from toys import counting_env, random_params, small_config

from muzerox import replay, train
from muzerox.algorithms import make_algorithm
from muzerox.config import Config, PrecisionConfig
from muzerox.errors import RunFailed
from muzerox.learner import LearnerState, init_learner, make_batch, make_update
from muzerox.precision import POLICIES, LossScale, adjust_loss_scale, cast, make_loss_scale, pack, resolve, unpack
from muzerox.replay import ReplayState, Sample
from muzerox.training import _check_progress
from muzerox.types import Algorithm, Skips, Transition

LEVELS = [("O0", "float32"), ("O1", "bfloat16"), ("O1_float16", "float16"), ("O2", "bfloat16")]
HLO = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
E, ROWS = 4, 20
ENV = counting_env()


def _setup(level: str, **changes: Any) -> tuple[Config, Algorithm]:
    config = small_config(precision__level=level, search__num_simulations=2, **changes)
    return config, make_algorithm(config, ENV.spec)


def _ring(config: Config, observation_scale: float = 1.0) -> ReplayState:
    """Rows of random numbers: what they say does not matter here."""
    rng = np.random.default_rng(0)
    shape = (ROWS, E)
    policy = rng.dirichlet(np.ones(3), shape)
    rows = Transition(
        observation=jnp.asarray(rng.normal(size=(*shape, 3)) * observation_scale, jnp.float32),
        action=jnp.asarray(rng.integers(0, 3, shape), jnp.int32),
        reward=jnp.asarray(rng.normal(size=shape), jnp.float32),
        terminated=jnp.asarray(rng.random(shape) < 0.1),
        truncated=jnp.zeros(shape, bool),
        policy=jnp.asarray(policy, jnp.float32),
        legal=jnp.ones((*shape, 3), bool),
        final_observation=jnp.zeros((*shape, 3)),
    )
    ring = replay.init(config.replay, jax.tree.map(lambda x: x[0], rows))
    return jax.jit(lambda ring, rows: jax.lax.scan(lambda r, row: (replay.add(r, row), None), ring, rows)[0])(ring, rows)


def _dot_dtypes(lowered: Any) -> set[str]:
    """Operand dtypes of the products of matrices in a lowered program."""
    operands = re.findall(r"stablehlo\.dot_general.*?: \((.*?)\)", lowered.as_text())
    assert len(operands) >= 8
    return {dtype for text in operands for dtype in re.findall(r"x([a-z]\w*)>", text)}


@functools.cache
def _programs(level: str) -> dict[str, Any]:
    """Acting and updating at a level, lowered."""
    config, algorithm = _setup(level)
    learner = jax.eval_shape(lambda key: init_learner(key, config, algorithm), jax.random.key(0))
    observation, legal = jnp.zeros((E, 3)), jnp.ones((E, 3), bool)
    act = jax.jit(algorithm.act, static_argnums=4)
    update = jax.jit(make_update(config, ENV.spec, algorithm))
    return {
        "act": act.lower(jax.random.key(0), learner.params, observation, legal, True),
        "update": update.lower(jax.random.key(0), learner, jax.eval_shape(lambda: _ring(config))),
    }


@pytest.mark.parametrize("name", ["act", "update"])
@pytest.mark.parametrize(("level", "compute"), LEVELS)
def test_matrices_are_multiplied_in_the_dtype_of_the_level(level: str, compute: str, name: str) -> None:
    """In the lowered program, which is what the backend is asked for."""
    assert _dot_dtypes(_programs(level)[name]) == {HLO[compute]}


def _compiled_dot_dtypes(text: str) -> Counter[str]:
    """How many products of matrices a compiled program has, by the dtype of their operands."""
    found: Counter[str] = Counter()
    for computation in re.split(r"\n\n", text):
        dtypes = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", computation))
        for operand in re.findall(r" dot\((%[\w.-]+),", computation):
            found[dtypes[operand]] += 1
    return found


@pytest.mark.parametrize(("level", "dtype"), [("O0", "f32"), ("O1", "bf16"), ("O2", "bf16")])
def test_the_compiled_program_multiplies_in_the_dtype_of_the_level(level: str, dtype: str) -> None:
    programs = {name: _compiled_dot_dtypes(lowered.compile().as_text()) for name, lowered in _programs(level).items()}
    assert programs["act"].total() >= 8
    assert programs["update"].total() >= 16
    if dtype == "f32" or jax.default_backend() != "cpu":
        assert all(set(found) == {dtype} for found in programs.values())
    else:
        # XLA for CPU widens a product over an odd dimension (the observation's 3, here) or with a transposed first operand
        # (the gradients of kernels).
        assert programs["act"][dtype] >= programs["act"].total() - 1
        assert programs["update"][dtype] > programs["update"].total() / 2


@pytest.mark.parametrize("level", POLICIES)
def test_parameters_targets_and_losses_are_float32(level: str) -> None:
    config, algorithm = _setup(level)

    def everything(key: jax.Array) -> dict[str, Any]:
        learner, ring = init_learner(key, config, algorithm), _ring(config)
        start = Sample(jnp.zeros(8, jnp.int32), jnp.zeros(8, jnp.int32), jnp.ones(8))
        batch = make_batch(key, config, ENV.spec, algorithm, learner.target_params, ring, start)
        targets = algorithm.targets(learner.target_params, batch)
        gradient = jax.grad(lambda params: jnp.mean(algorithm.loss(params, batch, targets).loss))(learner.params)
        after, _, metrics = make_update(config, ENV.spec, algorithm)(key, learner, ring)
        return {
            "params": (learner.params, after.params, after.target_params),
            "optimizer": (after.opt_state, after.loss_scale),
            "targets": targets,
            "loss": algorithm.loss(learner.params, batch, targets),
            "gradient": gradient,
            "metrics": metrics,
            "decision": algorithm.act(key, learner.params, batch.observation, None, True),
            "value": algorithm.value(learner.params, batch.observation),
        }

    for name, tree in jax.eval_shape(everything, jax.random.key(0)).items():
        for leaf in jax.tree.leaves(tree):
            assert leaf.dtype in (jnp.float32, jnp.int32), name


def test_auto_is_float32_on_cpu_and_scales_follow_the_level() -> None:
    assert {level: policy.compute for level, policy in POLICIES.items()} == dict(LEVELS)
    for level in POLICIES:
        scale = resolve(PrecisionConfig(level=level)).loss_scale
        assert scale == ("dynamic" if level == "O1_float16" else "none")
    if jax.default_backend() == "cpu":
        assert resolve(PrecisionConfig()).level == "O0"
    tree = cast({"a": jnp.ones(2), "b": jnp.ones(2, jnp.int32), "c": jnp.ones(2, bool)}, "bfloat16")
    assert [leaf.dtype for leaf in jax.tree.leaves(tree)] == [jnp.bfloat16, jnp.int32, jnp.bool_]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_packed_comes_back_bit_for_bit(dtype: str) -> None:
    x = jnp.array([0.0, -0.0, 1.0, 1 / 3, -2.5e-6, 6e4, jnp.inf, -jnp.inf, jnp.nan])
    packed = pack(x, dtype)
    assert packed.dtype.itemsize == jnp.dtype(dtype).itemsize
    back = unpack(packed, dtype)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back.astype(jnp.float32), x.astype(dtype).astype(jnp.float32))


@pytest.mark.parametrize("kind", ["none", "static", "dynamic"])
@settings(max_examples=25)
@given(finite=st.lists(st.booleans(), max_size=30), period=st.integers(1, 4), exponent=st.integers(0, 40))
def test_loss_scale_sequence(kind: str, finite: list[bool], period: int, exponent: int) -> None:
    config = PrecisionConfig(level="O0", loss_scale=kind, initial_loss_scale=2.0**exponent, loss_scale_period=period)
    state = make_loss_scale(config)
    scale, run = (1.0 if kind == "none" else 2.0**exponent), 0
    assert (float(state.scale), int(state.good_steps)) == (scale, 0)
    for ok in finite:
        state = adjust_loss_scale(config, state, jnp.bool_(ok))
        if kind == "dynamic":
            run = run + 1 if ok else 0
            if not ok:
                scale = max(scale / 2, 1.0)
            elif run == period:
                scale, run = min(scale * 2, 2.0**40), 0
        assert (float(state.scale), int(state.good_steps)) == (scale, run)
        assert state.scale.dtype == jnp.float32


def _same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def _what_learning_changes(learner: LearnerState, ring: ReplayState) -> tuple:
    return learner.params, learner.opt_state, ring.priority, ring.row_priority, ring.max_priority


def test_float16_overflow_skips_the_update_and_halves_the_scale() -> None:
    """From a scale no float16 gradient survives, down until updates are made, and up again while they are finite."""
    period = 3
    config, algorithm = _setup("O1_float16", precision__initial_loss_scale=2.0**40, precision__loss_scale_period=period)
    update = jax.jit(make_update(config, ENV.spec, algorithm))
    learner, ring = init_learner(jax.random.key(0), config, algorithm), _ring(config)
    params = random_params(jax.random.key(1), learner.params)
    learner = learner.replace(params=params, target_params=jax.tree.map(jnp.copy, params))
    scale, finite_in_a_row, skips, makes, doublings = 2.0**40, 0, 0, 0, 0
    for number in range(60):
        assert float(learner.loss_scale.scale) == scale
        before = _what_learning_changes(learner, ring)
        learner, ring, metrics = update(jax.random.key(number), learner, ring)
        after = _what_learning_changes(learner, ring)
        assert float(metrics["loss_scale"]) == scale
        assert int(learner.updates) == number + 1
        if float(metrics["skipped"]):
            assert not np.isfinite(float(metrics["grad_norm"]))
            assert _same(before, after)
            scale, finite_in_a_row, skips = scale / 2, 0, skips + 1
        else:
            assert np.isfinite(float(metrics["grad_norm"]))
            assert not any(_same(b, a) for b, a in zip(before[:3], after[:3], strict=True))
            finite_in_a_row, makes = finite_in_a_row + 1, makes + 1
            if finite_in_a_row == period:
                scale, finite_in_a_row, doublings = scale * 2, 0, doublings + 1
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((learner.params, ring.priority)))
    assert skips >= 10
    assert makes >= 10
    assert doublings >= 2


def test_a_run_finds_its_loss_scale_and_ends_when_there_is_none(tmp_path: Path) -> None:
    """However many reports the first updates are skipped over; a scale that stays too large is another matter."""
    config = Config.preset("gymnax:CartPole-v1").replace(
        {**TINY, "precision.level": "O1_float16", "precision.initial_loss_scale": 2.0**40, "runtime.loop_count": 1}
    )
    train(config, tmp_path / "dynamic", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "dynamic/metrics.jsonl").read_text().splitlines()]
    scales = [row["loss_scale"] for row in rows if "loss_scale" in row]
    assert rows[0]["skipped_updates"]
    assert "loss_scale" not in rows[0]
    assert 1.0 <= scales[-1] < 2.0**30
    said = r"not one of \d+ updates in a row had finite gradients; lower precision\.initial_loss_scale \(or set precision\."
    with pytest.raises(RunFailed, match=said):
        train(config.replace({"precision.loss_scale": "static"}), tmp_path / "static", quiet=True)


@pytest.mark.parametrize(("level", "most"), [("O0", 10), ("O1", 10), ("O1_float16", 40)])
def test_so_many_skipped_in_a_row_end_a_training_and_no_fewer(level: str, most: int) -> None:
    """One batch out of range ends nothing, whatever the portion it came in."""
    config = small_config(precision__level=level)
    for skipped in (0, 1, most):
        _check_progress(config, Skips(longest=skipped))
    said = rf"not one of {most + 1} updates in a row had finite gradients; lower train\.learning_rate"
    with pytest.raises(RunFailed, match=said):
        _check_progress(config, Skips(longest=most + 1))


@given(skipped=st.lists(st.booleans(), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_skips_in_a_row_are_the_same_for_any_portion(skipped: list[bool], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(skipped)) for cut in cuts), len(skipped)]
    portions = [skipped[a:b] for a, b in itertools.pairwise(bounds)]
    found = functools.reduce(Skips.then, (functools.reduce(Skips.then, map(Skips.of, map(int, x)), Skips()) for x in portions))
    runs = [len(run) for run in "".join(" x"[x] for x in skipped).split()]
    assert (found.updates, found.total, found.longest) == (len(skipped), sum(skipped), max(runs, default=0))


def test_a_batch_out_of_range_skips_the_update_without_a_scale() -> None:
    config, algorithm = _setup("O0")
    update = jax.jit(make_update(config, ENV.spec, algorithm))
    learner, ring = init_learner(jax.random.key(0), config, algorithm), _ring(config, observation_scale=float("inf"))
    after, ring_after, metrics = update(jax.random.key(0), learner, ring)
    assert float(metrics["skipped"]) == 1.0
    assert float(metrics["loss_scale"]) == float(after.loss_scale.scale) == 1.0
    assert _same(_what_learning_changes(learner, ring), _what_learning_changes(after, ring_after))


def test_the_scale_does_not_change_what_is_learnt() -> None:
    """A power of two goes through float32 exactly: a static scale gives the update of no scale."""
    after = []
    for kind in ("none", "static"):
        config, algorithm = _setup("O0", precision__loss_scale=kind, precision__initial_loss_scale=2.0**10)
        learner, ring = init_learner(jax.random.key(0), config, algorithm), _ring(config)
        after.append(jax.jit(make_update(config, ENV.spec, algorithm))(jax.random.key(0), learner, ring)[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), after[0].params, after[1].params)
    assert isinstance(after[1].loss_scale, LossScale)
    assert float(after[1].loss_scale.scale) == 2.0**10


def test_parameters_trained_at_one_level_act_at_the_others() -> None:
    config, algorithm = _setup("O1")
    update = jax.jit(make_update(config, ENV.spec, algorithm))
    learner, ring = init_learner(jax.random.key(0), config, algorithm), _ring(config)
    for number in range(3):
        learner, ring, _ = update(jax.random.key(number), learner, ring)
    observation, legal = jax.random.normal(jax.random.key(5), (E, 3)), jnp.ones((E, 3), bool)
    values = {}
    for level in ("O0", "O2"):
        other = _setup(level)[1]
        decision = jax.jit(other.act, static_argnums=4)(jax.random.key(1), learner.params, observation, legal, False)
        np.testing.assert_allclose(decision.policy.sum(-1), 1.0, rtol=1e-5)
        values[level] = np.asarray(jax.jit(other.value)(learner.params, observation))
    np.testing.assert_allclose(values["O2"], values["O0"], rtol=0.1, atol=0.2)
