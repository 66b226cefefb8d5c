"""The files of one engine: which belong together, and which are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from glob import escape
from pathlib import Path

from probe.records import ProbeError, Process, read

#: The ending of a process's file, behind the value of VLLM_READINESS_PROBE.
_LABEL = re.compile(r"(?:dp\d+-)?(?:rank|engine)\d+")
#: A process that ends so many nanoseconds before another one's last step has missed steps.
_EARLY = 10 * 10**9


def engine(name: Path) -> tuple[list[Process], list[str]]:
    """Read the files of one engine.

    Args:
        name: the value of VLLM_READINESS_PROBE, or one process's file.

    Returns:
        The processes by label, and sentences about files of an earlier engine, processes that
        have no file, and processes whose file ends before those of others.

    Raises:
        ProbeError: there is no such file, or one is damaged.
    """
    if not name.name:
        raise ProbeError(
            "no file is named. Name the value of VLLM_READINESS_PROBE: make probe FILE=FILE"
        )
    if name.is_file():
        return [read(name)], []
    files = sorted(
        file
        for file in name.parent.glob(f"{escape(name.name)}.*")
        if _LABEL.fullmatch(file.name.removeprefix(f"{name.name}.")) and file.is_file()
    )
    if not files:
        raise ProbeError(
            f"no file {name}.*: the engine writes them when it ends, or when a process of it "
            f"gets SIGUSR2; was VLLM_READINESS_PROBE={name} set, and did it make a step?"
        )
    processes = [read(file) for file in files]
    kept = _newest(processes)
    old = [f"{p.path} is of an earlier engine, and left out" for p in processes if p not in kept]
    if several_hosts(kept):
        kept = [_by_time_of_day(process) for process in kept]
    return sorted(kept, key=_natural), [*old, *_missing(kept)]


def _newest(processes: Sequence[Process]) -> list[Process]:
    """Return the processes of the engine that was written last."""
    # A host's own clock goes on when its time of day is set.
    one_host = not several_hosts(processes)
    last = max(processes, key=lambda p: int(p.header["written_ns"]) if one_host else _ended(p))
    if last.header.get("engine"):
        return [p for p in processes if p.header.get("engine") == last.header["engine"]]
    # Files of an earlier version have no engine's id: those of one ran at the same time.
    newest = max(_began(process) for process in processes)
    return [process for process in processes if _ended(process) > newest]


def _missing(processes: Sequence[Process]) -> Iterator[str]:
    """Return a sentence for each worker without a file, and each that ends early."""
    there = {process.label: process for process in processes}
    expected = [label for process in processes for label in process.header.get("workers", ())]
    for label in dict.fromkeys(expected):
        if label not in there:
            yield f"{label} has no file: it was killed, has made no step, or is on another host"
    ends = {
        label: max((span.ended for span in process.of("execute_model")), default=0)
        for label, process in there.items()
        if label in expected
    }
    last = max(ends.values(), default=0)
    for label, end in ends.items():
        if last - end > _EARLY:
            seconds = (last - end) / 1e9
            yield f"{label} ends {seconds:,.0f} s before the others: was it killed?"


def newest(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Return the processes with their records of the newest stretch alone."""
    end = max((span.ended for process in processes for span in process.spans), default=0)
    return [process.within(end - round(seconds * 1e9), end) for process in processes]


def several_hosts(processes: Iterable[Process]) -> bool:
    """Return whether the processes ran on more than one host."""
    return len({process.header["boot"] for process in processes}) > 1


def _by_time_of_day(process: Process) -> Process:
    """Return the process with times in nanoseconds of Unix time, by its host's clock."""
    since = _began(process) - int(process.header["started_ns"])
    spans = [
        span._replace(
            began=span.began + since,
            ended=span.ended + since,
            consumed=span.consumed and span.consumed + since,
        )
        for span in process.spans
    ]
    return Process(process.path, process.header, spans)


def _began(process: Process) -> int:
    """Return the start of the records in nanoseconds of Unix time."""
    return int(process.header["started_unix_ns"])


def _ended(process: Process) -> int:
    header = process.header
    return _began(process) + int(header["written_ns"]) - int(header["started_ns"])


def _natural(process: Process) -> list[str | int]:
    """Return a key that sorts labels by the numbers in them: rank2, rank10."""
    parts = re.split(r"(\d+)", process.label)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]
