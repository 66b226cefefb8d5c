"""Feature ``streamed-chunks``: encode only what changes from chunk to chunk of a stream.

Stock 0.22.0 makes, validates and serializes a tree of pydantic objects for each streamed chunk of
``/v1/chat/completions`` and ``/v1/completions``. Most of it is the same in each chunk. Here the
constant part is encoded once per stream, and the rest by pydantic's serializer without its models.
Clients get the same bytes.

Upstream's generators keep the order of events. Their seams only make other objects: a delta, the
logprobs, a choice, the usage and a chunk. Unknown classes, functions and values fall back to
upstream's.
"""

# mirrors: vllm.entrypoints.openai.utils:maybe_filter_parallel_tool_calls

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from pydantic_core import PydanticSerializationError
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import gauges, originals, switch
from vllm.v1.readiness.frontend import chunk_logprobs, response_models
from vllm.v1.readiness.frontend.chunk_logprobs import UnusualValueError

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion


class Mirrored(NamedTuple):
    """Upstream's functions and models that the encoder of a serving class stands for or calls."""

    methods: tuple[str, ...]  #: Of the serving class.
    functions: tuple[str, ...]  #: Of the generator's module.
    #: Names in the generator's module; first those that :class:`Makers` stand for.
    models: tuple[str, ...]


_CHAT = Mirrored(
    (
        *("_create_chat_logprobs", "_get_decoded_token", "_get_top_logprobs"),
        "_should_check_for_unstreamed_tool_arg_tokens",
    ),
    ("maybe_filter_parallel_tool_calls",),
    (
        *("DeltaMessage", "ChatCompletionResponseStreamChoice", "ChatCompletionStreamResponse"),
        *("UsageInfo", "ChatCompletionLogProb", "ChatCompletionLogProbsContent"),
        "ChatCompletionLogProbs",
    ),
)
_COMPLETION = Mirrored(
    ("_create_completion_logprobs", "_get_decoded_token"),
    (),
    (
        *("CompletionResponseStreamChoice", "CompletionStreamResponse", "UsageInfo"),
        "CompletionLogProbs",
    ),
)
#: JSON of None.
_NULL = "null"
#: What is watched for each serving object, and why its streams fall back.
_known: WeakKeyDictionary[object, tuple[originals.Watch, str]] = WeakKeyDictionary()


class Makers(NamedTuple):
    """Factories of the parts of a chunk, which a generator calls."""

    delta: Callable[..., Any]
    choice: Callable[..., Any]
    chunk: Callable[..., Any]
    usage: Callable[..., Any]
    logprobs: Callable[..., Any]


@dataclass(slots=True, eq=False)
class Delta:
    """A delta that has only content, with the attributes of upstream's ``DeltaMessage``."""

    content: str
    reasoning: ClassVar[None] = None
    tool_calls: ClassVar[tuple[()]] = ()


@dataclass(slots=True, eq=False)
class Logprobs:
    """The logprobs of a choice."""

    json: str  #: The encoded logprobs.
    model: Callable[[], Any]  #: Makes upstream's object.


class Usage:
    """The token counts of a chunk, encoded."""

    __slots__ = ("json",)

    def __init__(self, *, prompt_tokens: int, completion_tokens: int, total_tokens: int) -> None:
        self.json = (
            f'{{"prompt_tokens":{prompt_tokens},"total_tokens":{total_tokens},'
            f'"completion_tokens":{completion_tokens}}}'
        )


@dataclass(slots=True, eq=False)
class Choice:
    """A choice, encoded."""

    json: str
    finish_reason: str | None


class Chunk:
    """A chunk with one choice.

    Attributes:
        usage, system_fingerprint: None unless the generator sets them.
    """

    __slots__ = ("_begin", "_choice", "system_fingerprint", "usage")

    def __init__(self, begin: str, choice: Choice) -> None:
        self._begin, self._choice = begin, choice
        self.usage: Usage | None = None
        self.system_fingerprint: str | None = None

    def model_dump_json(self, *, exclude_unset: bool) -> str:
        """Return the JSON of the fields that upstream sets."""
        assert exclude_unset
        end = "" if self.usage is None else f',"usage":{self.usage.json}'
        if self.system_fingerprint is not None:
            end += f',"system_fingerprint":{_string(self.system_fingerprint)}'
        return f"{self._begin}{self._choice.json}]{end}}}"


