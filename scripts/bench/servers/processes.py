"""CPU time of a server's processes, by what they are."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

#: What vLLM calls its processes to what we call them.
_TITLES = {
    "::APIServer_": "API server",
    "/vllm-rs ": "API server",
    "::EngineCore": "engine core",
    "::Worker": "workers",
}


class Process(NamedTuple):
    """A process at a moment.

    Attributes:
        title: its command line, in which vLLM names its processes.
        seconds: of CPU that it has used.
    """

    title: str
    seconds: float


def sample(server: int) -> dict[int, Process]:
    """Return a server's process and all that it has started, by their ids."""
    found = psutil.Process(server)
    processes = {}
    for process in (found, *found.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            title = " ".join(process.cmdline())
            processes[process.pid] = Process(title, times.user + times.system)
    return processes


def cores(
    before: Mapping[int, Process], after: Mapping[int, Process], server: int, seconds: float
) -> dict[str, float]:
    """Return how many cores each kind of process has used between two samples.

    Args:
        before: at the beginning.
        after: at the end.
        server: the id of the process that started all others. It is the API server unless others
            are, and then their launcher.
        seconds: between the samples.

    Returns:
        "API server" if there is one; "API server 0" and so on if there are several; "engine core",
        "launcher", "workers" and "others" if there are any.
    """
    serving = {one.title: number for number, one in after.items() if _kind(one) == "API server"}
    servers = [
        serving[title] for title in sorted(serving, key=lambda title: (len(title), title))
    ] or [server]
    used: dict[str, float] = {}
    for number, one in after.items():
        kind = _kind(one)
        if number in servers:
            kind = f"API server {servers.index(number)}" if len(servers) > 1 else "API server"
        elif number == server:
            kind = "launcher"
        spent = one.seconds - before.get(number, Process("", 0.0)).seconds
        used[kind] = used.get(kind, 0.0) + spent / seconds
    return {kind: used[kind] for kind in sorted(used) if used[kind] or kind != "others"}


def _kind(process: Process) -> str:
    names = (kind for title, kind in _TITLES.items() if title in process.title)
    return next(names, "others")
