"""The overlay that the command line works with, and where copies of installations are made."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from overlay import cli
from overlay.source import Overlay
from support import mini, sites


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """The real installation, cut down. Each command takes seconds: for tests of real patches."""
    return sites.small(tmp_path / "site")


@pytest.fixture
def site(tmp_path: Path, worded: Overlay) -> Path:
    """The synthetic installation, for which the command line lays an overlay with a feature."""
    return mini.install(tmp_path / "site")


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overlay:
    """A version 0.0.2 of the synthetic overlay, which the command line lays."""
    modules = {**mini.OURS, "vllm/v1/readiness/b.py": b""}
    overlay = mini.overlay(tmp_path / "ours", ours=modules, version="0.0.2")
    monkeypatch.setattr(cli, "ROOT", overlay.root)
    return overlay


@pytest.fixture
def worded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overlay:
    """A synthetic overlay with a feature, which the command line lays."""
    overlay = mini.worded(tmp_path / "worded")
    monkeypatch.setattr(cli, "ROOT", overlay.root)
    return overlay


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory: half of the time of several hundred cuts would go into the disk."""
    with sites.in_memory(tmp_path, 256 << 20) as folder:
        yield folder
