"""The subprocess of a measurement: takes its allocation, then builds a training and times bursts of it on request.

One JSON object a line: a request on stdin, its answer on the descriptor that was stdout. The first request holds the
configuration and the allocation, later ones ask for bursts. Run as ``python -m tuner.worker``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any


def _take_allocation(request: dict[str, Any]) -> list[int]:
    """Before jax is imported: XLA sizes its thread pool and its share of an accelerator once, when it starts.

    What it sees of accelerators is read when a device is first touched: ``allocated`` is early enough for that. Returns the cores
    that compiling may take, where they are more than the allocation's.
    """
    allocation, lent = request["allocation"], list[int]()
    if allocation.get("cores") is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: allocation["cores"]])
        if (request.get("compile_cores") or 0) > allocation["cores"]:
            lent = cores[: request["compile_cores"]]
    if allocation.get("device_memory") is not None:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(allocation["device_memory"])
    return lent


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
    request = json.loads(sys.stdin.readline())
    try:
        lent = _take_allocation(request)
        if request["kind"] == "fingerprint":
            from tuner.fingerprint import measure_rates

            answer(**measure_rates())
            return
        from tuner.bridge import Config, allocated, enable_cache, measure_drift
        from tuner.session import Session

        config = Config.from_dict(request["config"])
        if request["kind"] == "drift":
            enable_cache()
            with allocated(config):
                asked = {name: request[name] for name in ("seconds", "examples", "least_learnt")}
                found = measure_drift(config, request["levels"], **asked)
            answer(levels=found)
            return
        with allocated(config), contextlib.closing(Session(config, lent)) as session:
            names = ("compile_seconds", "warmup_seconds", "from_cache")
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
