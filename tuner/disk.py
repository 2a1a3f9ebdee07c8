"""What the disk refuses, in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from predictor import StoreError
from tuner.bridge import UserError


@contextlib.contextmanager
def saving(name: str, folder: Path) -> Iterator[None]:
    """A block that writes into ``folder``, as the option or variable ``name`` has it. Raises UserError where that fails."""
    try:
        yield
    except (OSError, StoreError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(name, str(folder), f"cannot be written: {why}") from None


def kept(file: Path) -> bytes | None:
    """What a file holds; None where there is none. Raises UserError where it cannot be read."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(str(file), None, f"cannot be read: {error.strerror}") from None
