"""The fix preemption: a preempted request is given each token in flight once and in order.

The oracle is the worker, whose tokens name their places; the scheduler is the pinned class,
ours with the fix off, and ours.
"""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from support.scheduling import Setup, make_scheduler, speculative_config
from support.scheduling import make as make_of
from support.scheduling import of_side as make_of_side
from support.steps import PROMPT_LOGPROBS, WRONG, Steps, token
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.readiness.core import step
from vllm.v1.request import Request

FIX = "preemption"
#: Makes a scheduler, given its drafts a step and its blocks.
Make = Callable[..., Any]


def scheduler(kind: type, drafts: int = 0, blocks: int = 60) -> Any:
    """A scheduler of a class."""
    drafter = speculative_config(drafts, trimmed=True)
    return make_scheduler(True, drafter, blocks, 4, 24, 64, kind)


def of_side(side: str) -> Make:
    """Return what makes a side's schedulers."""
    return partial(scheduler, modules.of_side(side)(modules.SCHEDULER).AsyncScheduler)


ours, pinned = of_side("ours"), of_side("pinned")


def reset(make: Make, accepted: int, counts: Sequence[int]) -> Any:
    """Reset after each of these numbers of steps, with two drafts a step."""
    steps = Steps(make(2), accepts=lambda most: min(accepted, most))
    steps.add(4, max_tokens=12)
    for count in counts:
        for _ in range(count):
            steps.step()
        steps.scheduler.reset_prefix_cache(reset_running_requests=True)
    steps.finish()
    return steps.delivered["1"]


def accepted_drafts_in_flight(make: Make) -> Any:
    return reset(make, 2, [3])


def prompt_logprobs_in_flight(make: Make) -> Any:
    """A reset while a prompt's logprobs are in flight."""
    steps = Steps(make())
    steps.add(4, max_tokens=3, prompt_logprobs=0)
    steps.step()
    steps.scheduler.reset_prefix_cache(reset_running_requests=True)
    steps.finish()
    return steps.delivered["1"], steps.prompts


def pipeline(make: Make) -> Any:
    """Requests that outgrow the KV cache in a pipeline of three stages."""
    steps = Steps(make(0, 6), in_flight=3)
    for max_tokens in (6, 8, 8):
        steps.add(4, max_tokens)
    steps.finish()
    return steps.delivered["3"]


def outcome(case: Callable[[Make], Any], make: Make) -> Any:
    """What a case returns, or the kind of error that it ends with."""
    try:
        return case(make)
    except (AssertionError, TimeoutError) as error:
        return type(error)


TOKENS = [token("1", place) for place in range(12)]


@pytest.mark.parametrize(
    ("case", "stock", "fixed"),
    [
        (accepted_drafts_in_flight, [*TOKENS[:4], *(token("1", n) for n in range(8, 16))], TOKENS),
        (partial(reset, accepted=0, counts=(1, 2, 1)), AssertionError, TOKENS),
        (prompt_logprobs_in_flight, AssertionError, (TOKENS[:3], {"1": PROMPT_LOGPROBS})),
        (
            pipeline,
            [*(token("3", n) for n in range(5)), *[WRONG] * 3],
            [token("3", n) for n in range(8)],
        ),
    ],
)
def test_the_fix_delivers_tokens_in_flight_once_and_in_order(
    side: str, case: Callable[[Make], Any], stock: Any, fixed: Any
) -> None:
    assert outcome(case, of_side(side)) == (fixed if side == "ours" else stock)


ACTIONS = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, 8),
        st.integers(1, 12),
        st.sampled_from([None, None, 0]),
    ),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["reset", "pause"])),
    st.tuples(st.just("abort"), st.integers(1, 4)),
)


def play(
    make: Make, script: Sequence[Any], seed: int, in_flight: int, drafts: int, blocks: int
) -> Steps:
    """Act by a script, and run until all requests are over."""
    drawn = Random(seed)
    steps = Steps(make(drafts, blocks), in_flight, lambda most: drawn.randint(0, most))
    scheduler = steps.scheduler
    for action, *values in script:
        if action == "add":
            prompt, most, logprobs = values
            steps.add(prompt, most, prompt_logprobs=logprobs)
        elif action == "step":
            for _ in range(values[0]):
                steps.step()
        elif action == "reset":
            scheduler.reset_prefix_cache(reset_running_requests=True)
        elif action == "abort":
            steps.abort(str(values[0]))
        else:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            steps.step()
            scheduler.set_pause_state(PauseState.UNPAUSED)
    steps.finish()
    return steps


SCRIPTS = st.lists(ACTIONS, min_size=2, max_size=16)


