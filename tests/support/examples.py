"""How many examples Hypothesis draws."""

import os

#: `make test-slow` sets it.
_FACTOR = int(os.environ.get("READINESS_EXAMPLES", "1"))


def examples(count: int) -> int:
    """Return the number of examples: ``count``, times READINESS_EXAMPLES."""
    return count * _FACTOR
