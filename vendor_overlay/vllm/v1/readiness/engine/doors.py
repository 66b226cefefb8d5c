"""Doors: packages through which patched files call the overlay's modules.

A door imports a module when a seam first accesses it (PEP 562), because the module may import the
patched file.
"""

# mirrors: nothing

from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def door(folder: str, *modules: str) -> Callable[[str], ModuleType]:
    """Return a package's ``__getattr__``, which imports ``modules`` on first access."""

    def load(name: str) -> ModuleType:
        if name not in modules:
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        return import_module(f"{folder}.{name}")

    return load
