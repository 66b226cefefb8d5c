"""Installations for engines on a GPU, where their files can be linked to the real one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoint import generate
from support.engine import Engine
from support.sites import UPSTREAM


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A pristine view of the installation."""
    with tempfile.TemporaryDirectory(prefix="engine-", dir=UPSTREAM) as folder:
        yield Engine(Path(folder))


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """Views of the installation, "stock" and "overlaid", with their models."""
    with tempfile.TemporaryDirectory(prefix="engines-", dir=UPSTREAM) as folder:
        views = {}
        for name in ("stock", "overlaid"):
            (Path(folder) / name).mkdir()
            views[name] = Engine(Path(folder) / name)
            generate(views[name].folder / "model")  # before several runs at once would
        views["overlaid"].apply()
        yield views
