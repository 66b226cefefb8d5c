"""The overlay's objects hold all state that it keeps of vLLM's, under one attribute each."""

from collections.abc import Iterator
from typing import Any

import pytest
from readiness.test_continuing import Side, Step, Wish
from support.scheduling import Setup, of_side
from support.steps import Steps
from vllm.v1.readiness.core.records import RequestRecord
from vllm.v1.readiness.core.step import SchedulerStep
from vllm.v1.readiness.frontend.continuing import Continuation
from vllm.v1.readiness.frontend.step import OutputStep
from vllm.v1.readiness.frontend.turns import Turns


def attached(ours: Any, pinned: Any) -> dict[str, type]:
    """Attributes that only our side's object has, with their types."""
    return {name: type(vars(ours)[name]) for name in vars(ours).keys() - vars(pinned).keys()}


def scheduled(side: str, setup: Setup) -> Steps:
    """Requests that are preempted for want of blocks, and by a reset."""
    steps = Steps(of_side(side, setup), setup.in_flight)
    for _ in range(3):
        steps.add(5, 12)
    for number in range(7):
        steps.step()
        if number == 3:
            steps.scheduler.reset_prefix_cache(reset_running_requests=True)
    return steps


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("pipeline", [True, False])
def test_a_scheduler_and_its_requests_have_one_attribute_of_ours(
    asynchronous: bool, pipeline: bool
) -> None:
    setup = Setup(asynchronous, caching=False, blocks=9, pipeline=pipeline)
    ours, pinned = (scheduled(side, setup).scheduler for side in ("ours", "pinned"))
    assert attached(ours, pinned) == {"readiness": SchedulerStep}
    pairs = [*zip(ours.requests.values(), pinned.requests.values(), strict=True)]
    assert pairs
    for one, other in pairs:
        assert attached(one, other) == {"readiness": RequestRecord}


def pairs_of_outputs() -> Iterator[tuple[Any, Any]]:
    """The output processors of two sides, their requests' states and their collectors."""
    sides = [Side(side, [Wish(session=True), Wish(logprobs=2)]) for side in ("ours", "pinned")]
    for side in sides:
        for number in range(3):
            side.step(number, Step([1], {0} if number else set(), {}, set(), set(), 1))
    ours, pinned = sides
    yield ours.processor, pinned.processor
    states = [side.processor.request_states for side in sides]
    yield from zip(states[0].values(), states[1].values(), strict=True)
    yield from zip(ours.queues, pinned.queues, strict=True)


def test_an_output_processor_its_states_and_collectors_have_one_attribute_of_ours() -> None:
    found = [attached(*pair) for pair in pairs_of_outputs()]
    kinds = OutputStep, type(None), Continuation, Turns, None
    assert found == [{} if kind is None else {"readiness": kind} for kind in kinds]
