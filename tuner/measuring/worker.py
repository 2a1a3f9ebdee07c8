"""The subprocess of a measurement: takes its allocation, then builds a training and times bursts of it on request.

One JSON object a line: a request on stdin, its answer on the descriptor that was stdout. The first request holds the
configuration, and its allocation with it; later ones ask for bursts. Run as ``python -m tuner.measuring.worker``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any


def _die_with_the_parent() -> None:
    """A killed tuner must not leave workers behind, at work or stopped for good. Linux only."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


def _outcome(error: BaseException) -> tuple[str, str]:
    """The name of an Outcome and one line on what happened."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    signs = ("RESOURCE_EXHAUSTED", "not enough memory", "Cannot allocate memory", "bad_alloc")
    memory = isinstance(error, MemoryError) or any(sign in text for sign in signs)
    return ("out_of_memory" if memory else "crashed"), text


def main() -> None:
    """Answers requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    _die_with_the_parent()
    # A scheduler sends them to every process of a job. The tuner is told, too: a trial that they end must not count as failed.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    try:
        # Before it is asked for anything, since it may have been started ahead of that. No device is touched by it, for which XLA
        # would make as many threads as there are cores: for that the allocation is early enough.
        from tuner.bridge import Config, allocated, available_cores, enable_cache, measure_drift
        from tuner.measuring.session import Session

        line = sys.stdin.readline()
        if not line:
            return  # it was not needed
        request = json.loads(line)
        if request["kind"] == "fingerprint":
            from tuner.measuring.fingerprint import measure_rates

            answer(**measure_rates())
            return
        config = Config.from_dict(request["config"])
        if request["kind"] == "drift":
            enable_cache()
            with allocated(config):
                asked = {name: request[name] for name in ("seconds", "examples", "least_learnt")}
                found = measure_drift(config, request["levels"], **asked)
            answer(levels=found)
            return
        cores, own = request["compile_cores"] or 0, config.allocation.cores
        lent = available_cores()[:cores] if own is not None and own < cores else []
        with allocated(config), contextlib.closing(Session(config, lent)) as session:
            names = ("compile_seconds", "warmup_seconds", "shortest_burst", "from_cache")
            answer(compile_cores=len(lent) or None, **{name: getattr(session, name) for name in names})
            for line in sys.stdin:
                answer(**session.burst(**json.loads(line)))
    except BrokenPipeError:
        return  # nobody is listening any more
    except Exception as error:  # whatever it was, it is this measurement's outcome
        outcome, text = _outcome(error)
        answer(outcome=outcome, error=text)


if __name__ == "__main__":
    main()
