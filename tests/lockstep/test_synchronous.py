"""Lockstep runs under synchronous scheduling, the same each time, in a file for a worker."""

from collections.abc import Callable

import pytest
from lockstep.test_lockstep import tally


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_fixed_runs_equal_upstream(
    number: int, record_property: Callable[[str, object], None]
) -> None:
    """Those set aside are counted and replaced."""
    outcomes = tally(number, 60, asynchronous=False, drafts=0)
    record_property("lockstep runs", dict(outcomes))
    assert outcomes["equal"] == 60
