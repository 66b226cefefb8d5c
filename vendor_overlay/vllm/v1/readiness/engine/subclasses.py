"""Other people's subclasses of the classes that the seams are in: unknown means upstream.

A subclass may override any function that a feature depends on, and need not call the
constructor that creates the overlay's objects. vLLM's own code serves it.
"""

# mirrors: nothing

import sys
from collections.abc import Callable, Iterable
from inspect import isfunction, unwrap
from types import ModuleType, NoneType
from typing import SupportsIndex, TypeVar

from vllm.logger import init_logger
from vllm.v1.readiness.engine import gauges

logger = init_logger(__name__)

T = TypeVar("T")
#: The attribute of upstream's objects that holds the overlay's.
ATTRIBUTE = "readiness"
#: The name by which a file with seams imports its door.
DOOR = "readiness"
_RUNTIME = "vllm.v1.readiness."


class Uncopied:
    """The overlay's part of one of upstream's objects: copies of that object hold None instead.

    It belongs to one object: it names slots, addresses and requests of that object alone.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[None], tuple[()]]:
        """Stand in for this object in pickles and deep copies."""
        return NoneType, ()


def attached(owner: object, kind: type[T], off: Callable[[], T]) -> T:
    """Return what the overlay has attached to one of upstream's objects.

    Args:
        owner: of any class. A mock has every attribute, of no class that is asked for.
        kind: class of what is attached.
        off: makes the object with every feature off. It is attached, and logged once, where
            the owner's class does not call the constructor that holds our seam.
    """
    found = getattr(owner, ATTRIBUTE, None)
    if isinstance(found, kind):
        return found
    gauges.fall_back("all", gauges.OTHER_CLASS)
    logger.warning_once(
        "Readiness overlay: %s does not call the constructor of vLLM's class, and is left to "
        "vLLM's own code.",
        full_name(type(owner)),
    )
    substitute = off()
    setattr(owner, ATTRIBUTE, substitute)
    return substitute


def remembered(owner: object, name: str, make: Callable[[], T]) -> T:
    """Return what one of upstream's objects keeps for us, made when it is first asked for.

    For objects whose constructor has no seam.

    Args:
        owner: of any class with a ``__dict__``.
        name: of the attribute.
        make: makes the value, which is not None.
    """
    known: T | None = vars(owner).get(name)
    if known is None:
        known = vars(owner)[name] = make()
    return known


def all_have_seam(samplers: Iterable[object], called: ModuleType) -> bool:
    """Whether the class of every sampler calls one of our modules; logged once if one does not.

    Args:
        samplers: objects of any classes; None is passed over.
        called: the module.
    """
    for sampler in samplers:
        if sampler is not None and not _has_seam(sampler, called):
            gauges.fall_back(called.__name__.rpartition(".")[2], gauges.OTHER_CLASS)
            logger.warning_once(
                "Readiness overlay: the sampler %s is left to vLLM's own code, because its class "
                "does not call %s.",
                *(full_name(type(sampler)), called.__name__),
            )
            return False
    return True


def _has_seam(instance: object, called: ModuleType) -> bool:
    """Whether an object's own class, not a base class of it, has a seam that calls a module."""
    names = {DOOR, called.__name__.rpartition(".")[2]}
    functions = filter(isfunction, map(unwrap, vars(type(instance)).values()))
    return any(names.issubset(function.__code__.co_names) for function in functions)


def has_door(module: ModuleType | None) -> bool:
    """Whether a module has seams: each file with seams imports its door by one name."""
    door = getattr(module, DOOR, None)
    return isinstance(door, ModuleType) and door.__name__.startswith(_RUNTIME)


def ends_in_seam(kind: type, method: str) -> bool:
    """Whether a class's method is the one that holds a seam, or vLLM's classes lead to it.

    Args:
        kind: a class that may be derived from vLLM's.
        method: its name.
    """
    for each in kind.__mro__:
        if method in vars(each):
            if has_door(sys.modules.get(each.__module__)):
                return True
            if not each.__module__.startswith("vllm."):
                return False  # somebody's own may not call vLLM's
    return False


def full_name(kind: type) -> str:
    """Return the name of a class as a log shows it."""
    return f"{kind.__module__}.{kind.__qualname__}"


def all_vllms(owner: object, methods: Iterable[str]) -> bool:
    """Whether these methods of an object are vLLM's own: nobody's class or object has others.

    Args:
        owner: of a class that may be derived from vLLM's.
        methods: their names.
    """
    return all(_is_vllms(owner, name) for name in methods)


def _is_vllms(owner: object, name: str) -> bool:
    function = getattr(type(owner), name, None)
    return (
        name not in vars(owner)
        and str(getattr(function, "__module__", "")).startswith("vllm.")
        and not hasattr(function, "__wrapped__")
    )
