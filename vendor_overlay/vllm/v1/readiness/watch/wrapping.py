"""One way to wrap other people's functions, for the probe and the sync guard."""

# mirrors: nothing

from collections.abc import Callable
from functools import wraps
from typing import Any

Function = Callable[..., Any]

#: A wrapper's attribute: the names of those who have wrapped the function.
_WRAPPED_BY = "_readiness_wrapped_by"


def wrap_once(owner: object, name: str, wrapper: Callable[[Function], Function], by: str) -> None:
    """Replace ``owner.name`` by a wrapper that has its name, module and docstring.

    Args:
        owner: a class, module or instance whose attributes can be set.
        name: a function's or method's name.
        wrapper: takes the original and returns what replaces it.
        by: the caller's name; a function that the same caller has wrapped is left as it is.
    """
    original = getattr(owner, name)
    before: frozenset[str] = getattr(original, _WRAPPED_BY, frozenset())
    if by in before:
        return
    replacement = wraps(original)(wrapper(original))
    setattr(replacement, _WRAPPED_BY, before | {by})
    setattr(owner, name, replacement)
