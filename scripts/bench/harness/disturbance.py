"""Disturbances of a measured process: waits for a core, and stolen time.

Linux counts for each thread how long it ran and how long it waited for a core ("run delay"), and
for the machine how much time its host took away ("steal"). A kernel that does not count gives None.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

#: A round with a larger share of run delay or steal is marked.
LIMIT = 0.03

#: Disturbances by name; None where they cannot be seen.
Disturbance = Mapping[str, Any]


class Thread(NamedTuple):
    """The kernel's counts of a thread, in nanoseconds.

    Attributes:
        running: time on a core.
        delayed: time waiting for a core.
    """

    running: int = 0
    delayed: int = 0


class Snapshot(NamedTuple):
    """The kernel's counts at a moment.

    Attributes:
        threads: of the processes, by thread id.
        stolen: ticks that the machine's host took away.
        ticks: of all cores.
    """

    threads: Mapping[int, Thread]
    stolen: int | None
    ticks: int | None


def snapshot(process: int | None = None, root: Path = Path("/proc")) -> Snapshot:
    """Read the counts of a process and of all that it started.

    Args:
        process: its id; None for this process.
        root: where the kernel shows them.
    """
    threads: dict[int, Thread] = {}
    for one in _tree(os.getpid() if process is None else process, root):
        for task in root.glob(f"{one}/task/*"):
            with suppress(OSError, ValueError):  # it has ended
                threads[int(task.name)] = _thread(task)
    stolen = ticks = None
    with suppress(OSError, ValueError, IndexError):
        # guest time is counted in user time as well
        counts = [int(word) for word in (root / "stat").read_text().split("\n")[0].split()[1:9]]
        stolen, ticks = counts[7], sum(counts)
    return Snapshot(threads, stolen, ticks)


def spent(before: Snapshot, after: Snapshot) -> list[Thread]:
    """Return the counts of each thread between two snapshots."""
    threads = []
    for number, (running, delayed) in after.threads.items():
        earlier = before.threads.get(number, Thread())
        threads.append(Thread(running - earlier.running, delayed - earlier.delayed))
    return threads


def during(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Return the disturbances of the processes between two snapshots.

    The run delay is the larger share of two: that of all threads together, and that of the thread
    that ran longest. Threads that only wait would hide the one that works.
    """
    threads = spent(before, after)
    busiest = max(threads, default=Thread())
    shares = [share for share in (_share(threads), _share([busiest])) if share is not None]
    steal = None
    if before.ticks is not None and after.ticks is not None and after.ticks > before.ticks:
        steal = ((after.stolen or 0) - (before.stolen or 0)) / (after.ticks - before.ticks)
    return {"run delay": max(shares, default=None), "steal": steal}


def reasons(disturbance: Disturbance | None) -> list[str]:
    """Return the disturbances that are too large for a claim, in words."""
    if disturbance is None:
        return []
    shares = [(name, disturbance.get(name)) for name in ("run delay", "steal")]
    return [f"{name} {share:.1%}" for name, share in shares if share is not None and share > LIMIT]


def _tree(process: int, root: Path) -> Iterator[int]:
    """Yield the process, and those that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for stat in root.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # the name, in parentheses, may hold spaces
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    waiting = [process]
    while waiting:
        yield (one := waiting.pop())
        waiting += children.get(one, ())


def _thread(task: Path) -> Thread:
    running, delayed, *_ = map(int, (task / "schedstat").read_text().split())
    return Thread(running, delayed)


def _share(threads: Sequence[Thread]) -> float | None:
    """Return the share of run delay; None where the kernel has counted nothing."""
    delayed = sum(thread.delayed for thread in threads)
    total = delayed + sum(thread.running for thread in threads)
    return delayed / total if total else None
