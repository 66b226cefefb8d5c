"""Doors: packages through which patched files call the overlay's modules.

A door imports a module when a seam first accesses it (PEP 562), because the module may import the
patched file. It names the modules that seams call for editors and type checkers only.
"""

# mirrors: nothing

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def door(package: str) -> Callable[[str], ModuleType]:
    """Return the ``__getattr__`` of a package, which imports its modules on first access."""

    def load(name: str) -> ModuleType:
        path = f"{package}.{name}"
        if name.startswith("_") or find_spec(path) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return import_module(path)

    return load
