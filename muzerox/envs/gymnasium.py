"""Environments of gymnasium (Towers et al., arXiv:2407.17032), and simulators of your own that register with it.

``gymnasium:CartPole-v1`` is one of gymnasium's; ``gymnasium:my_package.my_module:MyEnv-v0`` imports the module first, which
registers ``MyEnv-v0``, by gymnasium's own convention; it may lie in the working directory. Actions are discrete, and given as
Python's integers. Observations are arrays: floats are stored as float32, bytes and booleans as they are, a category as one-hot.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec
from gymnasium.spaces import Box, Discrete, MultiBinary

from muzerox.envs.simulators import Frames, Option, Simulators, closing
from muzerox.errors import EnvironmentUnavailable

if TYPE_CHECKING:
    from muzerox.types import HostEnvironment

OPTIONS = {
    "max_episode_steps": Option(kind=int, default=None, low=1, doc="steps after which an episode is cut"),
}

_CONTINUOUS = "its actions are continuous"
_IN_JAX = "it steps through JAX one instance at a time; gymnax serves such games on the device"
_OTHER = {
    "CarRacing-v3": _CONTINUOUS,
    "BipedalWalker-v3": _CONTINUOUS,
    "BipedalWalkerHardcore-v3": _CONTINUOUS,
    "LunarLanderContinuous-v3": _CONTINUOUS,
    "MountainCarContinuous-v0": _CONTINUOUS,
    "Pendulum-v1": _CONTINUOUS,
    "Blackjack-v1": "its observations are tuples",
    "GymV21Environment-v0": "it wraps environments of the package gym, which is no longer maintained",
    "GymV26Environment-v0": "it wraps environments of the package gym, which is no longer maintained",
}


def _newest() -> dict[str, GymnasiumSpec]:
    """gymnasium's own environments, the newest version of each; other packages' come and go with their import."""
    newest: dict[tuple[str | None, str], GymnasiumSpec] = {}
    for spec in list(gymnasium.registry.values()):  # a copy: another thread may import a module that registers
        module = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", "")
        if module.startswith("gymnasium.envs."):
            kept = newest.setdefault((spec.namespace, spec.name), spec)
            if (spec.version or 0) > (kept.version or 0):
                newest[spec.namespace, spec.name] = spec
    return {spec.id: spec for spec in newest.values()}


def _why_not(spec: GymnasiumSpec) -> str | None:
    if spec.namespace in ("phys2d", "tabular"):
        return _IN_JAX
    if str(spec.entry_point).startswith("gymnasium.envs.mujoco"):
        return _CONTINUOUS
    return _OTHER.get(spec.id)


UNAVAILABLE = {env_id: why for env_id, spec in _newest().items() if (why := _why_not(spec))}


def names() -> list[str]:
    """gymnasium's own environments, the newest version of each; whatever else is registered is served too."""
    return [name for name in _newest() if name not in UNAVAILABLE]


def serves(name: str) -> bool:
    """Whether gymnasium's registry has ``name``, after the import of its module if it names one.

    Raises:
      EnvironmentUnavailable: the module cannot be imported.
    """
    module, colon, env = name.rpartition(":")
    if colon:
        # As for ``python -m``, which an installed command is not; last, so that nothing there hides what is installed.
        if "" not in sys.path:
            sys.path.append("")
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # a module may do anything, and what is given may be no module's name
            rule = f"cannot import the module {module}: {type(error).__name__}: {error}"
            raise EnvironmentUnavailable("env", f"gymnasium:{name}", rule) from error
        if env not in gymnasium.registry:
            rule = f"the module {module} registers no {env} with gymnasium"
            raise EnvironmentUnavailable("env", f"gymnasium:{name}", rule)
    return env in gymnasium.registry


class _Codec(NamedTuple):
    """How a space's observations are stored."""

    shape: tuple[int, ...]
    dtype: str
    encode: Callable[[Sequence], np.ndarray]  # E observations of the space -> a new array [E, *shape]


def _codec(space: gymnasium.Space) -> _Codec:
    if isinstance(space, Discrete):
        categories = int(space.start) + np.arange(int(space.n))
        return _Codec((int(space.n),), "bool", lambda x: np.asarray(x)[:, None] == categories)
    if isinstance(space, Box | MultiBinary):
        kept = {"uint8": "uint8", "bool": "bool"} if isinstance(space, Box) else {"int8": "bool"}
        dtype = kept.get(str(space.dtype), "float32")
        return _Codec(tuple(space.shape), dtype, lambda x: np.array(x, dtype))
    raise TypeError(f"its observations are {type(space).__name__}, and must be Box, Discrete or MultiBinary")


