"""stdout and stderr that nobody reads any more, or that cannot be written: neither ends the work, and no traceback tells it."""

from __future__ import annotations

import os
import sys
from typing import IO


def tell(text: str) -> None:
    """One line on stderr; where it cannot be written, it is lost, and so are those after it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """From now on all that is written to it goes nowhere, what it still holds included."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def flush() -> None:
    """Writes what stdout still holds, where there is a stdout. Raises OSError."""
    if sys.stdout is not None:
        sys.stdout.flush()


def refusal(stream: IO[str] | None) -> OSError | None:
    """Why a stream cannot be written to; None where it can, and then an empty line is in it."""
    try:
        print(file=stream, flush=True)
    except OSError as error:
        return error
    return None
