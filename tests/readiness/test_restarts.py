"""The worker's part of the fix failed-loads: what a request that joins again is set back to."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.readiness.inputs import restarts
from vllm.v1.worker.gpu_input_batch import CachedRequestState

VOCABULARY = 30


def runner() -> Any:
    """What is read of a runner."""
    return SimpleNamespace(
        input_batch=SimpleNamespace(vocab_size=VOCABULARY), num_prompt_logprobs={}
    )


def request(**fields: Any) -> CachedRequestState:
    """A request with a prompt of three tokens and a seed."""
    return CachedRequestState(
        req_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=[],
        sampling_params=SamplingParams(temperature=1.0, seed=7, **fields),
        generator=torch.Generator().manual_seed(7),
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def draw(state: CachedRequestState) -> float:
    """Draw a number with a request's generator."""
    return float(torch.rand(1, generator=state.generator))


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch everything on, beside a connector."""
    monkeypatch.setattr(restarts, "has_kv_transfer_group", lambda: True)


def test_what_was_drawn_for_dropped_tokens_is_drawn_again() -> None:
    state, one = request(), runner()
    restarts.rejoin(one, state)
    first = [draw(state), draw(state)]
    restarts.rejoin(one, state)
    assert [draw(state), draw(state)] == first


def test_what_was_drawn_for_tokens_that_stay_is_not_drawn_again() -> None:
    state, one = request(), runner()
    restarts.rejoin(one, state)
    first = draw(state)
    state.output_token_ids = [5]
    restarts.rejoin(one, state)
    second = draw(state)
    assert second != first
    restarts.rejoin(one, state)
    assert draw(state) == second


@pytest.mark.parametrize("off", ["switch", "connector"])
def test_off(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if off == "switch":
        monkeypatch.setenv("VLLM_READINESS", "-failed-loads,-kv-transfers")  # they share it
    else:
        monkeypatch.setattr(restarts, "has_kv_transfer_group", lambda: False)
    state, one = request(prompt_logprobs=2), runner()
    restarts.rejoin(one, state)
    first = draw(state)
    restarts.rejoin(one, state)
    assert draw(state) != first
    assert one.num_prompt_logprobs == {}


@pytest.mark.parametrize(("asked", "count"), [(None, None), (2, 2), (-1, VOCABULARY)])
def test_prompt_logprobs_are_computed_with_the_prompt(asked: int | None, count: int | None) -> None:
    state, one = request(prompt_logprobs=asked), runner()
    expected = {} if count is None else {"r": count}
    restarts.rejoin(one, state)
    assert one.num_prompt_logprobs == expected
    state.num_computed_tokens = 3  # the prompt is not computed
    one.num_prompt_logprobs.clear()
    restarts.rejoin(one, state)
    assert one.num_prompt_logprobs == {}
    state.num_computed_tokens = 0
    state.output_token_ids = [5]  # they were delivered with it
    restarts.rejoin(one, state)
    assert one.num_prompt_logprobs == {}