def _make(name: str, **options: Any) -> gymnasium.Env:
    """An instance, checked to be what an agent here can play."""
    try:
        env = gymnasium.make(name, disable_env_checker=True, **options)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        needs_box2d = "gymnasium.envs.box2d" in str(gymnasium.registry[name.rpartition(":")[2]].entry_point)
        extra = 'pip install "muzerox[box2d]"' if needs_box2d else None
        rule = f"needs a package that cannot be imported: {extra or error}"
        raise EnvironmentUnavailable("env", f"gymnasium:{name}", rule) from error
    except gymnasium.error.Error as error:
        raise EnvironmentUnavailable("env", f"gymnasium:{name}", f"gymnasium cannot make it: {error}") from error
    wrong = None
    if not isinstance(env.action_space, Discrete):
        wrong = f"its actions are {type(env.action_space).__name__}, and must be Discrete"
    try:
        _codec(env.observation_space)
    except TypeError as error:
        wrong = wrong or str(error)
    if wrong:
        with closing(env.close):
            raise EnvironmentUnavailable("env", f"gymnasium:{name}", f"cannot be served: {wrong}")
    return env


def simulators(name: str, num_envs: int, seed: int, **options: Any) -> Simulators:
    """E instances of ``name``, stepped one after the other in the calling thread; see :func:`make`.

    gymnasium's own ``SyncVectorEnv`` does the same and takes longer: 149 us for 16 of CartPole instead of 115.
    """
    envs: list[gymnasium.Env] = []
    with contextlib.ExitStack() as made:
        for _ in range(num_envs):
            envs.append(_make(name, **options))
            made.enter_context(closing(envs[-1].close))
        actions: Any = envs[0].action_space
        first_action = int(actions.start)
        encode = _codec(envs[0].observation_space).encode
        close = made.pop_all().close  # each, whatever another's raises
    seeds = [int(s) for s in np.random.SeedSequence(seed).generate_state(num_envs)]

    def reset() -> Frames:
        # The first reset seeds; a later one goes on from there.
        observation = encode([env.reset(seed=seeds.pop(0) if seeds else None)[0] for env in envs])
        none = np.zeros(num_envs, np.bool_)
        return Frames(observation, np.zeros(num_envs, np.float32), none, none.copy(), observation.copy())

    def step(action: np.ndarray) -> Frames:
        # Python's integers: spaces, which many simulators ask, take longer to check NumPy's.
        chosen = (np.asarray(action, np.int64) + first_action).tolist()
        led_to = [env.step(choice) for env, choice in zip(envs, chosen, strict=True)]
        shown, rewards, over, cut, _ = zip(*led_to, strict=True)
        terminated, truncated, final = np.array(over, np.bool_), np.array(cut, np.bool_), encode(shown)
        observation = final.copy()
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            observation[ended] = encode([envs[i].reset()[0] for i in ended])
        return Frames(observation, np.array(rewards, np.float32), terminated, truncated & ~terminated, final)

    return Simulators(int(actions.n), reset, step, close)


def make(name: str, **options: Any) -> HostEnvironment:
    """The registered environment ``name``; options as in ``OPTIONS``.

    Terminated and truncated stay apart; a step that does both counts as terminated.

    Raises:
      EnvironmentUnavailable: its actions are not discrete, its observations no array, a package it needs is missing, or whatever
        else does not let it be made.
    """
    from muzerox.envs.host import host_environment
    from muzerox.types import EnvSpec

    try:
        env = _make(name, **options)
    except EnvironmentUnavailable:
        raise
    except (Exception, SystemExit) as error:  # a simulator may do anything; what fails later, in a training, is told whole
        raise EnvironmentUnavailable("env", f"gymnasium:{name}", f"cannot be made: {type(error).__name__}: {error}") from error
    with closing(env.close):
        codec = _codec(env.observation_space)
        actions: Any = env.action_space
        spec = EnvSpec(
            id=f"gymnasium:{name}",
            observation_shape=codec.shape,
            observation_dtype=codec.dtype,
            num_actions=int(actions.n),
            can_truncate=True,
        )
    return host_environment(spec, lambda num_envs, seed: simulators(name, num_envs, seed, **options))
