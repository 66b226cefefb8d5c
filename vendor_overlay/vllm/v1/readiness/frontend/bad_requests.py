"""Fix ``bad-requests``: the front end refuses requests that would break the engine for others.

Stock 0.22.0's front end accepts requests that kill the engine, or never end:

- ``min_tokens`` that do not fit into max_model_len. The front end sets an unset ``max_tokens`` to
  the remaining length only after its checks. The engine core's input thread then repeats the checks
  and dies, and no further request is read. If the client sets a ``max_tokens`` that does not fit
  either, the request holds its KV cache blocks until the client disconnects
  (https://github.com/vllm-project/vllm/pull/51299);
- stop strings without detokenization: the input thread dies;
- token ids outside the vocabulary in a prompt, ``logprob_token_ids`` or ``allowed_token_ids``, and
  seeds of more than 64 bits (63 with Model Runner V2): the step fails;
- ``routed_experts_prompt_start`` at or past the prompt's end: the scheduler fails;
- values of a wrong type, such as ``max_tokens=16.0`` (:mod:`.request_types`);
- more ``logprobs`` or ``prompt_logprobs`` than the vocabulary has tokens, if ``--max-logprobs``
  allows them: the step fails;
- NaN as temperature, penalty or bias: all logits of the request become NaN;
- ``allowed_token_ids`` that ``bad_words``, ``min_tokens`` or a bias of -inf forbid: the sampler
  returns token 0 (https://github.com/vllm-project/vllm/issues/57986).

Here ``min_tokens`` is lowered to fit. The other requests are refused with an error.
"""

# mirrors: vllm.v1.engine.input_processor:InputProcessor.process_inputs
# mirrors: vllm.v1.engine.input_processor:InputProcessor._validate_params
# mirrors: vllm.v1.engine.input_processor:InputProcessor._validate_model_inputs

import math
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingType
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.frontend import mm_caches, request_types

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor

#: Smallest and largest seed of a torch.Generator, and largest seed of Model Runner V2.
_LEAST_SEED, _LARGEST_SEED, _LARGEST_SEED_MRV2 = -(1 << 63), (1 << 64) - 1, (1 << 63) - 1
_FACTORS = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "min_p"),
)


def check(
    processor: "InputProcessor", prompt: dict[str, Any], params: "SamplingParams | None"
) -> None:
    """Validate a request, and convert its parameters in place.

    ``prompt`` is the decoder's prompt. ``params`` is the request's own copy; None for pooling.

    Raises:
        VLLMValidationError: the engine cannot serve the request.
        ValueError: upstream's checks refuse the request.
    """
    if registry.BAD_REQUESTS not in switch.enabled():
        return
    ids: Collection[int] | None = prompt.get("prompt_token_ids")
    if ids and prompt["type"] == "token":  # a multimodal prompt may hold placeholders
        last = processor.model_config.get_vocab_size() - 1
        largest = last if processor.tokenizer is None else None
        check_prompt(ids, largest)
    if params is not None:
        request_types.convert(params)
        length = length_from_prompt_token_ids_or_embeds(ids, prompt.get("prompt_embeds"))
        check_params(processor.vllm_config, params, length)


def check_prompt(ids: "Collection[int]", largest: int | None) -> None:
    """Refuse a prompt of token ids that are negative, or beyond the largest."""
    _require("prompt", min(ids), 0)
    _require("prompt", max(ids), 0, largest)


def check_params(config: "VllmConfig", params: "SamplingParams", length: int) -> None:
    """Validate the parameters of a request with ``length`` prompt tokens; lower its min_tokens.

    Raises:
        VLLMValidationError: the engine cannot serve the request.
        ValueError: upstream's checks refuse the request.
    """
    model = config.model_config
    last = model.get_vocab_size() - 1
    _check_types(params)
    for name in ("logprobs", "prompt_logprobs"):
        if (wanted := getattr(params, name)) is not None:
            _require(name, wanted, -1, last + 1)
    for name in ("logprob_token_ids", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if isinstance(token, bool):
                request_types.refuse(name, token, int)
            _require(name, token, 0, last)
    if params.seed is not None:
        _check_seed(config, params)
    if model.enable_return_routed_experts:
        start = params.routed_experts_prompt_start
        _require("routed_experts_prompt_start", start, 0, length - 1)
    room = model.max_model_len - length
    if params.max_tokens is not None:
        room = min(room, params.max_tokens)
    params.min_tokens = min(params.min_tokens, max(0, room))
    params._verify_args()
    _check_allowed_tokens(params)


def check_message(processor: "InputProcessor", request: "EngineCoreRequest") -> "EngineCoreRequest":
    """Convert a request in place and return it; refuse a request that cannot be decoded."""
    if registry.BAD_REQUESTS in switch.enabled():
        request_types.convert(request)
        if request.pooling_params is not None:
            request_types.convert(request.pooling_params)
        if not request_types.is_in_process(processor.vllm_config):
            try:
                request_types.check(request)
            except ValueError:
                mm_caches.forget(processor)
                raise
    return request


def _check_types(params: "SamplingParams") -> None:
    """Refuse values that fail a step even if the engine core runs in this process."""
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not request_types.is_integer(value):
            request_types.refuse(name, value, int)
    if not isinstance(params.extra_args, (Mapping, NoneType)):
        request_types.refuse("extra_args", params.extra_args, dict)
    for name in _FACTORS:
        _refuse_nan(name, getattr(params, name))
    if isinstance(params.logit_bias, dict):
        for bias in params.logit_bias.values():
            _refuse_nan("logit_bias", bias)


def _check_allowed_tokens(params: "SamplingParams") -> None:
    """Refuse a request whose allowed tokens are all forbidden as it begins.

    Stop tokens do not count with a grammar, which may allow them before ``min_tokens``.
    """
    if not params.allowed_token_ids:
        return
    forbidden = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    forbidden |= {token for token, bias in (params.logit_bias or {}).items() if bias == -math.inf}
    if params.min_tokens and params.structured_outputs is None:
        forbidden |= params.all_stop_token_ids
    if forbidden.issuperset(params.allowed_token_ids):
        raise VLLMValidationError(
            "allowed_token_ids: bad_words, min_tokens or logit_bias forbid all of them.",
            parameter="allowed_token_ids",
            value=params.allowed_token_ids,
        )


def _check_seed(config: "VllmConfig", params: "SamplingParams") -> None:
    """Refuse a seed that is out of range, unless V1 ignores it in a greedy request."""
    mrv2 = config.use_v2_model_runner
    if not mrv2 and params.sampling_type != SamplingType.RANDOM_SEED:
        return
    if not request_types.is_integer(params.seed):
        request_types.refuse("seed", params.seed, int)
    largest = _LARGEST_SEED_MRV2 if mrv2 else _LARGEST_SEED
    # The request's n samples use consecutive seeds.
    _require("seed", params.seed, _LEAST_SEED, largest - (params.n - 1))


def _refuse_nan(parameter: str, value: object) -> None:
    if isinstance(value, float) and math.isnan(value):
        _refuse(parameter, value)


def _require(parameter: str, value: Any, least: int, largest: int | None = None) -> None:  # noqa: ANN401
    """Refuse a value that is out of range or not a number."""
    try:
        fits = least <= value and (largest is None or value <= largest)
    except TypeError:
        request_types.refuse(parameter, value, int)
    if not fits:
        _refuse(parameter, value)


def _refuse(parameter: str, value: object) -> None:
    raise VLLMValidationError(
        f"{parameter}: {value} is out of range for this model.",
        parameter=parameter,
        value=value,
    )
