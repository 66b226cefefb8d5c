"""The fix lora-slots in the scheduler: no step has more adapters than it may.

The oracle of replies is the worker, whose tokens name their places. Stock fails an assert.
"""

from collections.abc import Sequence
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import draws
from support.scheduling import Setup, of_side
from support.steps import Steps
from vllm.lora.request import LoRARequest
from vllm.v1.readiness.core import lora_limits

FIX = "lora-slots"


class Adapted(Steps):
    """An engine's loop of requests with adapters; counts the adapters of each step."""

    def __init__(
        self, side: str, setup: Setup, stages: int = 2, limit: int = 1, seed: int = 0
    ) -> None:
        drawn = Random(seed)
        scheduler = of_side(side, setup)
        scheduler.lora_config = SimpleNamespace(max_loras=limit)
        super().__init__(scheduler, stages, lambda most: drawn.randint(0, most) if seed else 0)
        self.limit = limit

    def adapt(self, number: int, prompt: int, max_tokens: int) -> None:
        """Add a request with an adapter; 0 for none."""
        name = self.add(prompt, max_tokens)
        if number:
            self.scheduler.requests[name].lora_request = LoRARequest(f"a{number}", number, "p")

    def _run(self, scheduled: Any) -> Any:
        requests = [self.scheduler.requests[name] for name in scheduled.num_scheduled_tokens]
        assert len(lora_limits._adapters(requests)) <= self.limit
        return super()._run(scheduled)


def pipeline_with_chunks(side: str) -> Adapted:
    """A prompt in chunks is admitted while the request of another adapter is in flight."""
    setup = Setup(False, caching=False, seqs=4, pipeline=True, budget=8)
    steps = Adapted(side, setup)
    steps.adapt(1, 4, 8)
    steps.step()
    steps.adapt(2, 24, 4)
    return steps


def drafts_near_the_end(
    side: str, stages: int, drafts: int, seed: int, requests: Sequence[tuple[int, int, int]]
) -> Adapted:
    """Drafts in flight may reach ``max_model_len``, and are rejected."""
    setup = Setup(caching=False, seqs=4, budget=16, drafts=drafts, length=24)
    steps = Adapted(side, setup, stages, seed=seed)
    for number, prompt, count in requests:
        steps.adapt(number, prompt, 24 - prompt)
        for _ in range(count):
            steps.step()
    return steps


two_steps = partial(
    drafts_near_the_end, stages=2, drafts=5, seed=4, requests=[(1, 5, 1), (2, 8, 2)]
)
three_steps = partial(
    drafts_near_the_end, stages=3, drafts=2, seed=2, requests=[(1, 2, 1), (2, 3, 11)]
)


@pytest.mark.parametrize("case", [pipeline_with_chunks, two_steps, three_steps])
def test_a_running_request_waits_for_room_for_its_adapter(side: str, case: Any) -> None:
    steps = case(side)
    if side == "ours":
        steps.finish()
        # Stock's pipelines of three stages give wrong tokens near max_model_len.
        assert set(steps.faults()) <= ({"1"} if case is three_steps else set())
    else:
        with pytest.raises(AssertionError) as error:
            steps.finish()
        assert error.traceback[-1].name == "schedule"


REQUESTS = st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 10), st.integers(0, 4))


@given(
    requests=st.lists(REQUESTS, min_size=2, max_size=8),
    limit=st.integers(1, 2),
    seed=st.integers(0, 99),
    blocks=st.integers(12, 40),
    policy=st.sampled_from(["fcfs", "priority"]),
)
@draws(40)
@pytest.mark.parametrize(
    ("asynchronous", "stages", "drafts"), [(False, 3, 0), (True, 2, 3), (True, 3, 0), (True, 3, 2)]
)
def test_every_request_is_served(
    asynchronous: bool,
    stages: int,
    drafts: int,
    requests: Sequence[Any],
    limit: int,
    seed: int,
    blocks: int,
    policy: str,
) -> None:
    if asynchronous and stages > 2:
        blocks = 100  # a step that lacks a block leaves out requests: errata, stale-histories
    setup = Setup(
        asynchronous,
        caching=False,
        policy=policy,
        blocks=blocks,
        budget=16,
        drafts=drafts,
        pipeline=not asynchronous,
    )
    steps = Adapted("ours", setup, stages, limit, seed)
    for number, prompt, max_tokens, count in requests:
        steps.adapt(number, prompt, max_tokens)
        for _ in range(count):
            steps.step()
    steps.finish()
    assert steps.faults() == []


def test_steps_within_the_limit_are_scheduled_as_by_upstream() -> None:
    scheduled = []
    for side in ("pinned", "ours"):
        steps = Adapted(side, Setup(False, caching=False, pipeline=True), stages=2, limit=2)
        for number in (1, 2, 0, 2):
            steps.adapt(number, 4, 6)
            steps.step()
        steps.finish()
        scheduled.append(steps.scheduled)
    assert scheduled[0] == scheduled[1]
