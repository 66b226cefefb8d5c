"""The fix stalled-requests: each request is served or refused, and stalls no other.

The scheduler is a real one, over a worker that pools or samples as a model runner does. The pinned
scheduler has the faults, which are asserted as well: with the fix off ours has them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import draws
from support.scheduling import BLOCK, GROUPS, Grammar, Setup, of_side
from support.steps import Steps
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.readiness.engine import switch
from vllm.v1.request import Request, RequestStatus

FIX = "stalled-requests"
LENGTH = 32
MODES = pytest.mark.parametrize("asynchronous", [False, True])


class Engine(Steps):
    """An engine's loop."""

    def __init__(self, side: str, in_flight: int | None = None, **options: Any) -> None:
        defaults = {"seqs": 3, "blocks": 90, "budget": 10, "length": LENGTH, "caching": False}
        setup = Setup(**{**defaults, **options})
        scheduler = of_side(side, setup)
        super().__init__(scheduler, in_flight or 1 + setup.asynchronous)

    @property
    def tokens(self) -> dict[str, int]:
        """Number of sampled tokens of each request."""
        return {name: len(tokens) for name, tokens in self.delivered.items()}

    def pool(self, name: str, prompt: int) -> None:
        """Add a pooling request."""
        params = PoolingParams(task="embed")
        self.enter(Request(name, [*range(3, 3 + prompt)], None, params, arrival_time=0.0))

    def generate(self, name: str, prompt: int, most: int = 3, **options: Any) -> None:
        """Add a request, or a session's turn."""
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        self.enter(Request(name, [*range(3, 3 + prompt)], params, None, **options))

    def enter(self, request: Request) -> None:
        """Add a request."""
        self.finished[request.request_id] += []
        self.delivered[request.request_id] += []
        self.scheduler.add_request(request)

    def run(self, steps: int = 60) -> "Engine":
        """Make steps."""
        for _ in range(steps):
            self.step()
        return self

    def _run(self, step: Any) -> ModelRunnerOutput:
        names = [*step.num_scheduled_tokens]
        ended = []
        for name in names:
            request = self.scheduler.requests[name]
            assert request.num_computed_tokens <= LENGTH
            ended.append(not request.is_prefill_chunk)
        pooled = any(self.scheduler.requests[name].pooling_params for name in names)
        rows = {name: row for row, name in enumerate(names)}
        if pooled:
            vectors = [torch.ones(1) if end else None for end in ended]
            return ModelRunnerOutput(names, rows, [], pooler_output=vectors)
        return ModelRunnerOutput(names, rows, [[7] if end else [] for end in ended])


STOP = [FinishReason.STOP]
#: Chunks are shorter than a block of an aligned hybrid model.
STUCK: dict[str, Any] = {"groups": "hybrid, aligned", "threshold": BLOCK - 1, "budget": 64}


@MODES
@pytest.mark.parametrize("options", [{}, {"budget": 31}, {"threshold": 5, "budget": 64}])
def test_a_pooled_prompt_of_the_models_length_ends(
    side: str, asynchronous: bool, options: dict[str, Any]
) -> None:
    engine = Engine(side, asynchronous=asynchronous, **options)
    for number in range(3):  # as many as run at a time
        engine.pool(f"long {number}", LENGTH)
    engine.pool("short", 6)
    engine.run()
    served = {name for name, reasons in engine.finished.items() if reasons == STOP}
    if side == "ours":
        assert served == {*engine.finished}
        assert not engine.scheduler.has_requests()
    else:
        assert served == set()
        assert engine.scheduler.has_unfinished_requests()


@given(
    asynchronous=st.booleans(),
    groups=st.sampled_from([name for name in GROUPS if name != "hybrid"]),
    budget=st.integers(2 * BLOCK, LENGTH),
    prompts=st.lists(st.integers(LENGTH - 3, LENGTH), min_size=1, max_size=6),
    in_flight=st.sampled_from([None, 3]),
)
@draws(40)
def test_every_pooled_prompt_ends(
    asynchronous: bool,
    groups: str,
    budget: int,
    prompts: list[int],
    in_flight: int | None,
) -> None:
    engine = Engine(
        "ours",
        in_flight,
        asynchronous=asynchronous,
        groups=groups,
        budget=budget,
    )
    for number, prompt in enumerate(prompts):
        engine.pool(str(number), prompt)
    engine.run(120)
    assert [*engine.finished.values()] == [STOP] * len(prompts)
    assert not engine.scheduler.requests


