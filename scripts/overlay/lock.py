"""Serialise runs of the tool on an installation, without a lock file."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from overlay.errors import Exit, OverlayError


@contextmanager
def exclusive(site: Path, wait: float) -> Iterator[int]:
    """Hold an flock on the directory ``site`` during the context.

    Yields the directory's file descriptor. A child process that inherits the descriptor also holds
    the lock. The kernel releases the lock once all these processes have ended.

    Raises:
        OverlayError: another run still holds the lock after ``wait`` seconds.
    """
    handle = os.open(site, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise OverlayError(
                        Exit.BUSY,
                        f"another run holds the lock and did not finish within {wait:g} s",
                        subject=site,
                        next_step="wait for it and run the same command again (--wait SECONDS)",
                    ) from None
                time.sleep(0.02)
        yield handle
    finally:
        os.close(handle)