class Stream:
    """Makes the parts of one stream's chunks.

    Args:
        upstream: makes upstream's parts.
        as_ids: whether to show tokens by their ids if the request does not say.
        constant: fields that precede the choices in each chunk.

    Raises:
        UnusualValueError: a field is neither a string nor a whole number.
        PydanticSerializationError, UnicodeError: pydantic cannot encode a string.
    """

    __slots__ = ("_as_ids", "_begin", "_is_encoded", "_upstream")

    def __init__(self, upstream: Makers, as_ids: bool, constant: Mapping[str, object]) -> None:
        self._upstream, self._as_ids = upstream, as_ids
        self._is_encoded = False  # the newest chunk
        fields = (f"{_word(name)}:{_word(value)}" for name, value in constant.items())
        self._begin = f'{{{",".join(fields)},"choices":['

    def chunk(self, **fields: Any) -> Any:  # noqa: ANN401
        """Return a chunk with one choice."""
        (choice,) = fields["choices"]
        self._is_encoded = type(choice) is Choice
        return Chunk(self._begin, choice) if self._is_encoded else self._upstream.chunk(**fields)

    def usage(self, **fields: int) -> Any:  # noqa: ANN401
        """Return the usage of the newest chunk."""
        return Usage(**fields) if self._is_encoded else self._upstream.usage(**fields)

    def chat_choice(self, **fields: Any) -> Any:  # noqa: ANN401
        """Return a choice of a chat; upstream's for tool calls and unexpected values."""
        delta, reason = fields["delta"], fields["finish_reason"]
        try:
            json = (
                f'{{"index":{_integer(fields["index"])},"delta":{self._delta(delta)},'
                f'"logprobs":{_logprobs(fields["logprobs"])},"finish_reason":{_word(reason)}'
            )
            if "stop_reason" in fields:
                json += f',"stop_reason":{_word(fields["stop_reason"])}'
            json += f',"token_ids":{_tokens(fields["token_ids"])}}}'
        except Exception:  # upstream raises its own error, or makes the choice
            if type(delta) is Delta:
                fields["delta"] = self._upstream.delta(content=delta.content)
            return self._upstreams_choice(fields)
        return Choice(json, reason)

    def completion_choice(self, **fields: Any) -> Any:  # noqa: ANN401
        """Return a choice of a completion; upstream's for unexpected values."""
        reason = fields["finish_reason"]
        try:
            json = (
                f'{{"index":{_integer(fields["index"])},"text":{_string(fields["text"])},'
                f'"logprobs":{_logprobs(fields["logprobs"])},"finish_reason":{_word(reason)},'
                f'"stop_reason":{_word(fields["stop_reason"])},'
                f'"prompt_token_ids":{_tokens(fields["prompt_token_ids"])},'
                f'"token_ids":{_tokens(fields["token_ids"])}}}'
            )
        except Exception:  # upstream raises its own error, or makes the choice
            return self._upstreams_choice(fields)
        return Choice(json, reason)

    def chat_logprobs(self, **fields: Any) -> Any:  # noqa: ANN401
        """Return the logprobs of a choice of a chat."""
        return self._encoded(chunk_logprobs.chat, fields)

    def completion_logprobs(self, **fields: Any) -> Any:  # noqa: ANN401
        """Return the logprobs of a choice of a completion."""
        return self._encoded(chunk_logprobs.completion, fields, fields["initial_text_offset"])

    def _encoded(self, encode: Callable[..., str], fields: dict[str, Any], *own: object) -> Any:  # noqa: ANN401
        as_ids = fields["return_as_token_id"]
        try:
            json = encode(
                fields["token_ids"],
                fields["top_logprobs"],
                fields["tokenizer"],
                fields["num_output_top_logprobs"],
                self._as_ids if as_ids is None else as_ids,
                *own,
            )
        except Exception:  # upstream raises its own error, or makes the logprobs
            return self._upstream.logprobs(**fields)
        return Logprobs(json, partial(self._upstream.logprobs, **fields))

    def _delta(self, delta: Any) -> str:  # noqa: ANN401
        if type(delta) is Delta:
            return f'{{"content":{_string(delta.content)}}}'
        if type(delta) is not self._upstream.delta or delta.tool_calls:
            raise UnusualValueError
        return str(delta.model_dump_json(exclude_unset=True))

    def _upstreams_choice(self, fields: dict[str, Any]) -> Any:  # noqa: ANN401
        if type(fields["logprobs"]) is Logprobs:
            fields["logprobs"] = fields["logprobs"].model()
        return self._upstream.choice(**fields)


