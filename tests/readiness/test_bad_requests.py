"""The fix bad-requests: a request that the engine cannot serve is refused, or does no harm.

What the front end lets through goes the engine's way: the real messages between its processes,
its scheduler, its batch and its sampler. The pinned front end lets each request here through,
which is asserted as well, and with the fix off ours does.
"""

import math
from contextlib import nullcontext
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support import modules, scheduling
from support.batches import Spec, empty, state
from support.scheduling import VOCABULARY
from vllm.entrypoints.serve.disagg.protocol import GenerateRequest
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.readiness.frontend import request_types
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

FIX = "bad-requests"
INPUT_PROCESSOR = "vllm/v1/engine/input_processor.py"
LENGTH = 24
PROMPT = [3, 4, 5, 6]
HUGE = 10**6


@pytest.fixture
def scheduler() -> Any:
    """The engine's scheduler; its server allows any number of logprobs, and thinking budgets."""
    scheduler = scheduling.make_scheduler(False, None, 16, 4, 64, LENGTH)
    scheduler.vllm_config.model_config.max_logprobs = HUGE
    scheduler.vllm_config.reasoning_config = SimpleNamespace(enabled=True)
    return scheduler


def from_http(**params: Any) -> SamplingParams:
    """The parameters of a POST to /inference/v1/generate, as its server reads them."""
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0.0, **params}}
    return GenerateRequest.model_validate(body).sampling_params


def admit(
    side: str, scheduler: Any, prompt: list[int], params: Any, **fields: Any
) -> EngineCoreRequest:
    """Let a side's front end admit a request, with more of its fields."""
    front_ends = vars(scheduler).setdefault("front_ends", {})  # to make one takes long
    if side not in front_ends:
        made = modules.of_side(side)(INPUT_PROCESSOR).InputProcessor
        front_ends[side] = made(scheduler.vllm_config)
    processor = front_ends[side]
    prepared = {"type": "token", "prompt_token_ids": prompt}
    tasks = ("generate", "embed")
    return processor.process_inputs("r", prepared, params, tasks, **fields)


def serve(scheduler: Any, admitted: EngineCoreRequest) -> list[int] | None:
    """Serve a request greedily.

    Returns:
        Its tokens; None if it does not end.
    """
    sent = MsgpackEncoder().encode(admitted)
    request = Request.from_engine_core_request(MsgpackDecoder(EngineCoreRequest).decode(sent), None)
    scheduler.add_request(request)
    batch = empty(modules.pristine, VOCABULARY)
    sampler = modules.pristine(modules.SAMPLER).Sampler()
    for _ in range(60):
        scheduled = scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            torch.nn.functional.embedding(
                torch.tensor(new.prompt_token_ids), torch.zeros(VOCABULARY, 1)
            )
            batch.add_request(state_of(new))
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
    made = state(Spec(new.prompt_token_ids, [], {}), new.req_id)
    made.sampling_params = params = new.sampling_params
    if params.seed is not None:
        made.generator = torch.Generator().manual_seed(params.seed)
    return made


ENDS_THE_ENGINE: dict[str, tuple[list[int], dict[str, Any]]] = {
    "a stop string without text": (PROMPT, {"stop": ["x"], "skip_clone": True}),
    "a negative token": ([3, -1], {}),
    "a token behind the vocabulary": ([3, VOCABULARY], {}),
    "logprobs of a token behind it": (PROMPT, {"logprobs": 1, "logprob_token_ids": [VOCABULARY]}),
    "logprobs of a negative token": (PROMPT, {"logprob_token_ids": [-1]}),
    "an allowed token behind it": (PROMPT, {"allowed_token_ids": [VOCABULARY]}),
    "more logprobs than tokens": (PROMPT, {"logprobs": VOCABULARY + 1}),
    "a seed of 65 bits": (PROMPT, {"temperature": 1.0, "seed": 1 << 64}),
}


