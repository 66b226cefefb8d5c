"""Other people's subclasses of what the seams are cut into: unknown means upstream.

A subclass may replace any function that a feature counts on, and need not call the constructor
that makes the feature's objects. It is served by upstream's own code.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, TypeVar

from vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")


class OffUnlessBuilt(Generic[T]):
    """A class attribute that takes the place of one that a constructor did not set.

    Where it is called, the constructor sets the instance's attribute of the same name, which
    then goes first.

    Args:
        off: makes the attribute with everything off, given the instance.
    """

    def __init__(self, off: Callable[[Any], T]) -> None:
        self._off = off

    def __set_name__(self, owner: type, name: str) -> None:
        """Take note of the class and the name of the attribute."""
        self._owner = owner
        self._name = name

    def __get__(self, instance: object, owner: type) -> "T | OffUnlessBuilt[T]":
        """Make the instance's attribute at its first access."""
        if instance is None:
            return self
        logger.warning_once(
            "Readiness overlay: %s does not call %s.__init__, and is left to vLLM's own code.",
            *(full_name(type(instance)), self._owner.__qualname__),
        )
        made = vars(instance)[self._name] = self._off(instance)
        return made


def has_seam(instance: object, called: ModuleType | Callable[..., object]) -> bool:
    """Whether an instance's own class, and no class derived from it, has a seam of ours.

    Args:
        instance: of any class.
        called: what the seam calls, which the file of upstream's class imports by its name.
    """
    home = sys.modules.get(type(instance).__module__)
    name = called.__name__.rpartition(".")[2]
    return getattr(home, name, None) is called


def full_name(kind: type) -> str:
    """A class, as a log names it."""
    return f"{kind.__module__}.{kind.__qualname__}"
