"""Streams of real servers, stock and overlaid: the same bytes, but for ids and times.

If a server is slower than its engine, it merges the tokens of several steps in a chunk. So steps
are slow, and a stream is asked for again until it is as expected, a few times.
"""

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support import checkpoint, texts
from support.asynchronous import announce
from support.engine import Engine
from support.server import Server
from support.stream_plugins import FAILS, failing, replacing

pytestmark = pytest.mark.slow

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
#: Options of a server with a parser, and what it makes of some replies.
PARSERS = [
    (["--reasoning-parser", "deepseek_r1"], b'"reasoning":'),
    (["--enable-auto-tool-choice", "--tool-call-parser", "hermes"], b'"tool_calls":'),
]
#: How often a stream is asked for.
TRIES = 8
_CHANGING = re.compile(rb'"created":\d+|"id":"chatcmpl-tool-[0-9a-f]+"')
_USAGE = {"include_usage": True, "continuous_usage_stats": True}
#: Tokens of markers, of JSON and of code points' parts.
_MARKERS = [*range(256 + len(texts.WORDS), 256 + len(texts.WORDS) + len(texts.MARKERS))]
_PARTS = {"allowed_token_ids": [34, 92, 123, 125, 58, 195, 169, 240, 159, *_MARKERS]}
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["é", 1]}},
    "required": ["a"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_CALLED = 'hm<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
#: Requests whose replies have tool calls.
CALLS: list[dict[str, Any]] = [
    {"tool_choice": "required", "logprobs": True, "top_logprobs": 2},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"structured_outputs": {"choice": [_CALLED]}, "return_token_ids": True},
    {"structured_outputs": {"choice": [_CALLED]}, "parallel_tool_calls": False},
]

Body = dict[str, Any]


def bodies() -> Iterator[tuple[str, Body]]:
    """Yield paths and fields of requests."""
    options: list[Body] = [
        {},
        {"n": 3, "seed": 5, "temperature": 1.0},
        {"stream_options": {"include_usage": True}},
        {"stream_options": _USAGE, "n": 2, "seed": 6, "temperature": 1.0},
        {"return_token_ids": True},
        {"return_tokens_as_token_ids": True, "logprobs": 3},
        {"logprobs": 0},
        {"logprobs": 5, "stream_options": _USAGE, "return_token_ids": True},
        {"logprobs": 2, "echo": True},
        {"echo": True, "return_token_ids": True},
        {"stop": ["é", "1", '"'], "include_stop_str_in_output": True},
        {"stop_token_ids": [*range(300, 900, 3)], "logprobs": 1},
        {"min_tokens": 3, "logit_bias": {"2": 50}},
        {"seed": 1, "temperature": 2.0, "logprobs": 4, **_PARTS},
        {"max_tokens": 1},
    ]
    for fields in options:
        yield COMPLETION, fields
        chat = dict(fields)
        if "logprobs" in chat:
            chat |= {"logprobs": True, "top_logprobs": chat["logprobs"]}
        yield CHAT, chat
    yield CHAT, {"logprobs": True, "top_logprobs": -1, "max_tokens": 2}
    yield CHAT, {"return_prompt_text": True}
    yield COMPLETION, {"prompt": ["é", "\N{LINE SEPARATOR}", "<think>"], "seed": 3}


def asked(server: Server, path: str, fields: Body, request_id: str) -> httpx.Response:
    """Return a streamed reply."""
    prompt = {"prompt": 'Say "é"'} if path == COMPLETION else {"messages": [_message()]}
    body = {"model": "m", "stream": True, "max_tokens": 12, "seed": 9, **prompt, **fields}
    with httpx.Client(trust_env=False, timeout=120) as client:
        return client.post(
            f"http://127.0.0.1:{server.port}{path}", json=body, headers={"X-Request-Id": request_id}
        )


def stream(server: Server, path: str, fields: Body, request_id: str = "id") -> list[bytes]:
    """Return the events of a streamed reply, without what differs from run to run."""
    reply = asked(server, path, fields, request_id)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8", reply.text
    assert reply.content.endswith(b"data: [DONE]\n\n")
    events = _CHANGING.sub(b"", reply.content).split(b"\n\n")
    # The outputs of a step's sequences come in any order.
    several = fields.get("n", 1) > 1 or isinstance(fields.get("prompt"), list)
    return sorted(events) if several else events


def expected(get: Callable[[], Any]) -> Any:
    """Return what comes twice in a row."""
    before = get()
    for _ in range(TRIES):
        found = get()
        if found == before:
            return found
        before = found
    raise AssertionError(f"no two streams are the same: {before}, {found}")


def repeated(get: Callable[[], Any], wanted: object) -> Any:
    """Return ``wanted`` if it comes at all, else what comes instead."""
    for _ in range(TRIES):
        found = get()
        if found == wanted:
            break
    return found


@contextmanager
def serving(
    engine: Engine,
    folder: Path,
    arguments: list[str],
    plugin: Callable[[], None],
    switch: str = "on",
) -> Iterator[Server]:
    """Start a server with a tokenizer of bytes."""
    folder.mkdir()
    words = texts.write_tokenizer(folder.parent / "words", checkpoint.VOCABULARY)
    command = [*ARGUMENTS, "--tokenizer", str(words), "--served-model-name", "m"]
    command += ["--max-logprobs", str(checkpoint.VOCABULARY), *arguments]
    plugins = [announce(folder / f"{plugin.__name__}-plugin", plugin)]
    model = checkpoint.generate(folder.parent / "model")
    server = Server(
        engine, folder / "server.log", model, command, plugins, {"VLLM_READINESS": switch}
    )
    with server.running():
        yield server