@pytest.mark.parametrize(("prompt", "params"), ENDS_THE_ENGINE.values(), ids=ENDS_THE_ENGINE)
def test_what_ends_the_engine_is_refused(
    side: str, scheduler: Any, prompt: list[int], params: dict[str, Any]
) -> None:
    sampling = from_http(**params)
    sampling.detokenize = False  # as a server with --tokens-only changes what it was sent
    if side == "ours":
        with pytest.raises(ValueError, match=r"out of range|detokenize"):
            admit(side, scheduler, prompt, sampling)
        return
    admitted = admit(side, scheduler, prompt, sampling)
    with pytest.raises((ValueError, IndexError, RuntimeError, OverflowError)):
        serve(scheduler, admitted)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_as_many_logprobs_as_the_vocabulary_has_tokens(name: str, scheduler: Any) -> None:
    for wanted in (-1, 0, VOCABULARY):
        admitted = admit("ours", scheduler, PROMPT, SamplingParams(**{name: wanted}))
        assert getattr(admitted.sampling_params, name) == wanted
    with pytest.raises(ValueError, match=f"^{name}: {VOCABULARY + 1} is out of range"):
        admit("ours", scheduler, PROMPT, SamplingParams(**{name: VOCABULARY + 1}))
    admit("pinned", scheduler, PROMPT, SamplingParams(**{name: VOCABULARY + 1}))


@pytest.mark.parametrize("max_tokens", [None, HUGE])
def test_min_tokens_beyond_the_models_length(
    side: str, scheduler: Any, max_tokens: int | None
) -> None:
    """The engine's thread that reads requests raises, or the request holds its blocks for ever."""
    admitted = admit(side, scheduler, PROMPT, from_http(max_tokens=max_tokens, min_tokens=HUGE))
    if side == "ours":
        tokens = serve(scheduler, admitted)
        assert tokens is not None
        assert len(tokens) == LENGTH - len(PROMPT)
    elif max_tokens is None:
        with pytest.raises(ValueError, match="min_tokens"):
            serve(scheduler, admitted)
    else:
        assert serve(scheduler, admitted) is None
        assert scheduler.running


def test_routed_experts_behind_the_prompt(side: str, scheduler: Any) -> None:
    scheduler.vllm_config.model_config.enable_return_routed_experts = True
    params = from_http(routed_experts_prompt_start=len(PROMPT))
    with pytest.raises(ValueError, match="out of range") if side == "ours" else nullcontext():
        admit(side, scheduler, PROMPT, params)  # the scheduler asserts that it is smaller


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
        *({"temperature": float("inf")}, {"logit_bias": {5: float("-inf")}}),
    ],
)
def test_what_the_engine_can_serve_is_left_as_it_is(scheduler: Any, params: Any) -> None:
    admitted = [
        admit(side, scheduler, [0, VOCABULARY - 1], from_http(**params))
        for side in ("pinned", "ours")
    ]
    assert admitted[0].sampling_params == admitted[1].sampling_params
    assert serve(scheduler, admitted[1])


class Walked(int):
    """An integer that `in range` would look for by walking the range, as it does for numpy's."""

    __hash__ = int.__hash__
    compared = 0

    def __eq__(self, other: object) -> bool:
        self.compared += 1
        assert self.compared < 4, "compared with each number of a range"
        return int(self) == other


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0, "seed": Walked(5)},
        {"logprobs": 1, "logprob_token_ids": [Walked(5)]},
        {"allowed_token_ids": [Walked(5)]},
        {"routed_experts_prompt_start": Walked(2)},
        {"min_tokens": 1, "stop_token_ids": [Walked(5)]},
    ],
    ids=lambda params: list(params)[-1],
)
def test_no_range_is_walked(scheduler: Any, params: Any) -> None:
    """With numpy's integers, `seed in range(...)` holds the process for hours."""
    scheduler.vllm_config.model_config.enable_return_routed_experts = True
    sampling = SamplingParams(temperature=params.pop("temperature", 0.0))
    sampling.detokenize = False
    for name, value in params.items():
        setattr(sampling, name, value)
    assert serve(scheduler, admit("ours", scheduler, PROMPT, sampling))


