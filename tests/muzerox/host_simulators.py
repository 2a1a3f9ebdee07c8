"""Simulators that register with gymnasium on import, for tests: ``gymnasium:host_simulators:Counting-v0``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary


class Counting(gymnasium.Env):
    """Shows its steps; rewards the action; ends after ``length`` steps in the ways that ``ends`` names."""

    def __init__(self, length: int = 3, ends: str = "terminated", space: str = "float"):
        spaces = {
            "float": Box(-np.inf, np.inf, (2,), np.float64),
            "whole": Box(-9, 9, (2,), np.int32),
            "byte": Box(0, 255, (2, 2, 1), np.uint8),
            "bool": Box(0, 1, (2,), np.bool_),
            "bits": MultiBinary(3),
            "category": Discrete(9, start=-2),
            "tuple": Dict(a=Discrete(2)),
        }
        self.observation_space, self.action_space = spaces[space], Discrete(3, start=1)
        self.length, self.ends, self.space, self.steps = length, ends, space, 0

    def show(self) -> Any:
        n = self.steps
        return {
            "float": np.array([n, -n / 4]),
            "whole": np.array([n, -n], np.int32),
            "byte": np.full((2, 2, 1), (250 + n) % 256, np.uint8),
            "bool": np.array([n % 2 == 1, True]),
            "bits": np.array([n % 2, 0, 1], np.int8),
            "category": n - 2,
            "tuple": {"a": 0},
        }[self.space]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return self.show(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        ended = self.steps == self.length
        return self.show(), float(action), ended and "terminated" in self.ends, ended and "truncated" in self.ends, {}


class Lottery(Counting):
    """An episode takes one step or nine, as the seed has it."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        first = super().reset(seed=seed, options=options)
        self.length = int(self.np_random.choice([1, 9]))
        return first


class Hostile(gymnasium.Env):
    """Does what an action says: 0 goes on, see ``step`` for the rest. Shows its process and whether JAX is imported."""

    observation_space, action_space = Box(-np.inf, np.inf, (2,), np.float32), Discrete(8)

    def __init__(self, at_reset: int = 0, stubborn: bool = False):
        self.at_reset, self.stubborn = at_reset, stubborn

    def show(self) -> np.ndarray:
        return np.array([os.getpid(), "jax" in sys.modules], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed, options=options)
        self.step(self.at_reset)
        return self.show(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        if action == 1:
            time.sleep(100)
        elif action == 2:
            ctypes.PyDLL(None).sleep(100)  # with the interpreter's lock held
        elif action == 3:
            os._exit(7)
        elif action == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == 5:
            raise ValueError("the simulator broke")
        elif action == 6:
            os.kill(os.getpid(), signal.SIGINT)
        elif action == 7:
            raise ConnectionResetError("its server hung up")
        return self.show(), 0.0, False, False, {}

    def close(self) -> None:
        if self.stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(100)


class Ordered(Counting):
    """Fails when told to: whoever takes an order, a file in the folder that ORDERS names, carries it out."""

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        for order in os.listdir(os.environ["ORDERS"]):
            try:
                os.unlink(os.path.join(os.environ["ORDERS"], order))
            except FileNotFoundError:
                continue  # another took it
            if order.startswith("raise"):
                raise ValueError("the simulator broke")
            if order.startswith("term"):
                os.kill(os.getpid(), signal.SIGTERM)
                continue
            if order.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(100)
        return super().step(action)


class Brittle(Counting):
    """Notes who lives. The one that would make ``too_many`` cannot be made; closing fails, and a step by action 3."""

    alive: list[Brittle] = []
    too_many = 99

    def __init__(self) -> None:
        super().__init__()
        if len(self.alive) + 1 >= self.too_many:
            raise OSError("no licence for another")
        self.alive.append(self)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        if action == 3:
            raise ValueError("the simulator broke")
        return super().step(action)

    def close(self) -> None:
        self.alive.remove(self)
        raise RuntimeError("and cannot be closed")


def _missing(**_: Any) -> gymnasium.Env:
    raise ModuleNotFoundError("No module named 'no_such_engine'", name="no_such_engine")


def _broken(**_: Any) -> gymnasium.Env:
    raise ValueError("no map:\n  level 3")


def _register(name: str, kind: Any, **kwargs: Any) -> None:
    gymnasium.register(f"{name}-v0", kind, kwargs=kwargs)


_register("Counting", Counting)
_register("Cut", Counting, ends="truncated")
_register("Both", Counting, ends="terminated and truncated")
for _space in ("Whole", "Byte", "Bool", "Bits", "Category", "Tuple"):
    _register(_space, Counting, space=_space.lower())
_register("Lottery", Lottery)
_register("Hostile", Hostile)
_register("HostileReset", Hostile, at_reset=1)
_register("Stubborn", Hostile, stubborn=True)
_register("Missing", _missing)
_register("Broken", _broken)
_register("Nowhere", "host_simulators:Nowhere")
_register("Brittle", Brittle)
_register("Ordered", Ordered, length=7, ends="truncated")
