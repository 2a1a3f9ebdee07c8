"""What the drivers share: their arguments, and the rates of a steady window. Only the standard library: peers' Pythons run it.

Each driver trains one system on gymnasium's CartPole-v1 in a process of its own and marks how far it has come, at moments
when both its counts are true. The window begins with the first mark that is ``--warmup`` seconds or more after the first learner
update, and ends with the first that is ``--seconds`` or more later: start-up, compilation and the filling of the replay are
outside. Then the process prints one line of JSON and is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from importlib.metadata import version
from typing import NamedTuple

ENV = "CartPole-v1"
CAPACITY = 131_072  # transitions of everybody's replay
MIN_SIZE = 2_048  # transitions before the first update


def make_parser(description: str | None, *, threads: str) -> argparse.ArgumentParser:
    """The settings that are the same for all; ``threads`` is the one knob that each driver reads in its own way."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=16)
    parser.add_argument("--envs", type=int, default=16, help="environments, all threads together")
    parser.add_argument("--batch", type=int, default=256, help="sequences of an update")
    parser.add_argument("--replay-ratio", type=float, default=2.0, help="sampled sequences per environment step")
    parser.add_argument("--reanalyze", type=float, default=0.0, help="share of a batch that is searched again")
    parser.add_argument("--width", type=int, default=128, help="units of a layer")
    parser.add_argument("--depth", type=int, default=2, help="hidden layers of a network")
    parser.add_argument("--bins", type=int, default=255, help="categories of value and reward")
    parser.add_argument("--unroll", type=int, default=5, help="steps the model is unrolled in the loss")
    parser.add_argument("--td-steps", type=int, default=10, help="rewards before the value target bootstraps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=90.0, help="length of the window")
    parser.add_argument("--warmup", type=float, default=10.0, help="seconds between the first update and the window")
    parser.add_argument("--threads", type=int, default=1, help=threads)
    return parser


class _Mark(NamedTuple):
    seconds: float
    env_steps: int
    updates: int
    cpu_seconds: float


class Window:
    """Marks go in, from any thread; the process ends with the mark that closes the window."""

    def __init__(self, args: argparse.Namespace, packages: tuple[str, ...]):
        self._args, self._packages = args, packages
        self._lock = threading.Lock()
        self._started = time.perf_counter() - _age()
        self._learning: float | None = None
        self._begin: _Mark | None = None

    def mark(self, env_steps: int, updates: int) -> None:
        """``env_steps`` environment steps and ``updates`` updates have been made by now."""
        with self._lock:
            now = _Mark(time.perf_counter(), env_steps, updates, _cpu_seconds())
            if self._learning is None:
                if updates < 1:
                    return
                self._learning = now.seconds
            if self._begin is None:
                if now.seconds >= self._learning + self._args.warmup:
                    self._begin = now
            elif now.seconds >= self._begin.seconds + self._args.seconds:
                self._finish(self._begin, now)

    def _finish(self, begin: _Mark, end: _Mark) -> None:
        assert self._learning is not None
        seconds, steps, updates = end.seconds - begin.seconds, end.env_steps - begin.env_steps, end.updates - begin.updates
        figures = {
            "env_steps_per_second": steps / seconds,
            "updates_per_second": updates / seconds,
            "replay_ratio": updates * self._args.batch / max(steps, 1),
            "cores_busy": (end.cpu_seconds - begin.cpu_seconds) / seconds,
            "peak_gib": _peak_bytes() / 2**30,
            "seconds": seconds,
            "first_update_seconds": self._learning - self._started,
            "versions": {name: version(name) for name in self._packages},
        }
        print(json.dumps(figures), flush=True)
        sys.stderr.flush()
        os._exit(0)  # trainers that were not asked to stop, their threads and their last checkpoint included


def _age() -> float:
    """Seconds since this process was started, as far as the system tells."""
    try:
        with open("/proc/self/stat", errors="replace") as stat, open("/proc/uptime") as uptime:
            started = float(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return float(uptime.read().split()[0]) - started
    except OSError:
        return time.process_time()


def _processes() -> list[int]:
    """This process and all under it."""
    found = [os.getpid()]
    for pid in found:
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    found.extend(int(child) for child in file.read().split())
        except OSError:  # it has ended; or there is no /proc, and nothing is known of children
            continue
    return found


def _cpu_seconds() -> float:
    total = time.process_time()
    for pid in _processes()[1:]:
        try:
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue
    return total


def _peak_bytes() -> int:
    """The most memory that was ever resident, of this process and all under it; of this one alone without /proc."""
    peaks = []
    for pid in _processes():
        try:
            with open(f"/proc/{pid}/status", errors="replace") as file:
                peaks += [int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM")]
        except OSError:  # it has ended; or there is no /proc
            continue
    # What getrusage says is the last resort: a process inherits it from whoever started it.
    return sum(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
