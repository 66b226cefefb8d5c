"""Processes that a test has started, directly or not."""

import time
from pathlib import Path


def started_with(variable: str) -> list[str]:
    """The command lines of the processes that have NAME=VALUE in their environment."""
    lines = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                lines.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return lines


def gone(variable: str, seconds: float = 5.0) -> bool:
    """Whether those processes end; a process that was killed may be there for a moment."""
    deadline = time.monotonic() + seconds
    while started_with(variable) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not started_with(variable)
