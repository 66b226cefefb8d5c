"""No step reads for one request what another has, or has left: canaries, drawn and planted.

With a fix off, and on the pinned classes, the faults that it mends are found.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support import modules
from support.canaries import CanaryRun, Leak
from support.examples import draws

KINDS = [(True, 0), (True, 2), (False, 0), (False, 2)]


@given(random=st.randoms(use_true_random=False), steps=st.integers(1, 25))
@draws(15, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize(("asynchronous", "drafts"), KINDS)
def test_no_step_reads_another_requests_state(
    asynchronous: bool, drafts: int, random: Random, steps: int
) -> None:
    """Requests join, leave, are preempted, moved, and exchanged, at any time."""
    CanaryRun(random, asynchronous, drafts).run_drawn(steps)


def leaks(seeds: int, asynchronous: bool, drafts: int, **named: Any) -> Iterator[str]:
    """Yield what leaks in runs from the first seeds."""
    for seed in range(seeds):
        try:
            CanaryRun(Random(seed), asynchronous, drafts, **named).run_drawn(30)
        except Leak as leak:
            yield leak.what


@pytest.mark.parametrize(
    ("switch", "asynchronous", "drafts", "faults"),
    [
        ("-allowed-tokens", True, 0, {"allowed"}),
        ("-row-state", False, 0, {"blocks", "embeddings", "prompt"}),
        ("-prompt-embeds", True, 2, {"drafted inputs"}),
    ],
)
def test_stock_and_a_fix_that_is_off_have_the_faults(
    switch: str, asynchronous: bool, drafts: int, faults: set[str]
) -> None:
    for named in ({"switch": switch}, {"load": modules.pristine}):
        missing = set(faults)
        for fault in leaks(40, asynchronous, drafts, **named):
            assert "load" in named or fault in faults
            missing.discard(fault)
            if not missing:
                break
        assert not missing
