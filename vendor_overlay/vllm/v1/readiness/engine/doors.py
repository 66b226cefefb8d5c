"""Doors: folders through which patched files call the modules of the runtime.

A door imports a module when a seam first accesses it (PEP 562), not earlier: the module may import
the patched file.
"""

# mirrors: nothing

from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def door(folder: str, *modules: str) -> Callable[[str], ModuleType]:
    """Return a folder's ``__getattr__``, which imports ``modules`` when seams access them."""

    def load(name: str) -> ModuleType:
        if name not in modules:
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        return import_module(f"{folder}.{name}")

    return load
