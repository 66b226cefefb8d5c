"""Report patched functions that other code has replaced in this process.

Frameworks that embed vLLM, such as NeMo-RL and prime-rl, replace functions of vLLM when they are
imported. Without a report, nothing shows that the overlay is inactive in those functions.
"""

# mirrors: nothing

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from vllm.logger import init_logger
from vllm.v1.readiness.engine import originals

logger = init_logger(__name__)

_OURS = "vllm.v1.readiness"
#: Prefix of the names under which patched files import the overlay.
_SEAM = "readiness"
#: Maximum number of functions named in the message.
_NAMED = 8

#: A function's name, first line and file.
_Origin = tuple[str, int, str]


def report() -> None:
    """Log once which functions of the loaded modules are replaced. Never raises."""
    try:
        modules = [m for name, m in sys.modules.copy().items() if name.startswith("vllm.") and m]
        names = [f"{name} (by {by})" for name, by in replacements(modules)]
    except Exception:  # third-party objects may raise on any access
        logger.debug("Readiness overlay: cannot check for replaced functions", exc_info=True)
        return
    if names:
        more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        logger.warning_once(
            "Readiness overlay: patched functions were replaced; the overlay is inactive in: %s",
            ", ".join(names[:_NAMED]) + more,
        )


def replacements(modules: Iterable[ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield each replaced function's dotted name, and the location of its replacement.

    Only functions of the overlay, and functions that call it, are considered. A function wrapped
    with ``functools.wraps`` is not replaced.
    """
    for module in modules:
        ours = module.__name__.startswith(_OURS)
        if not ours and not any(name.startswith(_SEAM) for name in vars(module)):
            continue
        defined: dict[str, set[_Origin]] = {}
        loader = getattr(module.__spec__, "loader", None)
        for name, code in originals.functions(originals.code_of(module.__name__, loader)):
            if ours or _has_seam(code):
                defined.setdefault(name, set()).add(_origin(code))
        for name, origins in defined.items():
            layers = list(_layers(module, name))
            if layers and not any(_origin(layer.__code__) in origins for layer in layers):
                outer = layers[0]
                where = f"{outer.__code__.co_filename}:{outer.__code__.co_firstlineno}"
                yield f"{module.__name__}.{name}", f"{outer.__module__}, {where}"


def _has_seam(code: CodeType) -> bool:
    """Return whether a function, or one nested in it, calls the overlay."""
    if any(name.startswith(_SEAM) for name in code.co_names):
        return True
    return any(_has_seam(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _origin(code: CodeType) -> _Origin:
    return code.co_name, code.co_firstlineno, code.co_filename


def _layers(module: ModuleType, name: str) -> Iterator[FunctionType]:
    """Yield the current function with a dotted name, and the functions that it wraps."""
    current: Any = module
    for part in name.split("."):
        current = inspect.getattr_static(current, part, None)
    waiting, seen = [current], set[int]()
    while waiting:
        layer = waiting.pop()
        if layer is None or id(layer) in seen:
            continue
        seen.add(id(layer))
        if isinstance(layer, FunctionType):
            yield layer
        waiting += _wrapped(layer)


def _wrapped(layer: object) -> Iterable[object]:
    if isinstance(layer, staticmethod | classmethod):
        return (layer.__func__,)
    if isinstance(layer, property):
        return layer.fget, layer.fset, layer.fdel
    if isinstance(layer, functools.cached_property):
        return (layer.func,)
    # A wrapper or a Triton kernel. A mock has every attribute, but not in its __dict__.
    attributes = getattr(layer, "__dict__", {})
    return attributes.get("__wrapped__"), attributes.get("fn")
