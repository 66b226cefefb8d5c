"""Streams of upstream's serving classes over outputs that a test makes, without an engine."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from hypothesis import strategies as st
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer

from support import texts

CHAT = "vllm/entrypoints/openai/chat_completion/serving.py"
COMPLETION = "vllm/entrypoints/openai/completion/serving.py"
VOCABULARY = 320
_MESSAGES = [{"role": "user", "content": 'Say "é"'}]


class Case(NamedTuple):
    """A stream: what its serving object has, its request, and the outputs of the engine.

    Attributes:
        serving: attributes that differ from those of a plain server.
        request: fields that differ from those of a plain request.
        outputs: of the engine. An exception is raised in its place.
        parsers: names of the reasoning parser and of the tool parser, or empty.
    """

    serving: dict[str, Any]
    request: dict[str, Any]
    outputs: Sequence[RequestOutput | Exception]
    parsers: tuple[str, str] = ("", "")


@cache
def tokenizer() -> Any:
    """Return the tokenizer of bytes."""
    with tempfile.TemporaryDirectory(prefix="words-") as folder:
        return get_tokenizer(str(texts.write_tokenizer(Path(folder), VOCABULARY)))


def serving(kind: Any, case: Case) -> Any:
    """Return an object of a serving class that serves a case's streams."""
    reasoning, tools = case.parsers
    parser = ParserManager.get_parser(
        tool_parser_name=tools or None,
        reasoning_parser_name=reasoning or None,
        enable_auto_tools=bool(tools),
    )
    made = kind.__new__(kind)
    fields = {
        "enable_auto_tools": bool(tools),
        "enable_force_include_usage": False,
        "enable_log_outputs": False,
        "enable_log_deltas": True,
        "enable_prompt_tokens_details": False,
        "parser_cls": parser,
        "request_logger": None,
        "response_role": "assistant",
        "return_tokens_as_token_ids": False,
        "system_fingerprint": None,
        "tool_call_id_type": "random",
        "tool_parser": parser.tool_parser_cls if parser else None,
        "use_harmony": False,
    }
    vars(made).update(fields | case.serving)
    return made


def chat(kind: type, case: Case) -> list[str]:
    """Return the stream that a serving class makes of a case's outputs."""
    made = serving(kind, case)
    request = ChatCompletionRequest(
        **{"model": "m", "messages": _MESSAGES, "stream": True} | case.request
    )
    reasoning = None
    if case.parsers[0]:
        cls = ParserManager.get_reasoning_parser(case.parsers[0])
        assert cls is not None
        reasoning = cls(tokenizer())
    return _read(
        made.chat_completion_stream_generator(
            request,
            _each(case.outputs),
            'id"\N{LINE SEPARATOR}',
            "mödel",
            _MESSAGES,
            tokenizer(),
            RequestResponseMetadata(request_id="id"),
            reasoning,
        )
    )


def completion(kind: type, case: Case, prompts: int = 1) -> list[str]:
    """Return the stream of a serving class for a case's outputs, interleaved by prompt."""
    made = serving(kind, case)
    request = CompletionRequest(
        **{"model": "m", "prompt": "p", "stream": True, "max_tokens": 16} | case.request
    )

    async def numbered() -> AsyncIterator[tuple[int, RequestOutput]]:
        number = 0
        async for output in _each(case.outputs):
            yield number % prompts, output
            number += 1

    return _read(
        made.completion_stream_generator(
            request,
            [{"type": "token", "prompt_token_ids": [1], "prompt": "p"}] * prompts,
            numbered(),
            'id"\N{LINE SEPARATOR}',
            1_700_000_000,
            "mödel",
            num_prompts=prompts,
            tokenizer=tokenizer(),
            request_metadata=RequestResponseMetadata(request_id="id"),
        )
    )


async def _each(outputs: Sequence[RequestOutput | Exception]) -> AsyncIterator[RequestOutput]:
    for output in outputs:
        if isinstance(output, Exception):
            raise output
        yield output


def _read(stream: AsyncIterator[str]) -> list[str]:
    """Read a stream with the clock stopped and ids fixed, and log no errors of it."""

    async def read() -> list[str]:
        return [chunk async for chunk in stream]

    clock = mock.patch("time.time", lambda: 1_700_000_000.5)
    ids = mock.patch("vllm.entrypoints.chat_utils.random_uuid", lambda: "random")
    logging.disable(logging.CRITICAL)
    try:
        with clock, ids:
            return asyncio.run(read())
    finally:
        logging.disable(logging.NOTSET)


