"""The examples in the docstrings of the tool's public functions are run."""

import doctest
import importlib
import inspect as introspection
import os
import sys
from pathlib import Path

import pytest
from overlay import cli
from overlay.installation import locate
from overlay.state import inspect
from support import mini
from support.sites import REPO

MODULES = sorted(path.stem for path in (REPO / "scripts" / "overlay").glob("[a-z]*.py"))
FUNCTIONS = [
    (f"overlay.{module}", name)
    for module in MODULES
    for name, function in introspection.getmembers(
        importlib.import_module(f"overlay.{module}"), introspection.isfunction
    )
    if function.__module__ == f"overlay.{module}" and not name.startswith("_")
]
#: These change the streams or the signals of the process.
WITHOUT = (("overlay.output", "run"), ("overlay.commands", "become"))


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """Beside a small vLLM in ``site``, which is ``vllm``, and a ``small`` overlay for it."""
    small = mini.worded(tmp_path / "overlay")
    monkeypatch.setattr(cli, "ROOT", small.root)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"site": mini.install(Path("site")), "vllm": locate(site="site")}
    names |= {"small": small, "Path": Path, "inspect": inspect, "os": os, "sys": sys}
    imported = importlib.import_module(module)
    (test,) = doctest.DocTestFinder(recurse=False).find(
        getattr(imported, name), name, imported, extraglobs=names
    )
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    result = doctest.DocTestRunner(optionflags=flags).run(test)
    assert result.failed == 0
    assert result.attempted or (module, name) in WITHOUT
