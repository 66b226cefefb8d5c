"""What disturbs a process while it is measured: waits for a core, stolen time, load, GPU clocks.

Linux counts for each thread how long it ran and how long it waited for a core ("run delay"), and
for the machine how much time its host took away ("steal"). A kernel that does not count says None.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

#: A round with a larger share of run delay or steal is marked.
LIMIT = 0.03
#: Bits of the throttle reasons that slow a GPU down: hardware, heat, and the power brake.
_SLOWED = 0x8 | 0x20 | 0x40 | 0x80
_QUERIES = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")

#: What disturbed one case on one side in one round, by name; None where it cannot be seen.
Disturbance = Mapping[str, Any]


class Thread(NamedTuple):
    """What the kernel has counted of a thread; times are in nanoseconds.

    Attributes:
        running: how long it ran.
        delayed: how long it waited for a core.
        voluntary: times that it gave its core away.
        involuntary: times that its core was taken away.
    """

    running: int = 0
    delayed: int = 0
    voluntary: int = 0
    involuntary: int = 0

    def since(self, before: Thread) -> Thread:
        """Return what was counted after ``before``."""
        return Thread(*(one - other for one, other in zip(self, before, strict=True)))

    def and_also(self, other: Thread) -> Thread:
        """Return what was counted in both."""
        return Thread(*(one + more for one, more in zip(self, other, strict=True)))


class Snapshot(NamedTuple):
    """The kernel's counts at a moment.

    Attributes:
        threads: of the processes, by thread id.
        stolen: ticks that the machine's host took away.
        ticks: of all cores.
        load: the load average of the last minute.
    """

    threads: Mapping[int, Thread]
    stolen: int | None
    ticks: int | None
    load: float | None


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
    stolen = ticks = load = None
    with suppress(OSError, ValueError, IndexError):
        # guest time is counted in user time as well
        counts = [int(word) for word in (root / "stat").read_text().split("\n")[0].split()[1:9]]
        stolen, ticks = counts[7], sum(counts)
    with suppress(OSError, ValueError):
        load = float((root / "loadavg").read_text().split()[0])
    return Snapshot(threads, stolen, ticks, load)


def during(*stretches: tuple[Snapshot, Snapshot]) -> dict[str, Any]:
    """Return what disturbed the processes in some stretches of time, each from when to when.

    The run delay is the larger share of two: that of all threads together, and that of the thread
    that ran longest. Threads that only wait would hide the one that works.
    """
    sums: dict[int, Thread] = {}
    stolen = ticks = 0
    for before, after in stretches:
        for number, thread in after.threads.items():
            spent = thread.since(before.threads.get(number, Thread()))
            sums[number] = sums.get(number, Thread()).and_also(spent)
        if before.ticks is not None and after.ticks is not None:
            stolen += (after.stolen or 0) - (before.stolen or 0)
            ticks += after.ticks - before.ticks
    threads = list(sums.values())
    busiest = max(threads, default=Thread(), key=lambda thread: thread.running)
    shares = [share for share in (_share(threads), _share([busiest])) if share is not None]
    return {
        "run delay": max(shares, default=None),
        "steal": stolen / ticks if ticks > 0 else None,
        "load": stretches[-1][1].load,
        "voluntary switches": sum(thread.voluntary for thread in threads),
        "involuntary switches": sum(thread.involuntary for thread in threads),
    }


def gpus() -> list[dict[str, Any]] | None:
    """Return each GPU's clocks in MHz and its throttle reasons, as nvidia-smi says; else None.

    Those that CUDA_VISIBLE_DEVICES leaves out are somebody else's.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = [f"--id={named}"] if named else []
    for reasons in _QUERIES:
        query = f"clocks.sm,clocks.mem,temperature.gpu,{reasons}"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *only]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            continue
        with suppress(ValueError):
            return [_gpu(line) for line in done.stdout.strip().splitlines()]
    return None


def reasons(disturbance: Disturbance | None) -> list[str]:
    """Return why figures that were measured with this disturbance are marked."""
    if disturbance is None:
        return []
    shares = [(name, disturbance.get(name)) for name in ("run delay", "steal")]
    texts = [f"{name} {share:.1%}" for name, share in shares if share is not None and share > LIMIT]
    for number, gpu in enumerate(disturbance.get("gpus") or ()):
        if int(gpu["throttled"], 16) & _SLOWED:
            texts.append(f"GPU {number} was slowed down ({gpu['throttled']})")
    return texts


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
    status = (task / "status").read_text()
    switches = dict(re.findall(r"^(\w+)_ctxt_switches:\s*(\d+)$", status, re.MULTILINE))
    return Thread(
        running, delayed, int(switches.get("voluntary", 0)), int(switches.get("nonvoluntary", 0))
    )


def _share(threads: Iterable[Thread]) -> float | None:
    """Return the share of run delay; None where the kernel has counted nothing."""
    kept: Sequence[Thread] = list(threads)
    delayed = sum(thread.delayed for thread in kept)
    total = delayed + sum(thread.running for thread in kept)
    return delayed / total if total else None


def _gpu(line: str) -> dict[str, Any]:
    core, memory, heat, reason = (word.strip() for word in line.split(","))
    int(reason, 16)
    numbers = [int(word) if word.isdigit() else None for word in (core, memory, heat)]
    return dict(zip(("sm", "memory", "celsius", "throttled"), (*numbers, reason), strict=True))
