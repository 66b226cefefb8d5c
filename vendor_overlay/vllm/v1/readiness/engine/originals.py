"""Tell vLLM's own functions from replacements by other code.

Plugins and frameworks replace functions of vLLM, at any time: an attribute of a class, of an
instance or of a module, with or without ``functools.wraps``. A function is vLLM's own if its code
is that of its module's file.
"""

# mirrors: nothing

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec
from operator import itemgetter
from types import CodeType, FunctionType, MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, ref

_VLLM = "vllm."
#: Each checked function's code, and whether it was vLLM's own.
_checked: "WeakKeyDictionary[FunctionType, tuple[CodeType, bool]]" = WeakKeyDictionary()


def is_vllms(value: object) -> bool:
    """Return whether a function, property or class is vLLM's own, not wrapped.

    A class is vLLM's own if it is defined in vLLM; its methods are not checked.
    """
    if isinstance(value, type):
        return str(value.__module__).startswith(_VLLM)
    function = _function(value)
    if function is None or hasattr(function, "__wrapped__"):
        return False
    code, known = function.__code__, _checked.get(function)
    if known is None or known[0] is not code:
        known = _checked[function] = code, _is_in_file(function)
    return known[1]


def all_vllms(owner: object, names: Iterable[str]) -> bool:
    """Return whether none of an owner's attributes is :func:`replaced`."""
    return not any(True for _ in replaced(owner, names))


def replaced(owner: object, names: Iterable[str]) -> Iterator[tuple[str, object]]:
    """Yield dotted name and value of each attribute that is not vLLM's own.

    ``owner`` is an instance, a class, or the namespace of a module.
    """
    if isinstance(owner, dict):
        for name in names:
            value = owner.get(name)
            if not is_vllms(value) or getattr(value, "__qualname__", None) != name:
                yield f"{owner.get('__name__')}.{name}", value
        return
    kind = owner if isinstance(owner, type) else type(owner)
    own: Mapping[str, Any] = {} if owner is kind else getattr(owner, "__dict__", {})
    for name in names:
        base = next((base for base in kind.__mro__ if name in vars(base)), None)
        value = own.get(name, vars(base)[name] if base else None)
        if name in own or base is None or not _is_method(base, name, value):
            yield f"{kind.__module__}.{kind.__qualname__}.{name}", value


def replacements(owners: Iterable[tuple[object, Iterable[str]]]) -> list[str]:
    """Describe each attribute that is not vLLM's own, by name and place, for messages."""
    return [
        f"{name} (by {location(value)})"
        for owner, names in owners
        for name, value in replaced(owner, names)
    ]


def is_made_by(function: object, maker: FunctionType) -> bool:
    """Return whether a function is one that is defined in ``maker``, a function of vLLM's."""
    return (
        isinstance(function, FunctionType)
        and function.__code__ in maker.__code__.co_consts
        and is_vllms(maker)
    )


class Watch:
    """Attributes of many owners, compared with those at the last call.

    :meth:`changed` takes a few microseconds. An override in an instance or a derived class changes
    the size of its namespace.

    Args:
        owners: each owner with its attributes: methods and properties of an instance or a class,
            entries of a namespace (a dict).
    """

    def __init__(self, owners: Iterable[tuple[object, Iterable[str]]]) -> None:
        names: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
        sized: dict[int, Callable[[], Any]] = {}

        def add(key: object, space: Mapping[str, Any], name: str) -> None:
            _, known = names.setdefault(id(key), (space, []))
            known.append(name)

        for owner, attributes in owners:
            if isinstance(owner, dict):
                for name in attributes:
                    add(owner, owner, name)
                continue
            kind = owner if isinstance(owner, type) else type(owner)
            if owner is not kind:
                sized[id(owner)] = _weakly(owner)
            for name in attributes:
                for base in kind.__mro__:
                    if name in vars(base):
                        add(base, vars(base), name)
                        break
                    sized[id(base)] = _weakly(base)  # may get an override
        self._entries = [(itemgetter(*known), space) for space, known in names.values()]
        self._sized = [*sized.values()]
        self._values = self._look()

    def changed(self) -> bool:
        """Return whether an attribute was replaced, overridden, deleted or restored."""
        before, self._values = self._values, self._look()
        try:
            # Of two lists, only values that are not identical are compared.
            return bool(self._values != before)
        except Exception:  # a replacement may have any __eq__
            return True

    def _look(self) -> object:
        try:
            values = [get(space) for get, space in self._entries]
            return values, [len(owner().__dict__) for owner in self._sized]
        except (AttributeError, KeyError):  # deleted
            return None


def _weakly(owner: object) -> "Callable[[], Any]":
    """Refer to an owner, which may hold the watch, without keeping it alive if it can be."""
    try:
        return ref(owner)
    except TypeError:  # a class with slots
        return lambda: owner


def location(value: object) -> str:
    """Return the module, file and line of a function, for messages."""
    function = _function(value)
    if function is None:
        return f"a {type(value).__name__}"
    code = function.__code__
    return f"{function.__globals__.get('__name__')}, {code.co_filename}:{code.co_firstlineno}"


def namespace(kind: type) -> dict[str, Any]:
    """Return the namespace of the module that defines a class of vLLM; empty if unknown."""
    for value in vars(kind).values():
        function = _function(value)
        if function is not None and function.__module__ == kind.__module__ and is_vllms(function):
            return function.__globals__
    return {}


def _code_of(name: str, loader: object) -> CodeType | None:
    """Return a module's original code; None if its loader has none."""
    try:
        code = loader.get_code(name) if loader else None  # type: ignore[attr-defined]
    except Exception:  # a third-party loader, or a file that has changed, may raise any
        return None
    return code if isinstance(code, CodeType) else None


def _functions(code: CodeType | None, prefix: str = "") -> Iterator[tuple[str, CodeType]]:
    """Yield the dotted names and code of a module's functions and methods."""
    for inner in code.co_consts if code else ():
        if isinstance(inner, CodeType) and not inner.co_name.startswith("<"):
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield f"{prefix}{inner.co_name}", inner
            else:  # the body of a class
                yield from _functions(inner, f"{prefix}{inner.co_name}.")


def _function(value: object) -> FunctionType | None:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    return value if isinstance(value, FunctionType) else None


def _is_method(base: type, name: str, value: object) -> bool:
    function = _function(value)
    return (
        function is not None
        and function.__module__ == base.__module__
        and function.__qualname__ == f"{base.__qualname__}.{name}"
        and is_vllms(function)
    )


def _is_in_file(function: FunctionType) -> bool:
    """Return whether a function's code is in the file of its module, one of vLLM's."""
    spec = function.__globals__.get("__spec__")
    if not isinstance(spec, ModuleSpec) or function.__module__ != spec.name:
        return False
    if not spec.name.startswith(_VLLM):
        return False
    try:
        codes = _codes(spec.name, spec.loader)
    except TypeError:  # the loader has no hash
        return False
    return function.__code__ in codes.get(function.__qualname__, ())


@lru_cache(maxsize=4)  # the functions of a module are checked one after the other
def _codes(name: str, loader: object) -> Mapping[str, list[CodeType]]:
    codes: dict[str, list[CodeType]] = {}
    for function, code in _functions(_code_of(name, loader)):
        codes.setdefault(function, []).append(code)
    return MappingProxyType(codes)
