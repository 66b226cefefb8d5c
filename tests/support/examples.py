"""How many examples Hypothesis draws."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

#: `make test-slow` sets it.
_FACTOR = int(os.environ.get("READINESS_EXAMPLES", "1"))

Test = TypeVar("Test", bound=Callable[..., Any])


def examples(count: int) -> int:
    """Return the number of examples: ``count``, times READINESS_EXAMPLES."""
    return count * _FACTOR


def draws(count: int, **named: Any) -> Callable[[Test], Test]:
    """Decorate a test that `make test-slow` repeats with more examples.

    Args:
        count: of examples, before READINESS_EXAMPLES.
        named: further settings.
    """
    return lambda test: pytest.mark.drawn(settings(max_examples=examples(count), **named)(test))
