"""Doors: the modules that patched files call, by the names that editors see."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from support.sites import REPO
from vllm.v1 import readiness
from vllm.v1.readiness import core

FOLDERS = ("core", "engine", "frontend", "inputs", "sample", "watch")
_IMPORT = re.compile(r"^\+from vllm\.v1\.readiness import (\w+) as readiness$", re.M)


@cache
def called() -> dict[str, set[str]]:
    """Return the names that patched files use, by door."""
    text = "".join(patch.read_text() for patch in sorted((REPO / "patches").glob("*.patch")))
    files = re.split(r"^--- a/(\S+)$", text, flags=re.M)[1:]
    doors: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    for path, changes in zip(files[::2], files[1::2], strict=True):
        if found := _IMPORT.search(changes):
            doors[path] = found[1]
        for name in re.findall(r"^\+(?!.*import).*?\breadiness\.(\w+)", changes, re.M):
            names.setdefault(path, set()).add(name)
    used: dict[str, set[str]] = {}
    for path, some in names.items():
        if path in doors:  # other files import a module by itself
            used.setdefault(doors[path], set()).update(some)
    return used


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_door_names_the_modules_that_patched_files_call(folder: str) -> None:
    package = import_module(f"{readiness.__name__}.{folder}")
    tree = ast.parse(Path(str(package.__file__)).read_text())
    shown = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).endswith(f".{folder}")
        for alias in node.names
    }
    assert called()[folder] == shown
    for name in shown:
        assert getattr(package, name).__name__ == f"{package.__name__}.{name}"


@pytest.mark.parametrize("name", ["nothing", "a.b", "step.nothing", "_nothing", "__wrapped__"])
def test_a_door_has_no_other_attribute(name: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"has no attribute {name!r}")):
        getattr(core, name)
