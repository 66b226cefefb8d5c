"""Fix ``bad-requests``: a request that the engine cannot serve harms nobody else.

The front end of 0.22.0 lets some requests through that end the engine for all clients, or that
never end:

- ``min_tokens`` beyond what fits into the model's length. If ``max_tokens`` is left to the
  server, it becomes smaller than ``min_tokens`` after both were checked. The engine checks them
  again as it reads the request, in the thread that reads all requests: from then on it reads
  none. If ``max_tokens`` is as large as ``min_tokens``, the request keeps its place and its
  blocks until its client leaves (https://github.com/vllm-project/vllm/pull/51299);
- stop strings, where the server detokenizes nothing: the same thread ends;
- token ids outside the vocabulary in a prompt, in ``logprob_token_ids`` or in
  ``allowed_token_ids``, and seeds of more than 64 bits: the step fails;
- ``routed_experts_prompt_start`` at or behind the prompt's end: the scheduler fails.

Here ``min_tokens`` is lowered to what fits, as the length would end the request there, and the
others are refused with an error of their own.
"""

# mirrors: vllm.v1.engine.input_processor:InputProcessor.process_inputs
# mirrors: vllm.v1.engine.input_processor:InputProcessor._validate_params
# mirrors: vllm.v1.engine.input_processor:InputProcessor._validate_model_inputs

from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.readiness import features, switch

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

#: What a torch.Generator takes.
_SEEDS = range(-(1 << 63), 1 << 64)


def check(
    processor: "InputProcessor", prompt: dict[str, Any], params: "SamplingParams | None"
) -> None:
    """Make a request fit for the engine.

    Args:
        processor: the front end's.
        prompt: of the decoder.
        params: the request's own copy, complete, which may be changed; None to pool.

    Raises:
        VLLMValidationError: the engine cannot serve the request.
        ValueError: the same, from the checks that 0.22.0 has.
    """
    if features.BAD_REQUESTS not in switch.enabled():
        return
    model = processor.model_config
    vocabulary = range(model.get_vocab_size())
    ids: Collection[int] | None = prompt.get("prompt_token_ids")
    if ids and prompt["type"] == "token":  # a model may have placeholders of its own
        _require(min(ids) >= 0, "prompt", min(ids))
        if processor.tokenizer is None:
            _require(max(ids) in vocabulary, "prompt", max(ids))
    if params is None:
        return
    for name in ("logprob_token_ids", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            _require(token in vocabulary, name, token)
    if params.seed is not None:
        _require(params.seed in _SEEDS, "seed", params.seed)
    length = length_from_prompt_token_ids_or_embeds(ids, prompt.get("prompt_embeds"))
    if model.enable_return_routed_experts:
        start = params.routed_experts_prompt_start
        _require(start in range(length), "routed_experts_prompt_start", start)
    room = model.max_model_len - length
    if params.max_tokens is not None:
        room = min(room, params.max_tokens)
    params.min_tokens = min(params.min_tokens, max(0, room))
    params._verify_args()


def _require(holds: bool, parameter: str, value: int) -> None:
    if not holds:
        raise VLLMValidationError(
            f"{parameter}: {value} is out of range for this model.",
            parameter=parameter,
            value=value,
        )