def test_a_prompt_of_odd_integers_walks_no_range(scheduler: Any) -> None:
    admitted = admit("ours", scheduler, [3, Walked(5)], from_http())
    assert [type(token) for token in admitted.prompt_token_ids] == [int, int]
    assert serve(scheduler, admitted)


def test_the_stop_tokens_of_a_batch_walk_no_range() -> None:
    """The engine's batch sees ids that no front end has converted, in one process."""
    batch = empty(modules.overlaid, VOCABULARY)
    sampling = SamplingParams(min_tokens=2)
    sampling._all_stop_token_ids = {Walked(5), Walked(VOCABULARY)}
    new = SimpleNamespace(req_id="r", sampling_params=sampling, prompt_token_ids=PROMPT)
    batch.add_request(state_of(new))
    assert [int(token) for token in sampling.all_stop_token_ids] == [5]


#: Field to a value of a wrong type that a message takes.
WRONG: list[tuple[str, Any]] = [
    *(("seed", True), ("seed", "5"), ("seed", np.array([5])), ("max_tokens", 16.0)),
    *(("max_tokens", Decimal(5)), ("logprobs", float("nan")), ("temperature", True)),
    *(("temperature", np.array([0.5])), ("ignore_eos", 1), ("stop_token_ids", [True])),
    *(("bad_words", [5]), ("logprob_token_ids", [5.0]), ("logprob_token_ids", {5: 1})),
    *(("logit_bias", {5.0: 1.0}), ("logit_bias", {5: True}), ("logit_bias", [5])),
    *(("extra_args", {5: 1}), ("extra_args", [1]), ("repetition_detection", "on")),
    *(("thinking_token_budget", 4.0), ("output_kind", "delta")),
]


def built(name: str, value: Any) -> SamplingParams:
    """Parameters with one field as a caller of the Python API sets it."""
    fields = {"temperature": 1.0, "max_tokens": 8, "detokenize": False}
    return SamplingParams(**{**fields, name: value})


#: Other values of wrong types: the name, and the arguments of ``admit`` that hold the value.
WRONG_ELSEWHERE: list[tuple[str, Any, Any, dict[str, Any]]] = [
    *(
        (name, PROMPT, from_http(), {name: value})
        for name, value in (("priority", 1.5), ("data_parallel_rank", 0.0), ("resumable", 1))
    ),
    *(("prompt_token_ids", prompt, from_http(), {}) for prompt in ([3, 4.0], [3, True])),
    *(
        (name, PROMPT, PoolingParams(task="embed", **{name: value}), {})
        for name, value in (("use_activation", 1), ("returned_token_ids", [5.0]))
    ),
]


@pytest.mark.parametrize(
    ("name", "prompt", "params", "fields"),
    [*((name, PROMPT, built(name, value), {}) for name, value in WRONG), *WRONG_ELSEWHERE],
)
@pytest.mark.filterwarnings("ignore:Conversion of an array")
def test_a_value_of_a_wrong_type_is_refused(
    side: str, scheduler: Any, name: str, prompt: Any, params: Any, fields: dict[str, Any]
) -> None:
    """The engine's thread that reads requests raises."""
    if side == "ours":
        with pytest.raises(VLLMValidationError, match=rf"{name}: .*Pass a value of type") as caught:
            admit(side, scheduler, prompt, params, **fields)
        assert caught.value.parameter == name
    else:
        admitted = admit(side, scheduler, prompt, params, **fields)
        with pytest.raises(msgspec.ValidationError):
            MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(admitted))


#: Field to numbers of other types, and the plain ones that are equal.
NUMBERS: list[tuple[str, Any, Any]] = [
    ("seed", np.int64(-(1 << 63) + 3), -(1 << 63) + 3),
    ("seed", np.uint64((1 << 64) - 1), (1 << 64) - 1),
    ("seed", torch.tensor(5), 5),
    ("max_tokens", np.int32(3), 3),
    ("logprobs", np.int64(2), 2),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", Decimal("0.5"), 0.5),
    ("repetition_penalty", np.float16(1.5), 1.5),
    ("ignore_eos", np.bool_(True), True),
    ("logprob_token_ids", [np.int64(5)], [5]),
    ("logprob_token_ids", (5, 6), [5, 6]),
    ("allowed_token_ids", np.arange(5, 8), [5, 6, 7]),
    ("allowed_token_ids", torch.arange(5, 8), [5, 6, 7]),
    ("allowed_token_ids", range(5, 8), [5, 6, 7]),
    ("allowed_token_ids", {5}, [5]),
    ("logit_bias", {np.int64(5): np.float32(1.5)}, {5: 1.5}),
]


