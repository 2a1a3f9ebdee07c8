"""What a simulator's own process and its parent agree on: messages, and where arrays lie in the memory they share."""

from __future__ import annotations

import math
import mmap
from typing import Any, NamedTuple

import numpy as np

RESET, STEP, DONE = b"r", b"s", b"d"
_FIELDS = ("observation", "reward", "terminated", "truncated", "final_observation", "legal", "player")
_ALIGN = 64  # bytes: a cache line


class Field(NamedTuple):
    """Where an array lies in the shared memory."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes

    @property
    def end(self) -> int:
        """Bytes to its end, aligned."""
        size = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return self.offset + -(-size // _ALIGN) * _ALIGN


def map_fields(memory: int, fields: list[Field]) -> dict[str, np.ndarray]:
    """Arrays over the shared memory with this file descriptor, by name."""
    mapped = mmap.mmap(memory, fields[-1].end)
    return {f.name: np.frombuffer(mapped, f.dtype, math.prod(f.shape), f.offset).reshape(f.shape) for f in fields}


def lay_out(shown: Any, num_actions: int) -> list[Field]:
    """Where the arrays of a reset lie, those beside them that a step may show, and actions."""
    arrays = {name: getattr(shown, name) for name in _FIELDS if hasattr(shown, name)}
    for name, shape, dtype in (("action", (), "int32"), ("legal", (num_actions,), "bool"), ("player", (), "int32")):
        arrays.setdefault(name, np.zeros((len(shown.reward), *shape), dtype))
    fields: list[Field] = []
    for name, array in arrays.items():
        fields.append(Field(name, array.shape, str(array.dtype), fields[-1].end if fields else 0))
    return fields
