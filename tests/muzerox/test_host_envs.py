"""Environments on the host: gymnasium, simulators of one's own, JAX ones; options of ids and the contract."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
import pytest
from host_play import draw, ends, make, play
from host_simulators import Brittle
from toys import counting_env

from muzerox import info
from muzerox.envs import auto_reset, check_host_env, env_ids, is_host, make_env, on_host, registry, unavailable
from muzerox.envs.contract import ContractError
from muzerox.envs.gymnasium import simulators
from muzerox.errors import EnvironmentUnavailable
from muzerox.types import EnvSpec, HostBatch, HostEnvironment, TimeStep

CHECKED = [
    "gymnasium:CartPole-v1",
    "gymnasium:Acrobot-v1",
    "gymnasium:MountainCar-v0?max_episode_steps=20",
    "gymnasium:LunarLander-v3",
    "gymnasium:FrozenLake-v1",
    "gymnasium:host_simulators:Counting-v0",
    "gymnasium:host_simulators:Cut-v0",
    "gymnasium:host_simulators:Byte-v0",
    "ale:Pong?sticky_actions=0.25&threads=1",
    "ale:Breakout?episodic_life=false&full_actions=true",
]
GAMES = [env_id for env_id in env_ids() if env_id.startswith("ale:")]
# Of a hundred games, which differ in nothing but their ROM, every tenth.
SLOW = [env_id for env_id in env_ids() if is_host(env_id) and env_id not in GAMES] + GAMES[::10]


@pytest.fixture(scope="module", autouse=True)
def _compile_fast() -> Iterator[None]:
    """The JAX programs here run for milliseconds; nearly all of the time is compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# The contract