def chat(
    serving: "OpenAIServingChat",
    request: "ChatCompletionRequest",
    request_id: str,
    created: int,
    model: str,
    names: Mapping[str, Any],
) -> Makers:
    """Return what makes the parts of a chat stream's chunks.

    ``request_id``, ``created`` and ``model`` are fields of each chunk; ``names`` is the generator's
    namespace.
    """
    delta, choice, chunk, usage = map(names.__getitem__, _CHAT.models[:4])
    upstream = Makers(delta, choice, chunk, usage, serving._create_chat_logprobs)
    if registry.STREAMED_CHUNKS not in switch.enabled():
        return upstream
    unusual = (
        getattr(serving, "use_harmony", False)
        or getattr(request, "_grammar_from_tool_parser", False)
        or (getattr(serving, "enable_log_outputs", False) and serving.request_logger)
    )
    reason = gauges.OTHER_INPUT if unusual else _reason(serving, _CHAT, names)
    constant = {"id": request_id, "object": "chat.completion.chunk", "created": created}
    stream = _stream(upstream, serving, reason, {**constant, "model": model})
    if stream is None:
        return upstream
    return Makers(Delta, stream.chat_choice, stream.chunk, stream.usage, stream.chat_logprobs)


def completion(
    serving: "OpenAIServingCompletion",
    request_id: str,
    created: int,
    model: str,
    names: Mapping[str, Any],
) -> Makers:
    """Return what makes the parts of a completion stream's chunks; see :func:`chat`."""
    choice, chunk, usage = map(names.__getitem__, _COMPLETION.models[:3])
    upstream = Makers(Delta, choice, chunk, usage, serving._create_completion_logprobs)
    if registry.STREAMED_CHUNKS not in switch.enabled():
        return upstream
    reason = _reason(serving, _COMPLETION, names)
    constant = {"id": request_id, "object": "text_completion", "created": created}
    stream = _stream(upstream, serving, reason, {**constant, "model": model})
    if stream is None:
        return upstream
    return Makers(
        Delta, stream.completion_choice, stream.chunk, stream.usage, stream.completion_logprobs
    )


def _stream(
    upstream: Makers, serving: object, reason: str, constant: dict[str, object]
) -> Stream | None:
    """Return the encoder of a stream; None, and count it, if it falls back for a reason."""
    if not reason:
        as_ids = getattr(serving, "return_tokens_as_token_ids", False)
        try:
            return Stream(upstream, as_ids, constant)
        except (UnusualValueError, PydanticSerializationError, UnicodeError):
            reason = gauges.OTHER_INPUT
    gauges.fall_back(registry.STREAMED_CHUNKS, reason)
    return None


def _reason(serving: object, mirrored: Mirrored, names: Mapping[str, Any]) -> str:
    """Return why a stream falls back to upstream; empty if it does not."""
    if not originals.is_vllms(type(serving)):
        return gauges.OTHER_CLASS
    known = _known.get(serving)
    if known is None or known[0].changed():
        owners: list[tuple[object, Sequence[str]]] = [
            (serving, mirrored.methods),
            (names, (*mirrored.functions, *mirrored.models)),
            *response_models.watched(names, mirrored.models),
        ]
        watch = originals.Watch(owners)
        same = (
            originals.all_vllms(serving, mirrored.methods)
            and originals.all_vllms(names, mirrored.functions)
            and response_models.all_upstreams(names, mirrored.models)
        )
        known = _known[serving] = watch, "" if same else gauges.REPLACED
    return known[1]


def _logprobs(logprobs: object) -> str:
    if logprobs is None:
        return _NULL
    if type(logprobs) is not Logprobs:
        raise UnusualValueError
    return logprobs.json


def _string(text: object) -> str:
    if type(text) is not str:
        raise UnusualValueError
    return chunk_logprobs.encoded(text)


def _word(value: object) -> str:
    if value is None:
        return _NULL
    if type(value) not in (str, int):
        raise UnusualValueError
    return chunk_logprobs.encoded(value)


def _integer(value: object) -> str:
    if type(value) is not int:
        raise UnusualValueError
    return str(value)


def _tokens(token_ids: object) -> str:
    if token_ids is None:
        return _NULL
    if type(token_ids) is not list or not {*map(type, token_ids)} <= {int}:
        raise UnusualValueError
    return chunk_logprobs.encoded(token_ids)
