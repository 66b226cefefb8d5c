"""Processes that use an installation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.hints import COMMAND, WHEEL
from overlay.installation import Installation


def refuse_serving(installation: Installation) -> None:
    """Raise OverlayError if a process serves from the installation.

    Such a process has a file of vLLM open or mapped, or the command line of a vLLM server.
    Processes of other users (without root) and of other containers are not visible.

    >>> refuse_serving(vllm)
    """
    if processes := list(serving(installation)):
        raise OverlayError(
            Exit.BUSY,
            "is in use; a worker that starts later would mix two versions of the files",
            subject=installation.site,
            found="; ".join(processes),
            next_step="stop the process, or use --force (FORCE=1) if it will start no more workers",
        )


def serving(installation: Installation) -> Iterator[str]:
    """Yield a phrase for each process that serves from the installation, with the evidence.

    >>> list(serving(vllm))
    []
    """
    site = installation.site
    here = os.stat(site)
    python = installation.interpreter
    bins = {str(p) for p in (python.parent, python.parent.resolve())} if python else set()
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        if int(entry.name) == os.getpid():
            continue
        try:
            # /proc/PID/root is the root directory in the process's mount namespace.
            if os.path.samestat(os.stat(f"{entry}/root{site}"), here) and (
                evidence := _evidence(entry, str(site), bins)
            ):
                name = (entry / "comm").read_bytes().decode(errors="replace").strip()
                yield f"process {entry.name} ({name}, {evidence})"
        except OSError:
            continue


def _evidence(entry: Path, site: str, bins: set[str]) -> str | None:
    package = f"{site}/vllm/"
    words = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
    ours = any(word.endswith(("scripts/overlay", f"/{COMMAND}")) for word in words[:3])
    if ours or _module(words) in ("overlay", WHEEL):
        return None  # Another run of this tool only reads, or waits for the lock.
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
    # An API server maps libraries of its environment, but none of vLLM's.
    its = any(str(Path(word).parent) in bins for word in words[:8])
    its = its or any(path.startswith(site + "/") for path in mapped)
    return "its command line is vLLM's" if its and _is_server(words) else None


def _is_server(words: list[str]) -> bool:
    if any(Path(word).name == "vllm" for word in words[:8]) or words[0].startswith("VLLM::"):
        return True
    return _module(words).partition(".")[0] == "vllm"


def _module(words: list[str]) -> str:
    """Return the module that ``python -m`` runs, or an empty string."""
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""
