"""Fix ``bad-requests``, engine core: check requests of front ends that do not check them.

Stock 0.22.0's Rust front end sends requests that the Python front end refuses or completes:

- parameters that upstream's constructor refuses, such as ``min_tokens`` beyond ``max_tokens``. The
  engine core's input thread constructs them as it decodes, and dies: no further request is read;
- values that fail a step (:mod:`.bad_requests`);
- structured outputs without a backend, which fail with HTTP 500.

Here the engine core applies the checks of :mod:`.bad_requests` and :mod:`.grammar_bounds`, and
upstream's choice of a backend. A refused request ends alone, with the finish reason "error".
Requests of a Python front end have passed the same checks.
"""

# mirrors: vllm.v1.engine.core:EngineCoreProc.process_input_sockets
# mirrors: vllm.v1.engine.core:EngineCore.preprocess_add_request
# mirrors: vllm.v1.engine.input_processor:InputProcessor._validate_model_inputs

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.frontend import bad_requests, grammar_bounds, request_types

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.serial_utils import MsgpackDecoder

_FIELDS = EngineCoreRequest.__struct_fields__
_NAME, _CLIENT = _FIELDS.index("request_id"), _FIELDS.index("client_index")


class _Unreadable(EngineCoreRequest):  # type: ignore[misc]
    """A request that cannot be decoded, and the reason."""

    error: Exception | None = None


def decode(decoder: "MsgpackDecoder", frames: Sequence[Any]) -> EngineCoreRequest:
    """Decode a request; one that cannot be decoded is refused by :func:`check`."""
    try:
        request: EngineCoreRequest = decoder.decode(frames)
    except Exception as error:
        if registry.BAD_REQUESTS not in switch.enabled():
            raise
        fields = msgspec.msgpack.decode(frames[0], ext_hook=lambda *_: None)
        client = fields[_CLIENT] if len(fields) > _CLIENT else 0
        unset: dict[str, Any] = dict.fromkeys(_FIELDS[: _FIELDS.index("prompt_embeds")])
        unset |= {"request_id": fields[_NAME], "client_index": client}
        return _Unreadable(**unset, error=error)
    return request


def check(core: "EngineCore", request: EngineCoreRequest) -> None:
    """Validate a request that has come from another process; choose the backend of its grammar.

    Raises:
        ValueError: the engine cannot serve the request.
    """
    if isinstance(request, _Unreadable) and request.error is not None:
        raise request.error
    config, params = core.vllm_config, request.sampling_params
    if registry.BAD_REQUESTS not in switch.enabled() or request_types.is_in_process(config):
        return
    ids, embeds = request.prompt_token_ids, request.prompt_embeds
    tokenizer = getattr(core.structured_output_manager, "tokenizer", None)
    if ids and embeds is None and not request.mm_features:
        last = config.model_config.get_vocab_size() - 1
        bad_requests.check_prompt(ids, max(last, getattr(tokenizer, "max_token_id", last)))
    if params is None:
        return
    length = length_from_prompt_token_ids_or_embeds(ids, embeds)
    bad_requests.check_params(config, params, length)
    params._validate_logit_bias(config.model_config)
    structured = params.structured_outputs
    if structured is not None and structured._backend is None:
        grammar_bounds.check(structured)
        params._validate_structured_outputs(config.structured_outputs_config, tokenizer)