def clients_view(server: Server) -> list[str]:
    """Return what the official client reads of streams of all kinds."""
    url = f"http://127.0.0.1:{server.port}/v1"
    direct = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(base_url=url, api_key="none", http_client=direct)
    fields: Any = {"model": "m", "max_tokens": 9, "stream": True, "seed": 4}
    fields["stream_options"] = {"include_usage": True}
    read = [
        *client.chat.completions.create(
            messages=[_message()], logprobs=True, top_logprobs=4, n=2, **fields
        ),
        *client.completions.create(prompt="é", logprobs=3, **fields),
    ]
    dumped = [event.model_dump_json(exclude={"id", "created"}) for event in read]
    return sorted(dumped)  # two sequences come in any order


def slowly(server: Server) -> tuple[str, list[str]]:
    """Return the text and the tokens of a stream that is read slowly by a small window."""
    body: Body = {"model": "m", "prompt": "é", "max_tokens": 200, "stream": True}
    body |= {"ignore_eos": True, "logprobs": 20, "seed": 9}
    data = json.dumps(body).encode()
    head = f"POST {COMPLETION} HTTP/1.0\r\nContent-Type: application/json\r\n"
    with socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(("127.0.0.1", server.port))
        line.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(3)  # the engine has finished, and the server waits for the client
        received = b""
        while part := line.recv(2048):
            received += part
    text, tokens = "", []
    for event in received.decode().split("\n\n"):
        _, _, shown = event.partition("data: {")
        if shown:
            (choice,) = json.loads("{" + shown)["choices"]
            text += choice["text"]
            tokens += choice["logprobs"]["tokens"]
    return text, tokens


def leave(server: Server) -> None:
    """Leave in the middle of a stream, and wait until the engine has dropped the request."""
    fields = {"max_tokens": 240, "ignore_eos": True, "logprobs": 20}
    body = {"model": "m", "prompt": "é", "stream": True, **fields}
    url = f"http://127.0.0.1:{server.port}{COMPLETION}"
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", url, json=body) as reply,
    ):
        for number, _ in enumerate(reply.iter_lines()):
            if number > 4:
                break
    deadline = time.monotonic() + 60
    while 'num_requests_running{engine="0",model_name="m"} 0.0' not in server.ask("/metrics"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def fallbacks(server: Server) -> list[str]:
    """Return the reasons of fallbacks of the feature on /metrics."""
    page = server.ask("/metrics")
    lines = [line for line in page.splitlines() if "readiness_fallbacks_total{" in line]
    return [line for line in lines if 'feature="streamed-chunks"' in line]


def _message() -> Any:
    return {"role": "user", "content": 'Say "é"\N{LINE SEPARATOR}'}


def test_streams_are_stocks(folder: Path, stock: Engine, overlaid: Engine) -> None:
    root = folder / "streams"
    root.mkdir()
    with serving(stock, root / "stock", [], failing) as server:
        wanted = [expected(partial(stream, server, path, fields)) for path, fields in bodies()]
        failed = [expected(partial(stream, server, path, {}, FAILS)) for path in (CHAT, COMPLETION)]
        view = expected(partial(clients_view, server))
        slow = slowly(server)
        leave(server)
    assert all(b"failed" in body[-3] for body in failed)
    assert any(b"\\u0000" in event for body in wanted for event in body)
    for switch in ("-fixes", "-fixes,-streamed-chunks"):
        with serving(overlaid, root / switch, [], failing, switch) as server:
            for (path, fields), body in zip(bodies(), wanted, strict=True):
                found = repeated(partial(stream, server, path, fields), body)
                assert found == body, (path, fields)
            for path, body in zip((CHAT, COMPLETION), failed, strict=True):
                assert repeated(partial(stream, server, path, {}, FAILS), body) == body
            assert repeated(partial(clients_view, server), view) == view
            assert slowly(server) == slow
            leave(server)
            assert fallbacks(server) == []


@pytest.mark.parametrize(("arguments", "part"), PARSERS)
def test_streams_of_parsers_are_stocks(
    arguments: list[str], part: bytes, folder: Path, stock: Engine, overlaid: Engine
) -> None:
    root = folder / f"streams with {part[1:-2].decode()}"
    root.mkdir()
    chats = [fields for path, fields in bodies() if path == CHAT]
    if part == b'"tool_calls":':
        chats += [{"tools": [_TOOL], **_PARTS, "seed": n, "temperature": 2.0} for n in range(6)]
        chats += [{"tools": [_TOOL], "max_tokens": 120, **fields} for fields in CALLS]
    with serving(stock, root / "stock", arguments, failing) as server:
        wanted = [expected(partial(stream, server, CHAT, fields)) for fields in chats]
    assert any(part in event for events in wanted for event in events)
    with serving(overlaid, root / "overlaid", arguments, failing, "-fixes") as server:
        for fields, body in zip(chats, wanted, strict=True):
            found = repeated(partial(stream, server, CHAT, fields), body)
            assert found == body, fields
        assert fallbacks(server) == []


def test_a_replaced_function_is_called(folder: Path, overlaid: Engine) -> None:
    """Its fallbacks are counted on /metrics."""
    root = folder / "replaced function"
    root.mkdir()
    with serving(overlaid, root / "overlaid", [], replacing) as server:
        for _ in range(2):
            events = stream(server, CHAT, {"logprobs": True, "top_logprobs": 1})
            assert b'"token":"<' in events[1]
        stream(server, COMPLETION, {"logprobs": 1})
        (line,) = fallbacks(server)
        assert 'reason="a replaced function"' in line
        assert line.endswith(" 2.0")