@pytest.mark.parametrize(("name", "value", "plain"), NUMBERS, ids=str)
def test_a_number_of_a_library_is_served(scheduler: Any, name: str, value: Any, plain: Any) -> None:
    admitted = [admit("ours", scheduler, PROMPT, built(name, each)) for each in (value, plain)]
    params = [each.sampling_params for each in admitted]
    assert repr(getattr(params[0], name)) == repr(plain)
    assert params[0] == params[1]
    assert serve(scheduler, admitted[0])


def test_what_the_caller_holds_is_not_changed(scheduler: Any) -> None:
    ids = [np.int64(5), np.int64(6)]
    params = built("allowed_token_ids", ids)
    params.seed = np.int64(5)
    admit("ours", scheduler, PROMPT, params)
    assert params.allowed_token_ids is ids
    assert {type(each) for each in ids} == {type(params.seed)} == {np.int64}


ZOO: list[Any] = [
    *(None, 0, 1, 5, -1, True, 5.0, 1.0, 0.5, float("inf"), 1 << 70, "5", b"5", Decimal(1)),
    *(np.int64(1), np.uint8(5), np.float64(1.0), np.float32(0.5), np.bool_(True)),
    *(np.array(1), np.array([1]), np.array([1, 2]), np.array([[1, 2]]), np.array([0.5])),
    *(torch.tensor(1), torch.tensor([1, 2]), torch.tensor(0.5)),
    *([], [5], (5,), {5}, frozenset({5}), range(5, 7), [5.0], [True], ["5"], [np.int64(5)], [[5]]),
    *({}, {5: 1.0}, {5: 1}, {5: True}, {5.0: 1.0}, {"5": 1.0}, {np.int64(5): np.float32(1)}),
    *(object(), slice(1, 2), RequestOutputKind.DELTA),
]


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
@pytest.mark.filterwarnings("ignore:Conversion of an array")
def test_each_request_let_in_can_be_read(scheduler: Any, name: str) -> None:
    """And each that stock's engine could read is let in, and is the same there."""
    read = 0
    for value in ZOO:
        arrivals: list[Any] = []
        for side in ("pinned", "ours"):
            try:
                params = built(name, value)
                admitted = admit(side, scheduler, PROMPT, params)
                sent = MsgpackEncoder().encode(admitted)
            except (
                ValueError,
                TypeError,
                AttributeError,
                AssertionError,
                ArithmeticError,
                RuntimeError,
            ):
                arrivals.append(None)
                continue
            try:
                arrivals.append(MsgpackDecoder(EngineCoreRequest).decode(sent).sampling_params)
            except msgspec.ValidationError:
                assert side == "pinned"
                arrivals.append(None)
        if arrivals[0] is not None:
            assert arrivals[1] == arrivals[0], value
        read += arrivals[1] is not None
    assert read or name in ("structured_outputs", "_all_stop_token_ids")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": float("nan")},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": np.float32("nan")},
        {"logit_bias": {5: float("nan")}},
    ],
    ids=str,
)
def test_nan_is_refused(side: str, scheduler: Any, params: Any) -> None:
    """All logits of the request become NaN: the sampler gives tokens that mean nothing."""
    refusal = pytest.raises(VLLMValidationError, match=f"{next(iter(params))}: nan")
    with refusal if side == "ours" else nullcontext():
        admit(side, scheduler, PROMPT, SamplingParams(**params, detokenize=False))