@MODES
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("turn", [LENGTH - 12, LENGTH - 11, LENGTH])
def test_a_turn_beyond_the_models_length_is_refused(
    side: str, asynchronous: bool, at_once: bool, turn: int
) -> None:
    """The session keeps 10 + 3 - 1 tokens."""
    engine = Engine(side, asynchronous=asynchronous, budget=64)
    engine.generate("session", 10, resumable=True)
    if not at_once:
        engine.run(20)
    engine.generate("session", turn, resumable=True)
    engine.generate("session", 2, resumable=True)
    engine.generate("session", 1, 1)  # it is over
    engine.generate("other", 6)
    ours = side == "ours"
    with nullcontext() if ours else pytest.raises((AssertionError, ValueError)):
        engine.run()
        length = FinishReason.LENGTH
        assert engine.finished == {"session": [length] * 3, "other": [length]}
        assert engine.tokens == {"session": 6, "other": 3}
        assert not engine.scheduler.requests
        assert engine.scheduler.num_waiting_for_streaming_input == 0


@MODES
def test_the_last_turn_that_fits_is_served(side: str, asynchronous: bool) -> None:
    engine = Engine(side, asynchronous=asynchronous, budget=64)
    engine.generate("session", 10, resumable=True)
    engine.run(20)
    engine.generate("session", LENGTH - 13, most=9, resumable=True)
    engine.run(20)
    assert engine.finished["session"] == [FinishReason.LENGTH] * 2
    assert engine.tokens["session"] == 4


@MODES
def test_a_prompt_that_bypassed_the_front_end_is_refused(side: str, asynchronous: bool) -> None:
    engine = Engine(side, asynchronous=asynchronous, clients=True)
    engine.generate("long", LENGTH)
    engine.generate("other", 6)
    engine.run()
    assert (engine.finished["long"] == [FinishReason.ERROR]) == (side == "ours")
    assert engine.scheduler.has_requests() != (side == "ours")
    assert engine.released == {"other", *["long"] * (side == "ours")}


@MODES
@pytest.mark.parametrize("compiled", [False, True])
def test_a_request_that_blocks_all_others_is_ended(
    side: str, asynchronous: bool, compiled: bool
) -> None:
    """One whose grammar was compiled is in the queue of skipped requests."""
    engine = Engine(side, asynchronous=asynchronous, **STUCK)
    engine.generate("first", BLOCK - 1)
    outputs = StructuredOutputsParams(regex="a") if compiled else None
    params = SamplingParams(max_tokens=3, structured_outputs=outputs)
    request = Request("long", [*range(3, 23)], params, None)
    if compiled:
        request.structured_output_request._grammar = Grammar()
    engine.enter(request)
    engine.generate("other", BLOCK - 1)
    engine.run()
    ours = side == "ours"
    assert engine.finished["first"] == [FinishReason.LENGTH] * (ours or not compiled)
    assert engine.finished["long"] == [FinishReason.ERROR] * ours
    assert engine.finished["other"] == [FinishReason.LENGTH] * ours
    assert engine.scheduler.has_requests() != ours


@MODES
@pytest.mark.parametrize(("prompt", "most"), [(22, 3), (18, 9)])
def test_a_request_larger_than_the_cache_is_ended(
    side: str, asynchronous: bool, prompt: int, most: int
) -> None:
    """The cache holds 20 tokens, which the second request exceeds as it grows."""
    engine = Engine(side, asynchronous=asynchronous, blocks=6, budget=64)
    engine.generate("long", prompt, most)
    engine.generate("other", 6)
    engine.run()
    ours = side == "ours"
    assert engine.finished["long"] == [FinishReason.ERROR] * ours
    assert engine.finished["other"] == [FinishReason.LENGTH] * ours
    assert engine.scheduler.has_requests() != ours


