"""Doors: folders through which patched files call the modules of the runtime.

A door imports a module when a seam first accesses it (PEP 562), because the module may import the
patched file.
"""

# mirrors: nothing

from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def door(folder: str, *modules: str) -> Callable[[str], ModuleType]:
    """Make the ``__getattr__`` of a folder.

    Args:
        folder: dotted name of the folder.
        modules: names of the modules that seams call.
    """

    def load(name: str) -> ModuleType:
        if name not in modules:
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        return import_module(f"{folder}.{name}")

    return load