@given(script=SCRIPTS, seed=st.integers(0, 999), blocks=st.integers(6, 14))
@draws(100)
@pytest.mark.parametrize(("in_flight", "drafts"), [(2, 0), (2, 2), (3, 0), (4, 0)])
def test_every_token_is_delivered_once_and_in_order(
    in_flight: int, drafts: int, script: Sequence[Any], seed: int, blocks: int
) -> None:
    if in_flight > 2:  # stock also miscounts a request that is left out of a step
        script = [action for action in script if action[0] != "pause"]
    steps = play(ours, script, seed, in_flight, drafts, blocks)
    assert steps.faults() == []
    record = step.of(steps.scheduler).in_flight
    assert not (record.steps or record.dropped)


@given(script=SCRIPTS, seed=st.integers(0, 999), blocks=st.integers(6, 14))
@draws(50)
@pytest.mark.parametrize("drafts", [0, 2])
def test_want_of_blocks_with_two_steps_in_flight_changes_nothing(
    drafts: int, script: Sequence[Any], seed: int, blocks: int
) -> None:
    script = [action for action in script if action[0] != "reset"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_READINESS", "preemption")  # other fixes change what is scheduled
        theirs, own = (play(make, script, seed, 2, drafts, blocks) for make in (pinned, ours))
    assert theirs.scheduled == own.scheduled
    assert theirs.faults() == own.faults() == []


@pytest.mark.parametrize("leaves_out", ["our methods", "our constructor"])
def test_a_derived_scheduler_that_leaves_out_ours_is_left_to_upstream(leaves_out: str) -> None:
    kind = modules.overlaid(modules.SCHEDULER).AsyncScheduler
    if leaves_out == "our methods":
        kind = type("Own", (kind,), {"schedule": kind.__mro__[2].schedule})
    derived = scheduler(kind, 2)
    if leaves_out == "our constructor":
        del derived.readiness
    assert outcome(accepted_drafts_in_flight, lambda _: derived) == outcome(
        accepted_drafts_in_flight, pinned
    )


def pipelined(side: str, blocks: int = 60) -> Any:
    """A synchronous scheduler of a pipeline."""
    setup = Setup(False, caching=False, blocks=blocks, seqs=4, pipeline=True, threshold=8)
    return make_of_side(side, setup)


def reset_in_flight(side: str, stages: int) -> Steps:
    """A reset with a prompt's only step in flight, one with a decode, and one with neither."""
    steps = Steps(pipelined(side), stages)
    steps.add(4, 12)
    for count in (1, 2, stages):
        for _ in range(count):
            steps.step()
        steps.scheduler.reset_prefix_cache(reset_running_requests=True)
    steps.finish()
    return steps


def want_of_blocks_in_flight(side: str, stages: int) -> Steps:
    """Requests that outgrow the KV cache."""
    steps = Steps(pipelined(side, 9), stages)
    for prompt, max_tokens, count in ((3, 8, 3), (5, 5, 1), (5, 8, 3)):
        steps.add(prompt, max_tokens)
        for _ in range(count):
            steps.step()
    steps.finish()
    return steps


@pytest.mark.parametrize(
    ("case", "stages"), [(reset_in_flight, 2), (reset_in_flight, 3), (want_of_blocks_in_flight, 3)]
)
def test_a_synchronous_pipeline_delivers_no_token_twice(
    side: str, case: Callable[[str, int], Steps], stages: int
) -> None:
    assert (case(side, stages).faults() == []) == (side == "ours")


@given(script=SCRIPTS, seed=st.integers(0, 999), blocks=st.integers(6, 14))
@draws(60)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_synchronous_pipeline_delivers_every_token_in_order(
    stages: int, script: Sequence[Any], seed: int, blocks: int
) -> None:
    steps = play(lambda _, blocks: pipelined("ours", blocks), script, seed, stages, 0, blocks)
    assert steps.faults() == []
    record = step.of(steps.scheduler).in_flight
    assert not (record.steps or record.dropped)


@given(script=SCRIPTS, seed=st.integers(0, 999))
@draws(30)
def test_a_pipeline_without_preemption_is_scheduled_as_by_upstream(
    script: Sequence[Any], seed: int
) -> None:
    script = [action for action in script if action[0] != "reset"]
    theirs, own = (
        play(lambda _, blocks, side=side: pipelined(side, blocks), script, seed, 3, 0, 200)
        for side in ("pinned", "ours")
    )
    assert theirs.scheduled == own.scheduled


def test_a_derived_pipeline_that_reads_outputs_itself_is_left_to_upstream() -> None:
    kind = type(pipelined("ours"))
    own = type("Own", (kind,), {"update_from_output": lambda self, *each: {}})
    derived = make_of(Setup(False, caching=False, pipeline=True), own)
    derived.add_request(Request("1", [1], SamplingParams(max_tokens=2), None))
    derived.schedule()
    derived.reset_prefix_cache(reset_running_requests=True)
    assert derived.schedule().num_scheduled_tokens == {"1": 1}
