"""Checks by which third-party subclasses of patched classes fall back to upstream.

A subclass may override functions that a feature depends on, or skip the constructor that creates
the overlay's objects. Functions may also be replaced (:mod:`~vllm.v1.readiness.engine.originals`).
"""

# mirrors: nothing

import sys
from collections.abc import Callable, Iterable, Sequence
from inspect import isfunction, unwrap
from types import ModuleType, NoneType
from typing import SupportsIndex, TypeVar

from vllm.logger import init_logger
from vllm.v1.readiness.engine import gauges

logger = init_logger(__name__)

T = TypeVar("T")
#: Attribute of an upstream object that holds the overlay's object.
ATTRIBUTE = "readiness"
#: Name under which a patched file imports its door.
DOOR = "readiness"
_RUNTIME = "vllm.v1.readiness."


class Uncopied:
    """Base class of attached objects that copy and pickle as None.

    They refer to slots, addresses and requests of one upstream object, and not of its copies.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[None], tuple[()]]:
        return NoneType, ()


def attached(owner: object, kind: type[T], off: Callable[[], T]) -> T:
    """Return the object of class ``kind`` that the overlay attached to an upstream object.

    If the owner's class skips the patched constructor, log once per class, and attach ``off()``,
    an object with every feature off. The owner may be a mock.
    """
    present = getattr(owner, ATTRIBUTE, None)
    if isinstance(present, kind):
        return present
    gauges.fall_back("all", gauges.OTHER_CLASS)
    logger.warning_once(
        "Readiness overlay: %s does not call the constructor of vLLM's class. It falls back to "
        "vLLM's own code.",
        full_name(type(owner)),
    )
    substitute = off()
    setattr(owner, ATTRIBUTE, substitute)
    return substitute


def remembered(owner: object, make: Callable[[], T]) -> T:
    """Return the object that is attached to an upstream object, made by ``make`` on first use.

    Threads that use it first at the same time get the same object.
    """
    known: T | None = vars(owner).get(ATTRIBUTE)
    return vars(owner).setdefault(ATTRIBUTE, make()) if known is None else known


def all_have_seam(samplers: Iterable[object], called: ModuleType, word: str) -> bool:
    """Return whether all samplers' classes call the module of feature ``word``; log once if not."""
    name = called.__name__.rpartition(".")[2]
    for sampler in samplers:
        if sampler is not None and not _has_seam(sampler, name):
            gauges.fall_back(word, gauges.OTHER_CLASS)
            logger.warning_once(
                "Readiness overlay: the sampler %s falls back to vLLM's own code, because its "
                "class does not call %s.",
                *(full_name(type(sampler)), called.__name__),
            )
            return False
    return True


def _has_seam(instance: object, called: str) -> bool:
    """Return whether an object's own class, not a base class, calls module ``called``."""
    names = {DOOR, called}
    functions = filter(isfunction, map(unwrap, vars(type(instance)).values()))
    return any(names.issubset(function.__code__.co_names) for function in functions)


def has_door(module: ModuleType | None) -> bool:
    """Return whether a module is patched, and so imports its door as :data:`DOOR`."""
    door = getattr(module, DOOR, None)
    return isinstance(door, ModuleType) and door.__name__.startswith(_RUNTIME)


def ends_in_seam(kind: type, method: str) -> bool:
    """Return whether no third-party override precedes a method's seam in the MRO.

    Overrides in vLLM's own classes may precede the seam, because they call super.
    """
    for base in kind.__mro__:
        if method in vars(base):
            if has_door(sys.modules.get(base.__module__)):
                return True
            if not base.__module__.startswith("vllm."):
                return False
    return False


def scheduler_has_seams(kind: type, methods: Iterable[str], word: str, work: str) -> bool:
    """Return whether a scheduler class reaches the seams of ``methods``; log once if not.

    ``word`` and ``work`` are those of :func:`leave_scheduler`.
    """
    if all(ends_in_seam(kind, method) for method in methods):
        return True
    leave_scheduler(kind, word, work)
    return False


def leave_scheduler(kind: type, word: str, work: str) -> None:
    """Count and log once that a scheduler class falls back to upstream for ``word``.

    ``work`` describes in the log what vLLM's own code does.
    """
    gauges.fall_back(word, gauges.OTHER_CLASS)
    logger.warning_once(
        "Readiness overlay: %s overrides methods of vLLM's scheduler. vLLM's own code handles %s.",
        *(full_name(kind), work),
    )


def leave_replaced(word: str, replaced: Sequence[str], each: str, work: str) -> None:
    """Count and log once that ``word`` falls back to upstream, because functions were replaced.

    Args:
        word: the feature.
        replaced: the replaced functions, as :func:`originals.replacements` describes them.
        each: that for which it does not call them.
        work: what vLLM's own code does.
    """
    gauges.fall_back(word, gauges.REPLACED)
    logger.warning_once(
        "Readiness overlay: functions that %s does not call for each %s were replaced: %s. vLLM's "
        "own code %s.",
        *(word, each, ", ".join(replaced), work),
    )


def full_name(kind: type) -> str:
    """Return a class's module and qualified name."""
    return f"{kind.__module__}.{kind.__qualname__}"
