"""The feature streamed-chunks: each stream has the bytes of upstream's.

Upstream's own generators and the patched ones read the same outputs of an engine.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from pydantic import BaseModel
from support import streams
from support.examples import draws
from support.modules import overlaid, pristine
from support.streams import Case
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.frontend import chunks

NAME = "VLLM_READINESS"
WORD = "streamed-chunks"
KINDS: dict[str, tuple[Any, str, Callable[..., list[str]]]] = {
    "chat": (streams.CHAT, "OpenAIServingChat", streams.chat),
    "completion": (streams.COMPLETION, "OpenAIServingCompletion", streams.completion),
}


def run(side: Callable[[str], Any], kind: str, case: Case, **more: Any) -> list[str]:
    """Return a case's stream by the module of one side."""
    path, name, read = KINDS[kind]
    return read(getattr(side(path), name), case, **more)


def plain(*texts: str, logprobs: Any = None, serving: Any = None) -> Case:
    """Return a case of one token per text, the last of which ends the reply."""
    outputs: list[RequestOutput | Exception] = []
    for number, text in enumerate(texts):
        last = number == len(texts) - 1
        output = CompletionOutput(
            *(0, text, [number], 0.0, logprobs[number : number + 1] if logprobs else None),
            finish_reason="stop" if last else None,
            stop_reason="é" if last else None,
        )
        outputs.append(RequestOutput("r", "p", [1, 2], None, [output], last))
    return Case(serving or {}, {}, outputs)


def shown(kind: str, number: int) -> dict[str, Any]:
    """Return the fields of a request that ask for top logprobs."""
    return {"logprobs": True, "top_logprobs": number} if kind == "chat" else {"logprobs": number}


@pytest.fixture
def encoded() -> Iterator[Counter[str]]:
    """How many encoded chunks and logprobs are made."""
    counts: Counter[str] = Counter()

    def counting(kind: type) -> Any:
        original = kind.__init__  # type: ignore[misc]

        def made(self: Any, *args: Any, **named: Any) -> None:
            counts[kind.__name__] += 1
            original(self, *args, **named)

        return mock.patch.object(kind, "__init__", made)

    with counting(chunks.Chunk), counting(chunks.Logprobs):
        yield counts


@given(case=streams.chats())
@draws(300, deadline=None)
def test_chats_are_upstreams(case: Case) -> None:
    assert run(overlaid, "chat", case) == run(pristine, "chat", case)


