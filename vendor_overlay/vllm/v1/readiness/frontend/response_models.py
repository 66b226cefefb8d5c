"""Detection of replaced response models, for the feature ``streamed-chunks``.

Plugins replace such a model by one with more fields, or a method by which it is encoded.
"""

# mirrors: vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponseStreamChoice
# mirrors: vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionStreamResponse
# mirrors: vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionLogProb
# mirrors: vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionLogProbsContent
# mirrors: vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionLogProbs
# mirrors: vllm.entrypoints.openai.completion.protocol:CompletionLogProbs
# mirrors: vllm.entrypoints.openai.completion.protocol:CompletionResponseStreamChoice
# mirrors: vllm.entrypoints.openai.completion.protocol:CompletionStreamResponse
# mirrors: vllm.entrypoints.openai.engine.protocol:DeltaMessage
# mirrors: vllm.entrypoints.openai.engine.protocol:OpenAIBaseModel
# mirrors: vllm.entrypoints.openai.engine.protocol:UsageInfo

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel
from vllm.v1.readiness.engine import originals

_RESPONSE = (*("id", "object", "created", "model", "choices", "usage", "system_fingerprint"),)
_CHOICE = ("finish_reason", "stop_reason")
#: Fields by model, in the order of their JSON.
_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "DeltaMessage": ("role", "content", "reasoning", "tool_calls"),
        "ChatCompletionResponseStreamChoice": ("index", "delta", "logprobs", *_CHOICE, "token_ids"),
        "ChatCompletionStreamResponse": (*_RESPONSE, "prompt_token_ids", "prompt_text"),
        "ChatCompletionLogProb": ("token", "logprob", "bytes"),
        "ChatCompletionLogProbsContent": ("token", "logprob", "bytes", "top_logprobs"),
        "ChatCompletionLogProbs": ("content",),
        "CompletionResponseStreamChoice": (
            *("index", "text", "logprobs", *_CHOICE, "prompt_token_ids", "token_ids"),
        ),
        "CompletionStreamResponse": _RESPONSE,
        "CompletionLogProbs": ("text_offset", "token_logprobs", "tokens", "top_logprobs"),
        "UsageInfo": (
            *("prompt_tokens", "total_tokens", "completion_tokens", "prompt_tokens_details"),
        ),
    }
)
#: Methods that make, change and encode a model.
_METHODS = ("__init__", "__setattr__", "model_dump_json")
#: Attributes that pydantic sets as it builds or rebuilds a model.
_BUILT = (
    "model_config",
    "__pydantic_fields__",
    "__pydantic_decorators__",
    "__pydantic_serializer__",
)
#: Decorated functions that change what is encoded.
_DECORATORS = (
    *("computed_fields", "field_serializers", "field_validators", "model_serializers"),
    *("root_validators", "validators"),
)


def all_upstreams(names: Mapping[str, Any], models: Iterable[str]) -> bool:
    """Return whether all models, by their names in a namespace, are upstream's, unchanged."""
    return all(map(_is_pydantics, _METHODS)) and all(
        _is_upstreams(names.get(model), model) for model in models
    )


def watched(
    names: Mapping[str, Any], models: Iterable[str]
) -> Iterator[tuple[object, tuple[str, ...]]]:
    """Yield what :func:`all_upstreams` depends on: classes, and their attributes."""
    yield BaseModel, _METHODS
    for model in map(names.get, models):
        if isinstance(model, type):
            yield model, (*_METHODS, *_BUILT)


def _is_upstreams(model: object, name: str) -> bool:
    if not (isinstance(model, type) and issubclass(model, BaseModel) and originals.is_vllms(model)):
        return False
    bases = model.__mro__[: model.__mro__.index(BaseModel)]
    if any(method in vars(base) for base in bases for method in _METHODS):
        return False
    decorators = model.__pydantic_decorators__
    return (
        model.__name__ == name
        and tuple(model.model_fields) == _FIELDS[name]
        and model.model_config == {"extra": "allow"}
        and [*decorators.model_validators] == ["__log_extra_fields__"]
        and not any(getattr(decorators, kind) for kind in _DECORATORS)
    )


def _is_pydantics(method: str) -> bool:
    """Return whether a method of pydantic's base class is pydantic's own."""
    function = vars(BaseModel).get(method)
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and not hasattr(function, "__wrapped__")
        and code.co_qualname == f"BaseModel.{method}"
        and getattr(function, "__module__", None) == "pydantic.main"
    )
