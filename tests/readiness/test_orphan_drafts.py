"""The fix orphan-drafts: no step has drafts that the worker did not propose.

The worker notes a request that runs with drafts though the step before was not its own. The
pinned scheduler and ours with the fix off schedule such drafts.
"""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from support.scheduling import make_scheduler, speculative_config
from support.steps import Steps

FIX = "orphan-drafts"
LENGTH = 20


def scheduler(side: str, budget: int = 24) -> Any:
    """A side's scheduler with three drafts a step, of a model of 20 tokens."""
    drafter = speculative_config(3, trimmed=True)
    kind = modules.of_side(side)(modules.SCHEDULER).AsyncScheduler
    return make_scheduler(True, drafter, 60, 4, budget, LENGTH, kind)


def test_only_proposed_drafts_are_scheduled(side: str) -> None:
    """A step has room for one or two of three requests."""
    steps = Steps(scheduler(side, 6))
    for _ in range(3):
        steps.add(2, max_tokens=5)
    steps.finish()
    assert steps.faults() == []
    assert (steps.orphans == []) == (side == "ours")


REQUESTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 11)), min_size=1, max_size=6)


@given(requests=REQUESTS, budget=st.integers(4, 24), accepts=st.randoms(use_true_random=False))
@draws(100)
def test_every_draft_was_proposed_in_the_step_before(
    requests: list[tuple[int, int]], budget: int, accepts: Any
) -> None:
    steps = Steps(scheduler("ours", budget), accepts=lambda most: accepts.randint(0, most))
    for prompt, most in requests:
        steps.add(prompt, most)
        steps.step()
    steps.finish()
    assert steps.orphans == []
    assert steps.faults() == []
