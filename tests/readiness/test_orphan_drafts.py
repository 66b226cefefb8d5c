"""The fix orphan-drafts: no step has drafts that the worker did not propose.

The worker notes a request that runs with drafts though the step before was not its own. The
pinned scheduler and ours with the fix off schedule such drafts.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from support.lockstep.scheduler import make_scheduler, speculative_config
from support.steps import Steps

Make = Callable[..., Any]
LENGTH = 20


def scheduler(kind: type, budget: int = 24) -> Any:
    """A scheduler with three drafts a step, of a model of 20 tokens."""
    drafter = speculative_config(3, trimmed=True)
    return make_scheduler(True, drafter, 60, 4, budget, LENGTH, kind)


def pinned(*arguments: int) -> Any:
    """Upstream's scheduler."""
    return scheduler(modules.pristine(modules.SCHEDULER).AsyncScheduler, *arguments)


def ours(*arguments: int) -> Any:
    """Our scheduler."""
    return scheduler(modules.overlaid(modules.SCHEDULER).AsyncScheduler, *arguments)


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Our scheduler with the fix off, as long as the test runs."""
    monkeypatch.setenv("VLLM_READINESS", "-orphan-drafts")
    return ours


def near_the_models_length(make: Make) -> Steps:
    """All drafts are accepted, until the last do not fit and are rejected."""
    steps = Steps(make(), accepts=lambda most: most if most == 3 else 0)
    steps.add(4, max_tokens=LENGTH - 4)
    return steps


def short_budget(make: Make) -> Steps:
    """Three requests, of which a step has room for one or two."""
    steps = Steps(make(6))
    for _ in range(3):
        steps.add(2, max_tokens=5)
    return steps


CASES = [near_the_models_length, short_budget]


def orphans(case: Callable[[Make], Steps], make: Make) -> list[str]:
    """Requests that run with drafts that the worker did not propose."""
    steps = case(make)
    steps.finish()
    assert steps.faults() == []
    return steps.orphans


@pytest.mark.parametrize("case", CASES)
def test_only_proposed_drafts_are_scheduled(case: Callable[[Make], Steps]) -> None:
    assert orphans(case, pinned)
    assert orphans(case, ours) == []


@pytest.mark.parametrize("case", CASES)
def test_the_fix_can_be_switched_off(case: Callable[[Make], Steps], off: Make) -> None:
    assert orphans(case, off) == orphans(case, pinned)


REQUESTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 11)), min_size=1, max_size=6)


@given(requests=REQUESTS, budget=st.integers(4, 24), accepts=st.randoms(use_true_random=False))
@draws(100)
def test_every_draft_was_proposed_in_the_step_before(
    requests: list[tuple[int, int]], budget: int, accepts: Any
) -> None:
    steps = Steps(ours(budget), accepts=lambda most: accepts.randint(0, most))
    for prompt, most in requests:
        steps.add(prompt, most)
        steps.step()
    steps.finish()
    assert steps.orphans == []
    assert steps.faults() == []
