"""Processes that have an installation in use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.installation import Installation


@dataclass(frozen=True)
class Process:
    """A process, and the evidence that it serves from the installation."""

    pid: int
    name: str
    evidence: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name}, {self.evidence})"


def serving(installation: Installation) -> list[Process]:
    """Processes with a file of this vLLM open or mapped, or started as its server.

    Processes of other users (without root) and of other containers are not seen.
    """
    site = installation.site
    here = os.stat(site)
    bins = {
        str(p) for i in (installation.interpreter,) if i for p in (i.parent, i.parent.resolve())
    }
    processes = []
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        pid = int(entry.name)
        if pid == os.getpid():
            continue
        try:
            # Paths below /proc are those of the process's own mount namespace.
            there = os.stat(f"/proc/{pid}/root{site}")
            if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
                continue
            if evidence := _evidence(entry, str(site), bins):
                name = (entry / "comm").read_bytes().decode(errors="replace").strip()
                processes.append(Process(pid, name, evidence))
        except OSError:
            continue
    return processes


def _evidence(entry: Path, site: str, bins: set[str]) -> str | None:
    package = f"{site}/vllm/"
    words = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
    if any(word.endswith("scripts/overlay") for word in words[:3]) or _module(words) == "overlay":
        return None  # Another run of this tool only looks, or waits for the lock.
    maps = os.fsdecode((entry / "maps").read_bytes()).splitlines()
    mapped = {fields[5] for line in maps if len(fields := line.split(None, 5)) == 6}
    if any(path.startswith(package) for path in mapped):
        return f"maps a file under {package}"
    for link in (entry / "fd").iterdir():
        try:
            if os.readlink(link).startswith(package):
                return f"has a file open under {package}"
        except FileNotFoundError:
            continue
    # An API server maps no library of vLLM's, but others of its environment.
    ours = str(Path(words[0]).parent) in bins or any(p.startswith(site + "/") for p in mapped)
    if (_is_server(words) and ours) or any(f"{folder}/vllm" in words[:8] for folder in bins):
        return "its command line is vLLM's"
    return None


def _is_server(words: list[str]) -> bool:
    if any(Path(word).name == "vllm" for word in words[:8]) or words[0].startswith("VLLM::"):
        return True
    return _module(words).partition(".")[0] == "vllm"


def _module(words: list[str]) -> str:
    """The module that ``python -m`` runs; empty if the command line is not such a one."""
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def refuse_serving(installation: Installation) -> None:
    """Raise if a process is serving from the installation.

    Raises:
        OverlayError: naming the processes.
    """
    if processes := serving(installation):
        raise OverlayError(
            Exit.BUSY,
            "is in use; a worker that starts later would mix two versions of the files",
            subject=installation.site,
            found="; ".join(str(process) for process in processes),
            next_step="stop it first, or set FORCE=1 (--force) if it will start no more workers",
        )