def hold(engine: Engine, means: str) -> Callable[[], None]:
    """Keep a scheduler from admitting requests, as a plugin may do; return what ends it."""
    scheduler, manager = engine.scheduler, engine.scheduler.kv_cache_manager
    owner: Any = scheduler
    value: Any = 0
    if means == "_is_blocked_waiting_status":
        scheduler._try_promote_blocked_waiting_request = lambda _: False
        value = lambda _: True  # noqa: E731
    if means == "allocate_slots":
        owner, value = manager, lambda *_, **__: None
    elif means == "free blocks":
        taken = manager.block_pool.get_new_blocks(manager.block_pool.get_num_free_blocks())
        return lambda: manager.block_pool.free_blocks(taken)
    elif means == "long_prefill_token_threshold":
        owner, value = scheduler.scheduler_config, 1
    before = getattr(owner, means)
    setattr(owner, means, value)
    return lambda: setattr(owner, means, before)


@MODES
@pytest.mark.parametrize("groups", ["full", "hybrid, aligned"])
@pytest.mark.parametrize(
    "means",
    [
        *("max_num_running_reqs", "max_num_scheduled_tokens", "long_prefill_token_threshold"),
        *("_is_blocked_waiting_status", "allocate_slots", "free blocks"),
    ],
)
def test_a_request_that_is_held_back_is_served_later(
    asynchronous: bool, means: str, groups: str
) -> None:
    engine = Engine("ours", asynchronous=asynchronous, groups=groups, budget=64)
    engine.generate("first", 6)
    engine.run(20)
    release = hold(engine, means)
    engine.generate("held", 20)
    engine.run(5)
    assert engine.finished["held"] == []
    release()
    engine.run(20)
    assert engine.finished["held"] == [FinishReason.LENGTH]
    assert engine.tokens["held"] == 3


@pytest.mark.parametrize("replaced", ["scheduler", "class"])
def test_a_request_may_be_served_by_code_of_others(
    replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that exceeds the cache is left to a function that is not vLLM's."""
    engine = Engine("ours", blocks=6, budget=64)
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    owner = manager if replaced == "scheduler" else type(manager)

    def own(*arguments: Any, **options: Any) -> Any:
        return allocate(*arguments[-2:], **options)

    monkeypatch.setattr(owner, "allocate_slots", own, raising=False)
    engine.generate("long", 22)
    engine.run(20)
    assert engine.finished["long"] == []


@MODES
def test_requests_that_wait_for_others_are_left_alone(asynchronous: bool) -> None:
    """An idle session holds most blocks, and the scheduler is paused for a time."""
    engine = Engine("ours", asynchronous=asynchronous, blocks=9)
    engine.generate("session", 20, resumable=True)
    engine.run(20)
    engine.generate("waits", 20)
    engine.run(20)
    for state in (PauseState.PAUSED_ALL, PauseState.PAUSED_NEW):
        engine.scheduler.set_pause_state(state)
        engine.run(5)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.finished["waits"] == []
    engine.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    engine.run(20)
    assert engine.finished["waits"] == [FinishReason.LENGTH]
    assert engine.tokens["waits"] == 3


@pytest.mark.parametrize("words", ["", ",-schedule"])
def test_no_request_is_skipped_when_a_preempted_one_precedes_it(
    side: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preempted request has no token left to compute, so that it is not in the step."""
    value = "-stalled-requests" if side == "off" else "-block-ids"
    monkeypatch.setenv(switch.NAME, value + words)
    engine = Engine(side, in_flight=4, policy="priority", blocks=6, budget=64)
    engine.generate("preempted", 2 * BLOCK - 1, most=1, priority=1)
    engine.step()
    engine.generate("grows", BLOCK)
    engine.generate("behind", BLOCK + 1)
    engine.run(2)
    step, _ = engine.queue[-1]
    assert step.preempted_req_ids == {"preempted"}
    assert [*step.num_scheduled_tokens] == ["grows", "behind"][: 1 + (side == "ours")]
    engine.run()
    assert [*engine.tokens.values()] == [1, 3, 3]
