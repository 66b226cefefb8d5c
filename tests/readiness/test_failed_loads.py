"""The fix failed-loads: a request whose KV load fails gets the reply that it has without a load.

The scheduler is a real one, over a worker whose tokens are right only where all KV before them is.
The pinned scheduler has the faults, which are asserted as well: with the fix off ours has them.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import draws
from support.loads import Loads, prompt
from support.scheduling import Setup, classes, of_side
from support.scheduling import make as make_scheduler
from support.steps import WRONG
from vllm.v1.request import RequestStatus

FIX = "failed-loads"


def make(
    asynchronous: bool = True,
    *,
    side: str = "ours",
    in_flight: int = 2,
    seed: int = 0,
    failing: int = 40,
    kind: Any = None,
    **options: Any,
) -> Loads:
    """Make a side's loop, or one with a scheduler of a class."""
    setup = Setup(asynchronous=asynchronous, **{"blocks": 90, "length": 96, **options})
    scheduler = make_scheduler(setup, kind) if kind else of_side(side, setup)
    return Loads(scheduler, in_flight if asynchronous or in_flight > 2 else 1, seed, failing)


def outcome(loads: Loads) -> Any:
    """Run to the end, and return the faults, or the kind of error."""
    try:
        loads.finish()
    except (AssertionError, TimeoutError, ValueError) as error:
        return type(error)
    return loads.faults()


@pytest.mark.parametrize("options", [{}, {"asynchronous": False, "in_flight": 3, "budget": 12}])
def test_tokens_in_flight_are_dropped(side: str, options: dict[str, Any]) -> None:
    """Also in a synchronous pipeline, where both chunks of a prompt are in flight."""
    loads = make(side=side, failing=100, **options)
    loads.load(prompt(6, -99), 12, 0)
    loads.load(prompt(30), 3, 3)
    assert (outcome(loads) == []) == (side == "ours")
    assert loads.failed


@pytest.mark.parametrize("aborted", [True, False])
def test_no_bad_block_is_shared_or_found_in_the_prefix_cache(side: str, aborted: bool) -> None:
    """Another request has the same prompt, and joins while the failure's step is in flight."""
    loads = make(not aborted, side=side, failing=100)
    first = loads.load(prompt(22), 6, 4)
    loads.step()
    if aborted:
        loads.abort(first)
    other = loads.load(prompt(22), 6, 0)
    outcome(loads)
    assert (loads.delivered[other] == loads.right(other)) == (side == "ours")


def waiting_with_blocks(loads: Loads) -> bool:
    """Whether a request that does not run has blocks, as one whose load is asynchronous."""
    scheduler = loads.scheduler
    return any(
        scheduler.kv_cache_manager.get_block_ids(name)[0]
        for name, request in scheduler.requests.items()
        if request not in scheduler.running
    )


ADDS = st.tuples(
    st.just("add"),
    st.integers(9, 40),
    st.sampled_from([-1, -1, -1, -99]),
    st.integers(1, 10),
    st.integers(0, 9),
    st.sampled_from([False, False, False, True]),
)
ACTIONS = st.one_of(
    ADDS,
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("abort"), st.integers(1, 5)),
    st.tuples(st.just("reset")),
)


@given(
    script=st.tuples(ADDS, ADDS, ACTIONS, ACTIONS, ADDS, ACTIONS, ACTIONS, ADDS, ACTIONS),
    seed=st.integers(0, 999),
    blocks=st.integers(18, 50),
    step=st.sampled_from([7, 24, 60]),
    caching=st.booleans(),
)
@draws(60)
@pytest.mark.parametrize(
    ("asynchronous", "in_flight", "drafts", "switch"),
    [
        (True, 2, 0, "on"),
        (True, 2, 2, "on"),
        (True, 3, 0, "on"),
        (True, 2, 0, "failed-loads"),
        (False, 1, 0, "on"),
        (False, 1, 2, "on"),
        (False, 3, 0, "on"),
    ],
)
def test_every_token_is_right_and_delivered_once(
    asynchronous: bool,
    in_flight: int,
    drafts: int,
    switch: str,
    script: Sequence[Any],
    seed: int,
    blocks: int,
    step: int,
    caching: bool,
) -> None:
    if not asynchronous and in_flight > 1:
        # At a reset stock also loses tokens in flight there, and the worker has no room for want
        # of blocks: it does not keep what it sampled.
        script = [action for action in script if action[0] != "reset"]
        blocks = 90
    if any(action[0] == "add" and action[-1] for action in script):
        blocks = 90  # those that wait keep what they loaded: in stock too, all may wait for ever
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_READINESS", switch)
        options: Any = {"drafts": drafts, "blocks": blocks, "budget": step, "caching": caching}
        loads = make(asynchronous, in_flight=in_flight, seed=seed, **options)
        play(loads, script)
    assert loads.faults() == []
    assert WRONG not in {one for tokens in loads.delivered.values() for one in tokens}


def play(loads: Loads, script: Sequence[Any]) -> None:
    """Act by a script, and run until all requests are over."""
    for action, *values in script:
        if action == "add":
            count, first, most, claimed, later = values
            loads.load(prompt(count, first), most, claimed, later)
        elif action == "step":
            for _ in range(values[0]):
                loads.step()
        elif action == "abort":
            loads.abort(str(values[0]))
        elif not waiting_with_blocks(loads):  # which upstream does not support
            loads.scheduler.reset_prefix_cache(reset_running_requests=True)
    loads.finish()


def test_a_derived_scheduler_with_methods_of_its_own_is_left_to_upstream() -> None:
    ours: Any = classes()[False]

    class Own(ours):  # type: ignore[misc]
        def _handle_invalid_blocks(self, *arguments: Any) -> Any:
            return super()._handle_invalid_blocks(*arguments)

    loads = make(False, failing=100, kind=Own)
    first = loads.load(prompt(22), 6, 4)
    loads.step()
    assert loads.scheduler.requests[first].num_computed_tokens == 0
    assert loads.scheduler.requests[first].status == RequestStatus.RUNNING
    assert not loads.scheduler.schedule().preempted_req_ids
