"""Doors: packages through which patched files call the overlay's modules.

A door imports a module when a seam first accesses it (PEP 562), because the module may import the
patched file. It names the modules that seams call for editors and type checkers only.
"""

# mirrors: nothing

from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def door(package: str) -> Callable[[str], ModuleType]:
    """Return the ``__getattr__`` of a package, which imports its modules on first access."""

    def load(name: str) -> ModuleType:
        path = f"{package}.{name}"
        try:
            return import_module(path)
        except ModuleNotFoundError as error:
            if not f"{path}.".startswith(f"{error.name}."):
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