@pytest.mark.parametrize("env_id", CHECKED)
def test_contract(env_id: str) -> None:
    env = make(env_id)
    assert env.spec.id == env_id
    atari = env_id.startswith("ale:")
    assert check_host_env(env, steps=12 if atari else 64, num_envs=1 if atari else 4)["steps"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("env_id", SLOW)
def test_contract_of_the_rest(env_id: str) -> None:
    env = make(env_id)
    assert env.spec.id == env_id
    if env_id.startswith("ale:"):  # loading a game takes longer than playing it
        check_host_env(env._replace(make_evaluation=None), steps=12, num_envs=1)
    else:
        check_host_env(env)


@pytest.mark.parametrize("num_players", [1, 2])
def test_contract_of_a_jax_environment(num_players: int) -> None:
    seen = check_host_env(on_host(counting_env(num_players)))
    assert seen["terminated"] > 10
    assert seen["truncated"] > 10


def toy(change: Callable[[TimeStep, int], TimeStep] = lambda t, _: t, *, shared: bool = False, **spec: Any) -> HostEnvironment:
    """Three steps an episode in NumPy. ``change(time step, t)`` breaks it; ``shared`` writes into the arrays shown before."""
    calls = iter(range(10**9))

    def build(num_envs: int, seed: int) -> HostBatch:
        del seed
        state = {"t": 0}
        reused = np.zeros((num_envs, 2), np.float32)

        def show(t: int, ended: bool) -> TimeStep:
            observation = reused if shared else np.zeros((num_envs, 2), np.float32)
            observation[:] = 0 if ended else t
            shown = TimeStep(
                observation=observation,
                reward=np.zeros(num_envs, np.float32),
                terminated=np.full(num_envs, ended),
                truncated=np.zeros(num_envs, np.bool_),
                final_observation=np.full((num_envs, 2), t, np.float32),
                legal=np.ones((num_envs, 2), np.bool_),
                player=np.zeros(num_envs, np.int32),
            )
            return change(shown, next(calls))

        def reset() -> TimeStep:
            state["t"] = 0
            return show(0, False)

        def step(action: np.ndarray) -> TimeStep:
            assert action.shape == (num_envs,)
            ended = state["t"] == 2
            shown = show(state["t"] + 1, ended)
            state["t"] = 0 if ended else state["t"] + 1
            return shown

        return HostBatch(reset, step, lambda: None)

    fields = {"id": "toy:host", "observation_shape": (2,), "observation_dtype": "float32", "num_actions": 2, "can_truncate": True}
    return HostEnvironment(EnvSpec(**{**fields, **spec}), build)


def test_contract_holds_for_what_the_broken_are_made_from() -> None:
    assert check_host_env(toy(), steps=9, num_envs=2) == {"terminated": 6, "truncated": 0, "steps": 18}


BROKEN: dict[str, tuple[HostEnvironment, str]] = {
    "spec": (toy(can_truncate=False), "can_truncate must be True"),
    "overwritten": (toy(shared=True), "a later step overwrites the arrays of an earlier one"),
    "chance": (toy(lambda t, n: t.replace(reward=t.reward + np.float32(n))), "a reset shows a reward or an end"),
    "seed": (toy(lambda t, n: t.replace(legal=t.legal & (n % 2 == 0) | [True, False]), has_legal=True), "the same seed gave"),
    "list": (toy(lambda t, _: t.replace(player=t.player[0])), "a time step holds int32, must be NumPy arrays"),
    "shape": (toy(observation_shape=(3,)), r"observation has shape \(2,\), spec says \(3,\)"),
    "final": (toy(lambda t, _: t.replace(final_observation=t.final_observation + np.float32(1))), "final_observation differs"),
    "final dtype": (
        toy(lambda t, _: t.replace(final_observation=t.final_observation.astype("float64"))),
        "final_observation has",
    ),
    "reward": (toy(lambda t, _: t.replace(reward=t.reward.astype("float64"))), "reward has dtype float64, must be float32"),
    "flag": (toy(lambda t, _: t.replace(truncated=t.truncated[:, None])), r"truncated has shape \(1,\)"),
    "both": (toy(lambda t, _: t.replace(truncated=t.terminated)), "a step is both terminated and truncated"),
    "NaN": (toy(lambda t, _: t.replace(final_observation=t.final_observation * np.float32(np.nan))), "not finite"),
    "turns": (toy(num_players=2), "turns do not alternate strictly"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_contract_catches(name: str) -> None:
    env, message = BROKEN[name]
    with pytest.raises(ContractError, match=message) as caught:
        check_host_env(env, steps=6, num_envs=2)
    assert str(caught.value).startswith("toy:host: ")


def test_contract_catches_what_evaluation_breaks() -> None:
    with pytest.raises(ContractError, match="reward has dtype float64"):
        check_host_env(toy()._replace(make_evaluation=BROKEN["reward"][0].make), steps=6, num_envs=2)


# gymnasium


def test_every_id_of_gymnasium_is_served_or_explained() -> None:
    served = {env_id for env_id in env_ids() if env_id.startswith("gymnasium:")}
    left_out = {env_id: why for env_id, why in unavailable().items() if env_id.startswith("gymnasium:")}
    assert {f"gymnasium:{name}" for name in ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3")} <= served
    assert "gymnasium:CartPole-v0" not in served  # not the newest, yet made when asked for
    for env_id, why in left_out.items():
        with pytest.raises(EnvironmentUnavailable, match="cannot be served") as caught:
            make_env(env_id)
        assert why in str(caught.value)
        assert caught.value.nearest in served
    for name in ("LunarLanderContinuous-v3", "Pendulum-v1", "MountainCarContinuous-v0", "CarRacing-v3"):  # reasons are true
        assert "continuous" in left_out[f"gymnasium:{name}"]
        env = gymnasium.make(name)
        assert not isinstance(env.action_space, gymnasium.spaces.Discrete)
        env.close()


@pytest.mark.parametrize("name", ["CartPole-v1", "LunarLander-v3"])
def test_plays_what_gymnasium_plays(name: str) -> None:
    """Against single instances that are reset by hand."""
    actions = draw(2, 150, 2)
    shown = play(f"gymnasium:{name}", actions, num_envs=2, seed=5)
    seeds = np.random.SeedSequence(5).generate_state(2)
    ended = 0
    for i in range(2):
        env = gymnasium.make(name)
        observation, _ = env.reset(seed=int(seeds[i]))
        np.testing.assert_array_equal(shown[0].observation[i], observation)
        for t, action in enumerate(actions[:, i]):
            observation, reward, terminated, truncated, _ = env.step(int(action))
            after = shown[t + 1]
            np.testing.assert_array_equal(after.final_observation[i], observation)
            assert after.reward[i] == np.float32(reward)
            assert (after.terminated[i], after.truncated[i]) == (terminated, truncated and not terminated)
            if terminated or truncated:
                ended += 1
                observation, _ = env.reset()
            np.testing.assert_array_equal(after.observation[i], observation)
        env.close()
    assert ended > 1


def test_ends_of_episodes() -> None:
    where = "gymnasium:host_simulators:"
    go, end, cut = (False, False), (True, False), (False, True)
    assert ends(play(f"{where}Counting-v0", [0] * 6)) == [go, go, end] * 2
    assert ends(play(f"{where}Cut-v0", [0] * 6)) == [go, go, cut] * 2
    assert ends(play(f"{where}Both-v0", [0] * 6)) == [go, go, end] * 2
    shown = play(f"{where}Counting-v0?max_episode_steps=2", [2, 1, 0])
    assert ends(shown) == [go, cut, go]
    assert [t.observation[0, 0] for t in shown] == [0, 1, 0, 1]
    assert [t.final_observation[0, 0] for t in shown] == [0, 1, 2, 1]
    assert [t.reward[0] for t in shown] == [0, 3, 2, 1]  # its actions begin at 1


KINDS = {
    "Counting": ((2,), "float32", [1.0, -0.25]),
    "Whole": ((2,), "float32", [1, -1]),
    "Byte": ((2, 2, 1), "uint8", [[[251], [251]], [[251], [251]]]),
    "Bool": ((2,), "bool", [True, True]),
    "Bits": ((3,), "bool", [True, False, True]),
    "Category": ((9,), "bool", [i == 1 for i in range(9)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_how_observations_are_stored(kind: str) -> None:
    shape, dtype, second = KINDS[kind]
    env_id = f"gymnasium:host_simulators:{kind}-v0"
    spec = make(env_id).spec
    assert (spec.id, spec.observation_shape, spec.observation_dtype, spec.num_actions) == (env_id, shape, dtype, 3)
    assert spec.can_truncate
    np.testing.assert_array_equal(play(env_id, [0])[1].observation[0], np.array(second, dtype))


@pytest.fixture
def brittle(monkeypatch: pytest.MonkeyPatch) -> type[Brittle]:
    monkeypatch.setattr(Brittle, "alive", [])
    return Brittle


def test_simulators_that_cannot_all_be_made_are_closed(brittle: type[Brittle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brittle, "too_many", 4)
    with pytest.raises(OSError, match="no licence for another"):  # and not that those made before cannot be closed
        simulators("host_simulators:Brittle-v0", 6, 0)
    assert not brittle.alive


def test_each_simulator_is_closed_though_another_cannot_be(brittle: type[Brittle]) -> None:
    batch = simulators("host_simulators:Brittle-v0", 3, 0)
    assert len(brittle.alive) == 3
    with pytest.raises(RuntimeError, match="and cannot be closed"):
        batch.close()
    assert not brittle.alive
    batch.close()  # it may be called twice


def test_environments_of_the_host_are_told_apart() -> None:
    assert is_host("ale:Pong")
    assert is_host("gymnasium:CartPole-v1?max_episode_steps=9")
    assert not is_host("gymnax:CartPole-v1")


LAZY = """
import sys, muzerox, muzerox.envs
assert "jax" not in sys.modules
assert {"Agent", "Config", "train"} <= set(dir(muzerox))
assert muzerox.Config.__name__ == "Config" and muzerox.envs.make_env("gymnax:CartPole-v1").spec.num_actions == 2
for module in (muzerox, muzerox.envs):
    try:
        module.nothing
    except AttributeError as error:
        assert str(error) == f"module {module.__name__!r} has no attribute 'nothing'"
for module in (muzerox, muzerox.envs):
    assert all(hasattr(module, name) for name in module.__all__)
"""


def test_the_packages_import_what_is_asked_for() -> None:
    """What a simulator's process imports is without JAX."""
    subprocess.run([sys.executable, "-c", LAZY], check=True)


# Bad ids


REFUSED = [
    ("ale:Pong?sticky=1", "ale knows the options sticky_actions, .*, not 'sticky'; nearest valid: sticky_actions"),
    ("ale:Pong?", "ale knows the options"),
    ("ale:Pong?sticky_actions=2", "sticky_actions = 2 must be from 0 to 1; nearest valid: sticky_actions=1.0"),
    ("ale:Pong?sticky_actions=nan", "must be from 0 to 1"),
    ("ale:Pong?sticky_actions=often", "sticky_actions = 'often' must be a number; nearest valid: sticky_actions=0.0"),
    ("ale:Pong?frame_skip=1.5", "must be a whole number; nearest valid: frame_skip=4"),
    ("ale:Pong?frame_skip=0", "frame_skip = 0 must be from 1 to 60; nearest valid: frame_skip=1"),
    ("ale:Pong?max_frames=0", "max_frames = 0 must be from 1; nearest valid: max_frames=1"),
    ("ale:Pong?episodic_life=no", "must be true or false"),
    ("ale:Pong?episodic_life", "episodic_life needs a value; nearest valid: episodic_life=true"),
    ("ale:Pong?threads=1&threads=2", "threads is given twice"),
    ("ale:pong", "ale has no such environment; nearest valid: ale:Pong"),
    ("ale:Joust", "several players at a time"),
    ("gymnax:CartPole-v1?x=1", "gymnax takes no options, not 'x'"),
    ("gymnasium:CartPole-v1?max_episode_steps=x", "must be a whole number; nearest valid: max_episode_steps=1"),
    ("gymnasium:CartPole-v9", "gymnasium has no such environment; nearest valid: gymnasium:CartPole-v1"),
    (
        "gymnasium:no_such_module:A-v0",
        "cannot import the module no_such_module: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    ("gymnasium::A-v0", "cannot import the module : ValueError: Empty module name"),
    ("gymnasium:.x:A-v0", "cannot import the module .x: TypeError: "),
    ("gymnasium:unfinished_module:A-v0", r"SyntaxError: .* \(unfinished_module.py, line 1\)"),
    ("gymnasium:leaving_module:A-v0", "cannot import the module leaving_module: SystemExit: 3"),
    ("gymnasium:host_simulators:A-v0", "the module host_simulators registers no A-v0 with gymnasium"),
    ("gymnasium:host_simulators:Tuple-v0", "its observations are Dict, and must be Box, Discrete or MultiBinary"),
    ("gymnasium:host_simulators:Missing-v0?max_episode_steps=3", "cannot be imported: No module named 'no_such_engine'"),
    ("gymnasium:host_simulators:Broken-v0", "cannot be made: ValueError: no map: level 3"),
    ("gymnasium:host_simulators:Nowhere-v0", "cannot be made: AttributeError: module 'host_simulators' has no attribute"),
]


@pytest.mark.parametrize(("env_id", "message"), REFUSED)
def test_refused_in_one_line(env_id: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfinished_module.py").write_text("def play(:")
    (tmp_path / "leaving_module.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentUnavailable, match=message) as caught:
        make_env(env_id)
    assert str(caught.value).startswith(f"env = {env_id!r}: ")
    assert "\n" not in str(caught.value)


def test_what_an_extra_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        raise ModuleNotFoundError("No module named 'ale_py'", name="ale_py")

    def without_box2d(*_: Any, **__: Any) -> Any:
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")

    monkeypatch.setattr(gymnasium, "make", without_box2d)
    with pytest.raises(EnvironmentUnavailable, match=re.escape('pip install "muzerox[box2d]"')):
        make_env("gymnasium:LunarLander-v3")
    monkeypatch.setattr(registry.importlib, "import_module", missing)
    with pytest.raises(
        EnvironmentUnavailable, match=re.escape('needs the package ale_py, which is not installed: pip install "muzerox[ale]"')
    ):
        make_env("ale:Pong")


def test_info_lists_options() -> None:
    found = info.environments()
    assert found["environment options"]["ale:...?sticky_actions"].startswith("0.0 (from 0 to 1): ")
    assert found["environment options"]["gymnasium:...?max_episode_steps"].startswith("its own (from 1): ")
    assert "ale:Breakout" in found["environments"]["ale"].split()


# JAX environments on the host


def test_on_host_steps_the_environment_it_is_given() -> None:
    plain = counting_env()
    env = on_host(plain._replace(spec=dataclasses.replace(plain.spec, can_truncate=False)))
    assert env.spec.can_truncate  # whoever steps a batch may cut its episodes
    batch = env.make(3, 4)
    shown, looped = batch.reset(), jax.jit(jax.vmap(auto_reset(plain).step))
    for _ in range(12):
        action = shown.legal.argmax(-1).astype(np.int32)
        episode, time = (
            np.rint(shown.observation[:, 0] * 100).astype(np.int32),
            np.rint(shown.observation[:, 1] * 3).astype(np.int32),
        )
        state = (episode, time, np.zeros(3, np.int32))
        _, expected = looped(jax.random.split(jax.random.key(0), 3), state, action)
        shown = batch.step(action)
        for name in ("reward", "terminated", "truncated", "final_observation"):
            np.testing.assert_allclose(getattr(shown, name), getattr(expected, name), atol=1e-6)
        goes_on = ~(shown.terminated | shown.truncated)
        np.testing.assert_allclose(shown.observation[goes_on], np.asarray(expected.observation)[goes_on], atol=1e-6)
        assert (shown.observation[~goes_on, 1] == 0).all()
    assert all(isinstance(leaf, np.ndarray) and leaf.flags.writeable for leaf in jax.tree.leaves(shown))
    batch.close()


def test_batches_of_one_size_share_their_programs() -> None:
    env = on_host(counting_env())
    env.make(2, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled again"))
        batch = env.make(2, 1)
        batch.reset()
        batch.step(np.zeros(2, np.int32))
