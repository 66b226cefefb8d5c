"""The overlay that the command line works with, and where copies of installations are made."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from overlay import cli
from overlay.source import Overlay
from support import mini, sites

MEMORY = Path("/dev/shm")
ROOM = 256 << 20


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The real installation, cut down."""
    return sites.small(tmp_path / "site")


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overlay:
    """A version 0.0.2 of the synthetic overlay, which the command line lays."""
    modules = {**mini.OURS, "vllm/v1/readiness/b.py": b""}
    overlay = mini.overlay(tmp_path / "ours", ours=modules, version="0.0.2")
    monkeypatch.setattr(cli, "ROOT", overlay.root)
    return overlay


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where there is room for one; else on the disk.

    Half of the time of several hundred cuts would go into the disk.
    """
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < ROOM:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="readiness-", dir=MEMORY) as folder:
        yield Path(folder)
