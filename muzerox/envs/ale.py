"""Atari 2600 games of the Arcade Learning Environment (Bellemare et al., arXiv:1207.4708), whose ROMs come with ``ale-py``.

They run in C++ threads. Preprocessing is that of DQN (Mnih et al., 2015), as Machado et al. (arXiv:1709.06009) describe it: each
action for four frames, the maximum of the last two, in grey and resized to 84x84, the last four of those as channels; up to
30 idle frames and a press of FIRE open a game. For learning, the loss of a life terminates an episode while the game goes on,
and rewards are clipped to [-1, 1]; evaluation plays whole games by their score.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from ale_py import roms
from ale_py.registration import rom_id_to_name
from ale_py.vector_env import AtariVectorEnv

from muzerox.envs.simulators import Frames, Option, Simulators

if TYPE_CHECKING:
    from muzerox.types import HostEnvironment

OPTIONS = {
    "sticky_actions": Option(
        kind=float, default=0.0, low=0.0, high=1.0, doc="chance that a frame repeats the action before; Machado et al. take 0.25"
    ),
    "episodic_life": Option(kind=bool, default=True, doc="the loss of a life terminates the episode, while the game goes on"),
    "clip_rewards": Option(kind=bool, default=True, doc="rewards of a step to [-1, 1]"),
    "full_actions": Option(kind=bool, default=False, doc="all 18 actions of the console, not only those the game tells apart"),
    "frame_skip": Option(kind=int, default=4, low=1, high=60, doc="frames an action lasts"),
    "idle_frames": Option(kind=int, default=30, low=0, high=600, doc="idle frames that open a game are drawn below this number"),
    "max_frames": Option(kind=int, default=108_000, low=1, doc="frames after which a game is cut; 108000 are half an hour"),
    "threads": Option(kind=int, default=0, low=0, high=1024, doc="threads that step the games of a batch; 0: one a core"),
}
EVALUATION = {"episodic_life": False, "clip_rewards": False}

_FOR_TWO = "it is for several players at a time"
UNAVAILABLE = dict.fromkeys(("Combat", "Joust", "MazeCraze", "Warlords"), _FOR_TWO)
_ROMS = {rom_id_to_name(rom): rom for rom in sorted(roms.get_all_rom_ids())}
_SIZE, _STACK = 84, 4


def names() -> list[str]:
    """Names this suite serves, such as ``MsPacman``."""
    return [name for name in _ROMS if name not in UNAVAILABLE]


def _complete(options: dict[str, Any]) -> dict[str, Any]:
    return {name: option.default for name, option in OPTIONS.items()} | options


def _make_vector(name: str, num_envs: int, options: dict[str, Any]) -> Any:
    given = _complete(options)
    return AtariVectorEnv(
        _ROMS[name],
        num_envs,
        num_threads=given["threads"],
        # Cut here rather than there, where the last frame before the cut would be left out of the maximum.
        max_num_frames_per_episode=10**9,
        repeat_action_probability=given["sticky_actions"],
        full_action_space=given["full_actions"],
        autoreset_mode="SameStep",
        img_height=_SIZE,
        img_width=_SIZE,
        stack_num=_STACK,
        frameskip=given["frame_skip"],
        noop_max=given["idle_frames"],
        # Its episodic_life would begin a new game at each life lost; this tells of the loss and goes on.
        life_loss_info=given["episodic_life"],
        reward_clipping=given["clip_rewards"],
    )


@functools.cache
def _num_actions(name: str, full_actions: bool) -> int:
    return int(_make_vector(name, 1, {"full_actions": full_actions}).single_action_space.n)


def _last(frames: np.ndarray) -> np.ndarray:
    """[E, stack, H, W] to [E, H, W, stack]: the newest frame is the last channel."""
    return np.ascontiguousarray(frames.transpose(0, 2, 3, 1))


def simulators(name: str, num_envs: int, seed: int, **options: Any) -> Simulators:
    """E games of ``name``, stepped by a pool of threads; see :func:`make`."""
    env = _make_vector(name, num_envs, options)
    longest, skip = (_complete(options)[name] for name in ("max_frames", "frame_skip"))
    seeds = (np.random.SeedSequence(seed).generate_state(num_envs) >> 1).astype(np.int64)  # non-negative int32
    first = True
    game = np.zeros(num_envs, np.int64)  # the frame at which the running game began, which tells one game from the next
    played = np.zeros(num_envs, np.int64)  # its frames so far, idle ones left out

    def began(info: dict[str, np.ndarray]) -> np.ndarray:
        return info["frame_number"].astype(np.int64) - info["episode_frame_number"]

    def reset() -> Frames:
        nonlocal first, game
        observation, info = env.reset(seed=seeds if first else None)
        first, game = False, began(info)
        played[:] = 0
        observation = _last(observation)
        none = np.zeros(num_envs, np.bool_)
        return Frames(observation, np.zeros(num_envs, np.float32), none, none.copy(), observation.copy())

    def step(action: np.ndarray) -> Frames:
        nonlocal game
        shown, reward, terminated, _, info = env.step(np.asarray(action, np.int64))
        observation, over = _last(shown), began(info) != game
        final = observation.copy()
        if over.any():  # where a life was lost and the game went on, ALE leaves final_obs unset: the step led to what is shown
            final[over] = _last(info["final_obs"][over])
        played[:] = np.where(over, 0, played + skip)
        cut = played >= longest
        if cut.any():
            shown, info = env.reset(options={"reset_mask": cut})
            observation[cut] = _last(shown[cut])
            played[cut] = 0
        game = began(info)
        return Frames(observation, reward.astype(np.float32), terminated, cut & ~terminated, final)

    return Simulators(int(env.single_action_space.n), reset, step, env.close)


def make(name: str, **options: Any) -> HostEnvironment:
    """The game ``name``, observed as [84, 84, 4] bytes, the newest frame last; options as in ``OPTIONS``."""
    from muzerox.envs.host import host_environment
    from muzerox.types import EnvSpec

    spec = EnvSpec(
        id=f"ale:{name}",
        observation_shape=(_SIZE, _SIZE, _STACK),
        observation_dtype="uint8",
        num_actions=_num_actions(name, _complete(options)["full_actions"]),
        can_truncate=True,
    )
    return host_environment(spec, lambda num_envs, seed: simulators(name, num_envs, seed, **options))
