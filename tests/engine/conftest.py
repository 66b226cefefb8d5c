"""Installations that the tests of one worker share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import checkpoint
from support.engine import PreloadedEngine
from support.sites import REPO


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A directory where the files of the shared environment can be hard-linked."""
    folder = Path(tempfile.mkdtemp(prefix="engines-", dir=REPO / "build"))
    yield folder
    shutil.rmtree(folder)


def _preloaded(folder: Path) -> PreloadedEngine:
    engine = PreloadedEngine(folder)
    checkpoint.generate(folder / "model")
    return engine


@pytest.fixture(scope="session")
def stock(folder: Path) -> Iterator[PreloadedEngine]:
    """A pristine installation."""
    engine = _preloaded(folder / "stock")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def overlaid(folder: Path) -> Iterator[PreloadedEngine]:
    """An overlaid installation."""
    engine = _preloaded(folder / "overlaid")
    engine.apply()
    yield engine
    engine.close()
