"""An import hook: call a function once a module has been imported."""

# mirrors: nothing

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class ImportHook(importlib.abc.MetaPathFinder):
    """A finder that adds a callback to the loaders of chosen modules.

    Attributes:
        callbacks: by module name; each is called once, after the module has been executed.
    """

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with a loader that calls back when it is done."""
        callback = self.callbacks.pop(fullname, None)
        if callback is None:
            return None
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_hook = ImportHook()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback`` with a module: now if it is imported, otherwise once it is."""
    if (module := sys.modules.get(name)) is not None:
        callback(module)
        return
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)
    _hook.callbacks[name] = callback
