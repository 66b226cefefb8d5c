"""Processes of an engine or a server: cores that they use, and disturbances.

Linux counts for each thread how long it ran and how long it waited for a core ("run delay"), and
for the machine how much time its host took away ("steal").
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

#: A slice with a larger share of run delay or steal counts for no interval.
LIMIT = 0.03
#: Titles of vLLM's processes to our names.
_NAMES = {
    "::APIServer_": "API server",
    "/vllm-rs ": "API server",
    "::EngineCore": "engine core",
    "::Worker": "workers",
}


class Process(NamedTuple):
    """Counts of a process at a moment.

    Attributes:
        title: its command line, in which vLLM names its processes.
        seconds: of CPU that it has used.
        threads: by id, nanoseconds on a core and waiting for one.
    """

    title: str
    seconds: float
    threads: Mapping[int, tuple[int, int]]

    @property
    def name(self) -> str:
        """Kind of process."""
        return next((name for mark, name in _NAMES.items() if mark in self.title), "others")


class Snapshot(NamedTuple):
    """Counts at a moment.

    Attributes:
        at: time.monotonic().
        root: id of the process that started all others.
        processes: by id.
        stolen: seconds that the machine's host took away.
        total: seconds of all cores.
    """

    at: float
    root: int
    processes: Mapping[int, Process]
    stolen: float
    total: float


def snapshot(root: int) -> Snapshot:
    """Read the counts of a process and of all that it started."""
    processes = {}
    found = psutil.Process(root)
    for one in (found, *found.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times, title = one.cpu_times(), " ".join(one.cmdline())
            threads = dict(_threads(Path(f"/proc/{one.pid}/task")))
            processes[one.pid] = Process(title, times.user + times.system, threads)
    times = psutil.cpu_times()
    total = sum(times[:8])  # guest time is counted in user time as well
    return Snapshot(time.monotonic(), root, processes, getattr(times, "steal", 0.0), total)


def disturbances(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the disturbances between two snapshots that are too large for a claim.

    The run delay is the larger share of two: that of all threads together, and that of the thread
    that ran longest. Threads that only wait would hide the one that works.
    """
    earlier = {n: each for one in before.processes.values() for n, each in one.threads.items()}
    later = {n: each for one in after.processes.values() for n, each in one.threads.items()}
    spent = []
    for number, (running, delayed) in later.items():
        began = earlier.get(number, (0, 0))
        spent.append((running - began[0], delayed - began[1]))
    delay = max(_share(spent), _share([max(spent, default=(0, 0))]))
    total = after.total - before.total
    steal = (after.stolen - before.stolen) / total if total > 0 else 0.0
    shares = {"run delay": delay, "steal": steal}
    return [f"{name} {share:.1%}" for name, share in shares.items() if share > LIMIT]


def cores(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Return how many cores each kind of process has used between two snapshots.

    The root is the API server unless others are, and then their launcher.

    Returns:
        "API server" if there is one; "API server 0" and so on if there are several; "engine core",
        "launcher", "workers" and "others" if there are any.
    """
    titles = {n: one.title for n, one in after.processes.items() if one.name == "API server"}
    servers = sorted(titles, key=lambda n: (len(titles[n]), titles[n])) or [after.root]
    used: dict[str, float] = {}
    for number, one in after.processes.items():
        name = one.name
        if number in servers:
            name = f"API server {servers.index(number)}" if len(servers) > 1 else "API server"
        elif number == after.root:
            name = "launcher"
        spent = one.seconds
        if number in before.processes:
            spent -= before.processes[number].seconds
        used[name] = used.get(name, 0.0) + spent / (after.at - before.at)
    return {name: used[name] for name in sorted(used) if used[name] or name != "others"}


def _threads(tasks: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    for task in tasks.glob("*"):
        with suppress(OSError, ValueError):  # it has ended, or the kernel does not count
            running, delayed, *_ = map(int, (task / "schedstat").read_text().split())
            yield int(task.name), (running, delayed)


def _share(threads: Sequence[tuple[int, int]]) -> float:
    delayed = sum(waited for _, waited in threads)
    total = delayed + sum(ran for ran, _ in threads)
    return delayed / total if total else 0.0