@given(case=streams.completions())
@draws(200, deadline=None)
def test_completions_are_upstreams(case: Case) -> None:
    for prompts in (1, 2):
        ours = run(overlaid, "completion", case, prompts=prompts)
        assert ours == run(pristine, "completion", case, prompts=prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_encodes_each_chunk(
    kind: str, encoded: Counter[str], fallbacks: dict[tuple[str, str], int]
) -> None:
    logprobs = [{token: Logprob(-1.5, 1, "é"), 9: Logprob(-2.5, 2, "x")} for token in range(3)]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    case = plain("a", "é", "", logprobs=logprobs)
    case = case._replace(request={"stream_options": usage} | shown(kind, 2))
    assert run(overlaid, kind, case) == run(pristine, kind, case)
    assert encoded == {"Chunk": 3, "Logprobs": 3}
    assert not fallbacks


@pytest.mark.parametrize("value", ["off", "-streamed-chunks", "fixes", "logprobs"])
@pytest.mark.parametrize("kind", KINDS)
def test_off_is_upstreams(
    kind: str, value: str, encoded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, value)
    case = plain("a", "é")
    assert run(overlaid, kind, case) == run(pristine, kind, case)
    assert not encoded


def replaced_model(module: Any, name: str, home: str) -> Any:
    """Replace a model by one with another field, defined in module ``home``."""
    fields = {"__annotations__": {"more": int}, "more": 7, "__module__": home}
    return mock.patch.object(module, name, type(name, (getattr(module, name),), fields))


def wrapped(owner: Any, name: str) -> Any:
    """Replace a function by one that calls it, as plugins do."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def function(*args: Any, **named: Any) -> Any:
        return original(*args, **named)

    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    return mock.patch.object(owner, name, staticmethod(function) if is_static else function)


def replacements(kind: str, module: Any) -> list[Any]:
    """Return what replaces each thing that the feature does not call."""
    cls = getattr(module, KINDS[kind][1])
    mirrored = chunks._CHAT if kind == "chat" else chunks._COMPLETION
    return [
        *(wrapped(cls, name) for name in mirrored.methods),
        *(wrapped(module, name) for name in mirrored.functions),
        *(replaced_model(module, name, "plugin") for name in mirrored.models),
        *(replaced_model(module, name, "vllm.plugin") for name in mirrored.models),
        *(wrapped(getattr(module, name), "model_dump_json") for name in mirrored.models[:1]),
        wrapped(BaseModel, "model_dump_json"),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_parts_are_used(
    kind: str, encoded: Counter[str], fallbacks: dict[tuple[str, str], int]
) -> None:
    modules = overlaid(KINDS[kind][0]), pristine(KINDS[kind][0])
    ours, theirs = (replacements(kind, module) for module in modules)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True), 1):
        case = plain("a", "é", logprobs=[{0: Logprob(-1.0, 1, "a")}, {1: Logprob(-2.0, 1, "b")}])
        case = case._replace(request=shown(kind, 1))
        with our:
            stream = run(overlaid, kind, case)
        with their:
            assert stream == run(pristine, kind, case)
        assert fallbacks == {(WORD, gauges.REPLACED): number}
    assert not encoded


@pytest.mark.parametrize("kind", KINDS)
def test_subclasses_are_upstreams(
    kind: str, encoded: Counter[str], fallbacks: dict[tuple[str, str], int]
) -> None:
    path, name, read = KINDS[kind]
    derived = type("Derived", (getattr(overlaid(path), name),), {"__module__": "plugin"})
    assert read(derived, plain("a")) == run(pristine, kind, plain("a"))
    assert fallbacks == {(WORD, gauges.OTHER_CLASS): 1}
    assert not encoded


def test_logged_outputs_are_upstreams(
    encoded: Counter[str], fallbacks: dict[tuple[str, str], int]
) -> None:
    logger = mock.Mock()
    case = plain("a", "b", serving={"enable_log_outputs": True, "request_logger": logger})
    assert run(overlaid, "chat", case) == run(pristine, "chat", case)
    calls = logger.log_outputs.call_args_list
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]
    assert fallbacks == {(WORD, gauges.OTHER_INPUT): 1}
    assert not encoded


def test_harmony_is_upstreams(encoded: Counter[str], fallbacks: dict[tuple[str, str], int]) -> None:
    parser = mock.Mock(current_recipient=None, last_content_delta="a", current_channel="final")
    case = plain("a", "b", serving={"use_harmony": True})
    with ExitStack() as stack:
        for side in (overlaid, pristine):
            name = "get_streamable_parser_for_assistant"
            stack.enter_context(mock.patch.object(side(streams.CHAT), name, lambda: parser))
        assert run(overlaid, "chat", case) == run(pristine, "chat", case)
    assert fallbacks == {(WORD, gauges.OTHER_INPUT): 1}
    assert not encoded


def test_replacements_are_seen_between_two_streams_of_a_server(
    fallbacks: dict[tuple[str, str], int],
) -> None:
    """The server lacks what its constructor sets."""
    module = overlaid(streams.COMPLETION)
    kind = module.OpenAIServingCompletion
    serving = kind.__new__(kind)

    def is_encoded() -> bool:
        makers = chunks.completion(serving, "id", 1, "m", vars(module))
        return isinstance(getattr(makers.usage, "__self__", None), chunks.Stream)

    chunk = module.CompletionStreamResponse
    fields = {**chunk.model_fields, "more": chunk.model_fields["usage"]}
    own = functools.partial(kind._get_decoded_token, serving)
    rebuilt = [
        mock.patch.object(chunk, "__pydantic_fields__", fields),
        mock.patch.object(chunk, "model_config", {"extra": "allow", "frozen": True}),
        mock.patch.object(chunk, "__setattr__", lambda *_: None),
        mock.patch.object(serving, "_get_decoded_token", own, create=True),
    ]
    for number, replaced in enumerate([*replacements("completion", module), *rebuilt], 1):
        assert is_encoded()
        with replaced:
            assert not is_encoded()
            assert not is_encoded()
        assert fallbacks == {(WORD, gauges.REPLACED): 2 * number}
    assert is_encoded()
