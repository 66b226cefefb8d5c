"""Helpers to wrap functions of vLLM and torch, now or once their module is imported."""

# mirrors: nothing

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Function = Callable[..., Any]
Callback = Callable[[ModuleType], None]

#: Attribute of a wrapper: the ``by`` of all wrappers around the original function.
_ATTRIBUTE = "readiness"


def wrap_once(owner: object, name: str, wrapper: Callable[[Function], Function], by: str) -> None:
    """Replace ``owner.name`` by ``wrapper(owner.name)``; a no-op on a second call with ``by``."""
    original = getattr(owner, name)
    before: frozenset[str] = getattr(original, _ATTRIBUTE, frozenset())
    if by in before:
        return
    replacement = wraps(original)(wrapper(original))
    setattr(replacement, _ATTRIBUTE, before | {by})
    setattr(owner, name, replacement)


class ImportHook(importlib.abc.MetaPathFinder):
    """Import finder that calls ``callbacks[name]`` once, after module ``name`` is executed."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec with a loader that runs the callback."""
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
    """Call ``callback`` with module ``name``, now or once the module is imported."""
    if (module := sys.modules.get(name)) is not None:
        callback(module)
        return
    if _hook not in sys.meta_path:
        sys.meta_path.insert(0, _hook)
    _hook.callbacks[name] = callback
