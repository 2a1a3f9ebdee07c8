"""stdout that holds one answer and nothing else; stdout and stderr that nobody reads, or that cannot be written.

Neither of the latter ends the work, and no traceback tells it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

_kept: IO[str] | None = None  # stdout, while only answers may reach it


@contextlib.contextmanager
def kept_for_answers() -> Iterator[None]:
    """While it lasts only :func:`answer` writes to stdout; what else is printed, by simulators in C too, goes to stderr.

    Raises OSError where what was printed before cannot be written.
    """
    global _kept
    flush()
    with contextlib.ExitStack() as restored:
        _kept = sys.stdout or restored.enter_context(open(os.devnull, "w"))  # it may be closed
        with contextlib.suppress(OSError):  # not a file of the system's, or stderr is closed
            if _kept.fileno() == 1:
                _kept = restored.enter_context(os.fdopen(os.dup(1), "w"))
                os.dup2(2, 1)
                restored.callback(os.dup2, _kept.fileno(), 1)
                restored.callback(ctypes.CDLL(None).fflush, None)  # what C has printed, and still holds, is written before
        restored.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield
        finally:
            _kept = None


def answer(record: Mapping[str, Any]) -> None:
    """Prints one JSON object on stdout, also where that is kept for answers. Raises OSError where it cannot be written."""
    print(json.dumps(record), file=_kept or sys.stdout, flush=True)


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