#: Texts that are hard to encode, of whole and of split code points.
TEXTS = st.text(max_size=6) | st.sampled_from(
    [
        *texts.WORDS,
        *texts.MARKERS,
        *("", "\x00\x1f\x7f", '\\"/', "\ufeff", "\U0010ffff", "token_id:5", "e\u0301"),
    ]
)
#: Texts of which pydantic refuses the last.
ALL_TEXTS = TEXTS | st.sampled_from(["\ud800"])
LOGPROBS = st.floats(max_value=0.0) | st.sampled_from(
    [
        *(float("-inf"), float("nan"), -0.0, -9999.0, -9999.000001, -1e-320, -1e22, 0.0, -1e-7),
        *(-5e16, -1, np.float64(-1.5)),
    ]
)
TOKENS = st.integers(0, VOCABULARY - 1)
REASONS = st.sampled_from([None, None, None, "stop", "length", "abort", "error", "é"])
STOPS = st.sampled_from([None, 0, 7, 2**40, "", 'st"op', "\u2028", True, np.float64(7.0)])


@st.composite
def positions(draw: Any, token: int) -> dict[int, Logprob] | None:
    """The logprobs of one position: with or without the token's own, or none."""
    if not draw(st.integers(0, 9)):
        return None
    tops = draw(st.lists(TOKENS, max_size=4))
    ids = [token, *tops] if draw(st.integers(0, 9)) else tops
    decoded = st.none() | TEXTS if not draw(st.integers(0, 4)) else TEXTS
    return {id_: Logprob(draw(LOGPROBS), 1, draw(decoded)) for id_ in ids}


@st.composite
def outputs(draw: Any, choices: int, logprobs: bool) -> list[RequestOutput | Exception]:
    """Outputs and errors of an engine for a request with some choices."""
    made: list[RequestOutput | Exception] = []
    text = ALL_TEXTS if not draw(st.integers(0, 4)) else TEXTS
    for number in range(draw(st.integers(0, 5))):
        parts = []
        for index in draw(st.lists(st.integers(0, choices - 1), max_size=choices, unique=True)):
            tokens = draw(st.lists(TOKENS, max_size=3))
            shown = [draw(positions(token)) for token in tokens] if logprobs else None
            # Values that pydantic converts or refuses, and fewer logprobs than tokens.
            ids = draw(st.sampled_from([*[tokens] * 7, (*tokens,), [True], [1.5], [*tokens, 5]]))
            reason = draw(REASONS)
            stop = draw(STOPS) if reason else None
            parts.append(
                CompletionOutput(
                    index, draw(text), ids, 0.0, shown, finish_reason=reason, stop_reason=stop
                )
            )
        first = not number or not draw(st.integers(0, 4))
        prompt = draw(st.lists(TOKENS, min_size=1, max_size=4))
        made.append(
            RequestOutput(
                "r",
                draw(st.none() | TEXTS),
                prompt if first else None,
                [None, *(draw(positions(token)) for token in prompt[1:])] if logprobs else None,
                parts,
                False,
                num_cached_tokens=draw(st.sampled_from([None, 0, 3])),
            )
        )
    if not draw(st.integers(0, 7)):
        made.append(draw(st.sampled_from([ValueError("é"), RuntimeError("x"), KeyError("k")])))
    return made


#: Fields that both kinds of request have.
_SHARED: dict[str, Any] = {
    "echo": st.booleans(),
    "n": st.integers(1, 3),
    "return_token_ids": st.none() | st.booleans(),
    "return_tokens_as_token_ids": st.none() | st.booleans(),
    "stream_options": st.none()
    | st.fixed_dictionaries(
        {"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
}
_SERVING = st.fixed_dictionaries(
    {},
    optional={
        "enable_force_include_usage": st.booleans(),
        "enable_prompt_tokens_details": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "system_fingerprint": st.none() | st.sampled_from(["fp", 'f"é\u2028']),
    },
)


@st.composite
def chats(draw: Any) -> Case:
    """Streams of chats, with parsers or without."""
    request = draw(
        st.fixed_dictionaries(_SHARED | {"return_prompt_text": st.none() | st.booleans()})
    )
    logprobs = draw(st.booleans())
    if logprobs:
        request |= {"logprobs": True, "top_logprobs": draw(st.sampled_from([0, 1, 2, 20, -1]))}
    parsers = draw(st.sampled_from([("", ""), ("", ""), ("deepseek_r1", ""), ("", "hermes")]))
    if parsers[1]:
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        request |= {"tools": [tool], "parallel_tool_calls": draw(st.booleans())}
    made = draw(outputs(request["n"], logprobs))
    return Case(draw(_SERVING), request, made, parsers)


@st.composite
def completions(draw: Any) -> Case:
    """Streams of completions."""
    request = draw(st.fixed_dictionaries(_SHARED | {"max_tokens": st.sampled_from([0, 16])}))
    logprobs = draw(st.booleans())
    if logprobs:
        request["logprobs"] = draw(st.sampled_from([0, 1, 2, 5]))
    return Case(draw(_SERVING), request, draw(outputs(request["n"], logprobs)))
