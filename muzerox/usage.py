"""What this process and the ones it started use of the machine: processor seconds and memory. Reads /proc; Linux only."""

from __future__ import annotations

import os
import time
from pathlib import Path


def cpu_seconds() -> float:
    """Processor seconds so far, those of living descendants included."""
    return time.process_time() + descendants_cpu_seconds()


def descendants_cpu_seconds() -> float:
    """Processor seconds so far of the processes this one started, and they, as far as they live."""
    tick = os.sysconf("SC_CLK_TCK")
    return sum((int(fields[11]) + int(fields[12])) / tick for fields in _descendants().values())


def machine_cpu_seconds() -> float | None:
    """Processor seconds so far that anybody took of the cores this process may use, or other guests of its host took from them.

    None where nobody tells. Counted in ticks, of a hundredth of a second as a rule.
    """
    counters = Path("/proc/stat")
    if not counters.exists():  # not Linux
        return None
    lines, own = counters.read_text().splitlines(), {f"cpu{core}" for core in os.sched_getaffinity(0)}
    rows = [[int(field) for field in numbers] for name, *numbers in map(str.split, lines) if name in own]
    # user, nice, system, idle, iowait, irq, softirq, steal; guests' time is part of the first two
    return sum(sum(row[:3]) + sum(row[5:8]) for row in rows) / os.sysconf("SC_CLK_TCK") if len(rows) == len(own) else None


def peak_bytes() -> float:
    """The most memory that was ever resident, the peaks of living descendants added to this process's; 0 where nobody tells.

    Not ``ru_maxrss``: a process inherits that from whoever started it.
    """
    return sum(map(_peak, (os.getpid(), *_descendants())))


def descendants() -> list[int]:
    """Processes that this one or one of its children started."""
    return list(_descendants())


def _descendants() -> dict[int, list[str]]:
    """Fields of /proc/PID/stat from the third on, of every process that this one or one of its children started."""
    stats: dict[int, list[str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stats[int(folder.name)] = _text(folder / "stat").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
    found: dict[int, list[str]] = {}
    parents = [os.getpid()]
    while parents:
        parent = parents.pop()
        children = {pid: fields for pid, fields in stats.items() if int(fields[1]) == parent}
        found.update(children)
        parents += children
    return found


def _peak(pid: int) -> float:
    try:
        lines = _text(Path(f"/proc/{pid}/status")).splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0.0)


def _text(file: Path) -> str:
    """A process is named in it, by what may be no text: its name is cut after 15 bytes, in the middle of a letter, too."""
    return file.read_text("utf-8", errors="replace")
