"""Functions that the overlay is in, and that somebody else has replaced in this process.

Frameworks that embed vLLM (NeMo-RL and prime-rl, for instance) put functions of their own in place
of vLLM's when they are imported. What the overlay does in such a function is then gone, and nothing
else says so.
"""

# mirrors: nothing

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

_OURS = "vllm.v1.readiness"
#: Patched files call the overlay by names that begin with this.
_SEAM = "readiness"
#: The functions that one message names.
_NAMED = 8

#: Where a function was defined: name, first line, file.
_Origin = tuple[str, int, str]


def report() -> None:
    """Log the replaced functions of the modules that are loaded, once. Never raises."""
    try:
        modules = [m for name, m in sys.modules.copy().items() if name.startswith("vllm.") and m]
        found = [f"{name} (by {by})" for name, by in replacements(modules)]
    except Exception:  # other people's objects may do anything when they are looked at
        logger.debug("Readiness overlay: replaced functions are not known", exc_info=True)
        return
    if found:
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        logger.warning_once(
            "Readiness overlay: somebody has replaced functions that it is in, and what it does "
            "there is gone: %s",
            ", ".join(found[:_NAMED]) + more,
        )


def replacements(modules: Iterable[ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each replaced function, and where what replaces it was defined.

    A function is ours if its module is, or if it calls a module of ours that its own has imported.
    One that is wrapped, as functools.wraps does it, still runs, and is not yielded.

    Args:
        modules: of any kind; those without seams, and those whose code is not known, have none.
    """
    for module in modules:
        ours = module.__name__.startswith(_OURS)
        if not ours and not any(name.startswith(_SEAM) for name in vars(module)):
            continue
        defined: dict[str, set[_Origin]] = {}
        for name, code in _functions(_code_of(module)):
            if ours or _has_seam(code):
                defined.setdefault(name, set()).add(_origin(code))
        for name, origins in defined.items():
            layers = list(_layers(module, name))
            if layers and not any(_origin(each.__code__) in origins for each in layers):
                outer = layers[0]
                where = f"{outer.__code__.co_filename}:{outer.__code__.co_firstlineno}"
                yield f"{module.__name__}.{name}", f"{outer.__module__}, {where}"


def _code_of(module: ModuleType) -> CodeType | None:
    """Return a module's code as its file has it; None if its loader does not give it."""
    loader = getattr(module.__spec__, "loader", None)
    try:
        code = loader.get_code(module.__name__) if loader else None
    except (AttributeError, ImportError, OSError):
        return None
    return code if isinstance(code, CodeType) else None


def _functions(code: CodeType | None, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """Yield the functions of a module and of its classes, with their dotted names."""
    for inner in code.co_consts if code else ():
        if isinstance(inner, CodeType) and not inner.co_name.startswith("<"):
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield f"{prefix}{inner.co_name}", inner
            else:  # the body of a class
                yield from _functions(inner, f"{prefix}{inner.co_name}.")


def _has_seam(code: CodeType) -> bool:
    """Return whether a function, or one inside it, calls one of our modules."""
    if any(name.startswith(_SEAM) for name in code.co_names):
        return True
    return any(_has_seam(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _origin(code: CodeType) -> _Origin:
    return code.co_name, code.co_firstlineno, code.co_filename


def _layers(module: ModuleType, name: str) -> Iterator[FunctionType]:
    """Yield what has a dotted name now, and what that wraps, as far as these are functions."""
    current: Any = module
    for part in name.split("."):
        current = inspect.getattr_static(current, part, None)
    waiting, seen = [current], set[int]()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType):
            yield each
        waiting += _wrapped(each)


def _wrapped(each: object) -> Iterable[object]:
    """Return what an object of a known kind wraps."""
    if isinstance(each, staticmethod | classmethod):
        return (each.__func__,)
    if isinstance(each, property):
        return each.fget, each.fset, each.fdel
    if isinstance(each, functools.cached_property):
        return (each.func,)
    # A wrapper, and a kernel of Triton's. A mock would have any attribute.
    held = getattr(each, "__dict__", {})
    return held.get("__wrapped__"), held.get("fn")
