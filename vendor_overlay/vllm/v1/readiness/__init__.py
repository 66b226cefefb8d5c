"""The readiness overlay.

State that decoding needs stays on the device; outputs are copied to the host beside it.

``registry`` declares every feature and fix, ``engine.switch`` reads which are on, and
``watch.startup`` is called by each model runner's constructor. Importing the package, its folders,
``registry`` or ``engine.switch`` imports neither torch nor vLLM's logger, because ``vllm.envs``
imports them.

A patched file imports one module of the overlay as ``readiness``, its door: ``live`` in the V1
model runner and its batch; elsewhere a folder, of which it calls the modules. A folder imports a
module when a seam first names it (PEP 562), since the module may import the patched file.
"""

# mirrors: nothing

from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def door(folder: str, *modules: str) -> Callable[[str], ModuleType]:
    """Make the ``__getattr__`` of a folder that patched files call.

    Args:
        folder: its dotted name.
        modules: those that seams call.
    """

    def load(name: str) -> ModuleType:
        if name not in modules:
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        return import_module(f"{folder}.{name}")

    return load
