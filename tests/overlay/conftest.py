"""Where installations are made that last for one cut."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ROOM = 256 << 20


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is room for one; else on the disk.

    Half of the time of several hundred cuts would go into the disk.
    """
    if not os.access(MEMORY, os.W_OK) or _free(MEMORY) < ROOM:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="readiness-", dir=MEMORY) as folder:
        yield Path(folder)


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
