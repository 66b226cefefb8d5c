"""How many examples Hypothesis draws."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

#: `make test-slow` sets it.
_FACTOR = float(os.environ.get("READINESS_EXAMPLES", "0.5"))

Test = TypeVar("Test", bound=Callable[..., Any])


def examples(count: int) -> int:
    """Return the number of examples: ``count``, times READINESS_EXAMPLES, or half of them."""
    return max(1, round(count * _FACTOR))


def draws(count: int, **named: Any) -> Callable[[Test], Test]:
    """Decorate a test that `make test-slow` repeats with more examples.

    Args:
        count: see :func:`examples`.
        named: further settings.
    """
    return lambda test: pytest.mark.drawn(settings(max_examples=examples(count), **named)(test))
