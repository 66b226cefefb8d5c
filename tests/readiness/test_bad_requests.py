"""The fix bad-requests: a request that the engine cannot serve is refused, or does no harm.

What the front end lets through goes the engine's way: the real messages between its processes,
its scheduler, its batch and its sampler. The pinned front end lets each request here through,
which is asserted as well, and with the fix off ours does.
"""

from typing import Any

import pytest
import torch
from support import modules
from support.batches import empty
from support.lockstep import scheduler as upstream
from support.lockstep.scheduler import VOCABULARY
from vllm.entrypoints.serve.disagg.protocol import GenerateRequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.readiness import switch
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

INPUT_PROCESSOR = "vllm/v1/engine/input_processor.py"
LENGTH = 24
PROMPT = [3, 4, 5, 6]
HUGE = 10**6


@pytest.fixture(params=["pinned", "off", "ours"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which front end is tested."""
    monkeypatch.setenv(switch.NAME, "-bad-requests" if request.param == "off" else "on")
    return str(request.param)


@pytest.fixture
def scheduler() -> Any:
    """The engine's scheduler."""
    return upstream.make_scheduler(False, None, 16, 4, 64, LENGTH)


def from_http(**params: Any) -> SamplingParams:
    """The parameters of a POST to /inference/v1/generate, as its server reads them."""
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0.0, **params}}
    return GenerateRequest.model_validate(body).sampling_params


def admit(side: str, scheduler: Any, prompt: list[int], params: Any) -> EngineCoreRequest:
    """Let a side's front end admit a request."""
    load = modules.pristine if side == "pinned" else modules.overlaid
    processor = load(INPUT_PROCESSOR).InputProcessor(scheduler.vllm_config)
    prepared = {"type": "token", "prompt_token_ids": prompt}
    admitted = processor.process_inputs("r", prepared, params, ("generate",))
    return admitted


def serve(scheduler: Any, admitted: EngineCoreRequest, most: int = 60) -> list[int] | None:
    """Serve a request greedily.

    Returns:
        Its tokens; None if it does not end.
    """
    sent = MsgpackEncoder().encode(admitted)
    request = Request.from_engine_core_request(MsgpackDecoder(EngineCoreRequest).decode(sent), None)
    scheduler.add_request(request)
    batch = empty(modules.pristine, VOCABULARY)
    sampler = modules.pristine(modules.SAMPLER).Sampler()
    state = None
    for _ in range(most):
        scheduled = scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            torch.nn.functional.embedding(
                torch.tensor(new.prompt_token_ids), torch.zeros(VOCABULARY, 1)
            )
            state = state_of(new)
            batch.add_request(state)
        batch.refresh_metadata()
        if scheduled.num_scheduled_tokens:
            logits = torch.arange(VOCABULARY, dtype=torch.float32).unsqueeze(0)
            with torch.compiler.set_stance("force_eager"):
                sampled = sampler(logits, batch.sampling_metadata).sampled_token_ids.tolist()
            output = ModelRunnerOutput(["r"], {"r": 0}, sampled)
            scheduler.update_from_output(scheduled, output)
        if request.is_finished():
            return list(request.output_token_ids)
    return None


def state_of(new: Any) -> Any:
    """The runner's state of a request."""
    params = new.sampling_params
    seeded = None if params.seed is None else torch.Generator().manual_seed(params.seed)
    return modules.pristine(modules.INPUT_BATCH).CachedRequestState(
        req_id=new.req_id,
        prompt_token_ids=new.prompt_token_ids,
        mm_features=[],
        sampling_params=params,
        generator=seeded,
        block_ids=new.block_ids,
        num_computed_tokens=0,
        output_token_ids=[],
    )


def without_text(params: SamplingParams) -> SamplingParams:
    """As a server with --tokens-only changes what it was sent."""
    params.detokenize = False
    return params


ENDS_THE_ENGINE: dict[str, tuple[list[int], Any]] = {
    "a stop string without text": (
        PROMPT,
        lambda: without_text(from_http(stop=["x"], skip_clone=True)),
    ),
    "a negative token": ([3, -1], from_http),
    "a token behind the vocabulary": ([3, VOCABULARY], from_http),
    "logprobs of a token behind it": (
        PROMPT,
        lambda: from_http(logprobs=1, logprob_token_ids=[VOCABULARY]),
    ),
    "logprobs of a negative token": (PROMPT, lambda: from_http(logprob_token_ids=[-1])),
    "an allowed token behind it": (
        PROMPT,
        lambda: from_http(allowed_token_ids=[VOCABULARY]),
    ),
    "a seed of 65 bits": (PROMPT, lambda: from_http(temperature=1.0, seed=1 << 64)),
}


@pytest.mark.parametrize(("prompt", "params"), ENDS_THE_ENGINE.values(), ids=ENDS_THE_ENGINE)
def test_what_ends_the_engine_is_refused(
    side: str, scheduler: Any, prompt: list[int], params: Any
) -> None:
    if side == "ours":
        with pytest.raises(ValueError, match=r"out of range|detokenize"):
            admit(side, scheduler, prompt, params())
        return
    admitted = admit(side, scheduler, prompt, params())
    with pytest.raises((ValueError, IndexError, RuntimeError, OverflowError)):
        serve(scheduler, admitted)


def test_min_tokens_beyond_a_max_tokens_of_the_server(side: str, scheduler: Any) -> None:
    """The engine's thread that reads requests raises."""
    admitted = admit(side, scheduler, PROMPT, from_http(max_tokens=None, min_tokens=HUGE))
    if side == "ours":
        tokens = serve(scheduler, admitted)
        assert tokens is not None
        assert len(tokens) == LENGTH - len(PROMPT)
    else:
        with pytest.raises(ValueError, match="min_tokens"):
            serve(scheduler, admitted)


def test_min_tokens_beyond_the_models_length(side: str, scheduler: Any) -> None:
    admitted = admit(side, scheduler, PROMPT, from_http(max_tokens=HUGE, min_tokens=HUGE))
    tokens = serve(scheduler, admitted)
    if side == "ours":
        assert tokens is not None
        assert len(tokens) == LENGTH - len(PROMPT)
    else:
        assert tokens is None
        assert scheduler.running  # and it keeps its blocks


def test_routed_experts_behind_the_prompt(
    side: str, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scheduler.vllm_config.model_config
    monkeypatch.setattr(model, "enable_return_routed_experts", True)
    params = from_http(routed_experts_prompt_start=len(PROMPT))
    if side == "ours":
        with pytest.raises(ValueError, match="out of range"):
            admit(side, scheduler, PROMPT, params)
    else:
        start = admit(side, scheduler, PROMPT, params).sampling_params.routed_experts_prompt_start
        assert not start < len(PROMPT)  # which the scheduler asserts


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 3, "min_tokens": 3},
        {"max_tokens": LENGTH - len(PROMPT), "min_tokens": 2},
        {"temperature": 1.0, "seed": -(1 << 63)},
        {"temperature": 1.0, "seed": (1 << 64) - 1},
        {"logprobs": 2, "logprob_token_ids": [0, VOCABULARY - 1]},
        {"allowed_token_ids": [0, VOCABULARY - 1]},
    ],
)
def test_what_the_engine_can_serve_is_left_as_it_is(params: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(switch.NAME, "on")
    scheduler = upstream.make_scheduler(False, None, 16, 4, 64, LENGTH)
    admitted = [
        admit(side, scheduler, [0, VOCABULARY - 1], from_http(**params))
        for side in ("pinned", "ours")
    ]
    assert admitted[0].sampling_params == admitted[1].sampling_params
    assert serve(scheduler, admitted[1])