#: Parameters by which one of the allowed tokens is left, or none if it is also a bad word.
FORBIDDING: list[dict[str, Any]] = [
    {"words": [[5], [6]]},
    {"words": [[5]], "stop_token_ids": [6], "min_tokens": 2},
    {"logit_bias": {5: -math.inf, 6: -math.inf}},
    {"stop_token_ids": [5, 6, 7], "min_tokens": 1},
]


def forbid(allowed: list[int], words: Any = None, **params: Any) -> SamplingParams:
    """Parameters with allowed tokens, and with bad words by their token ids."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=3, detokenize=False, allowed_token_ids=allowed, **params
    )
    sampling._bad_words_token_ids = words
    return sampling


@pytest.mark.parametrize("params", FORBIDDING, ids=str)
def test_allowed_tokens_that_are_all_forbidden_are_refused(
    side: str, scheduler: Any, params: dict[str, Any]
) -> None:
    if side == "ours":
        with pytest.raises(VLLMValidationError, match="allowed_token_ids"):
            admit(side, scheduler, PROMPT, forbid([5, 6], **params))
        return
    admitted = admit(side, scheduler, PROMPT, forbid([5, 6], **params))
    if params.keys() == {"words"}:  # logits processors are not simulated here
        assert serve(scheduler, admitted) == [0, 0, 0]


@pytest.mark.parametrize(
    "params",
    [
        *FORBIDDING,
        {"words": [[5, 6], [6, 5], [9, 9]]},
        {"stop_token_ids": [5, 6, 9]},
        {"logit_bias": {5: -100.0, 6: -100.0, 9: -100.0}},
    ],
    ids=str,
)
def test_allowed_tokens_of_which_one_is_left_are_served(
    scheduler: Any, params: dict[str, Any]
) -> None:
    allowed = [5, 6, 9]
    reply = serve(scheduler, admit("ours", scheduler, PROMPT, forbid(allowed, **params)))
    assert reply and set(reply) <= set(allowed)


@pytest.mark.parametrize(
    ("fields", "mrv2"),
    [({"seed": (1 << 64) - 1, "n": 2}, False), ({"seed": 1 << 63, "temperature": 0.0}, True)],
)
def test_the_largest_seed(
    side: str, scheduler: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], mrv2: bool
) -> None:
    """The second of two requests is given the next seed, which no generator takes.

    Model Runner V2 keeps seeds in an array of int64, for greedy requests as well.
    """
    kind = type(scheduler.vllm_config)
    monkeypatch.setattr(kind, "use_v2_model_runner", property(lambda _: mrv2))
    params = SamplingParams(**fields, detokenize=False)
    if side == "ours":
        with pytest.raises(VLLMValidationError, match=r"seed: .* out of range"):
            admit(side, scheduler, PROMPT, params)
        params.seed -= 1
    assert admit(side, scheduler, PROMPT, params)


class Core:
    """Stands in for an engine core, which a front end's process has by its config."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config


def refused(scheduler: Any, name: str, value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=f"{name}: "):
        admit("ours", scheduler, PROMPT, built(name, value))


@pytest.mark.parametrize(
    ("name", "value", "serves"),
    [
        *(("max_tokens", 3.0, True), ("ignore_eos", 1, True), ("temperature", True, True)),
        *(("extra_args", {"a": len}, True), ("extra_args", [1], False), ("seed", True, False)),
        *(("logprobs", 5.0, False), ("prompt_logprobs", 2.0, False)),
    ],
)
def test_an_engine_core_in_the_same_process_takes_other_types(
    scheduler: Any, name: str, value: Any, serves: bool
) -> None:
    """It reads no message, and stock serves some of them there."""
    core = Core(scheduler.vllm_config)
    request_types.serve_in_process(core)
    if serves:
        shown = getattr(admit("ours", scheduler, PROMPT, built(name, value)).sampling_params, name)
        assert (shown, type(shown)) == (value, type(value))
    else:
        refused(scheduler, name, value)
    refused(scheduling.make_scheduler(False, None, 16, 4, 64, LENGTH), name, value)
    del core
    refused(scheduler, name, value)
