"""Engines behind vLLM's Rust front end: its real binary, over stock and overlaid engine cores."""

import json
import platform
import re
import socket
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import rust
from support.checkpoint import VOCABULARY
from support.clients import BEYOND_BOUNDS
from support.engine import PATIENCE, Engine
from support.server import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the binary is for x86-64"),
]

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
GREEDY: dict[str, Any] = {"model": "m", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SAID = {"messages": [{"role": "user", "content": "Hello"}]}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
TOP = {"logprobs": True, "top_logprobs": 3}

Body = dict[str, Any]


def completion(**fields: Any) -> tuple[str, Body]:
    return COMPLETIONS, {**GREEDY, "prompt": "Hello", **fields}


def chat(**fields: Any) -> tuple[str, Body]:
    return CHAT, {**GREEDY, **SAID, **fields}


def generate(tokens: list[int], **params: Any) -> tuple[str, Body]:
    return GENERATE, {"model": "m", "token_ids": tokens, "sampling_params": {**GREEDY, **params}}


REQUESTS: dict[str, tuple[str, Body]] = {
    "plain": completion(),
    "logprobs": completion(logprobs=3),
    "prompt logprobs": completion(prompt_logprobs=2),
    "presence penalty": completion(presence_penalty=1.5),
    "seed": completion(temperature=1.0, seed=7),
    "stop string": completion(stop=["7"]),
    "bad words": completion(bad_words=["7"]),
    "bias": completion(logit_bias={"300": 9.0}),
    "tokens": generate(list(range(10, 70)), logprobs=2, prompt_logprobs=1),
    "bad words of tokens": generate([75, 104], bad_words=["s", "g"], logprobs=2),
    "no bad words": generate([75, 104], logprobs=2),
    "chat with logprobs": chat(**TOP),
    "streamed completion": completion(**STREAM, logprobs=2),
    "streamed chat": chat(**STREAM, **TOP),
    "streamed chat with a stop string": chat(**STREAM, stop=["7"]),
    "several": completion(n=2),
}
#: Requests that the Python front end refuses; tests/readiness/test_unchecked_requests.py has more.
BAD: dict[str, tuple[str, Body]] = {
    "min_tokens beyond max_tokens": completion(min_tokens=99),
    "a negative temperature": completion(temperature=-1),
    "a token behind it, as tokens": generate([VOCABULARY + 5]),
    "more logprobs than tokens": completion(logprobs=VOCABULARY + 9),
    "an invalid regex": completion(structured_outputs={"regex": "(t1|"}),
    **{
        f"a grammar beyond {variable}": completion(structured_outputs=grammar)
        for grammar, variable in BEYOND_BOUNDS
    },
}
#: Requests for structured outputs, and a regex of the reply.
GRAMMARS: dict[str, tuple[tuple[str, Body], str]] = {
    "choice": (completion(structured_outputs={"choice": ["yes", "no"]}), "yes|no"),
    "regex": (completion(structured_outputs={"regex": "[ab]{3}c"}), "[ab]{3}c"),
    "schema": (
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "boolean"}},
            }
        ),
        "true|false",
    ),
    "grammar": (completion(structured_outputs={"grammar": 'root ::= "a" "b"'}), "ab"),
}


class Side:
    """Replies, metrics and log of one side's servers.

    Attributes:
        replies: by request; see :func:`reply`.
        metrics: the families of /metrics.
        log: of the server.
    """

    def __init__(self, server: Server) -> None:
        self.replies = {name: reply(server, *request) for name, request in REQUESTS.items()}
        self.metrics = {each.name for each in text_string_to_metric_families(page(server))}
        self.log = server.log


def reply(server: Server, path: str, body: Body, patience: float = PATIENCE) -> str:
    """A reply's bytes without ids and times, with maps by token in order; or its error."""
    try:
        text = server.ask(path, body, patience)
    except urllib.error.HTTPError as error:
        text = f"{error.code} {error.read().decode()}"
    text = re.sub(r'"(id|request_id|created)":("[^"]*"|\d+)', r'"\1":0', text)
    # Only the maps of logprobs by token have numbers as values, or objects with a logprob.
    return re.sub(r'\{("(?:[^"\\]|\\.)*":(-?[\d.e-]+|\{"logprob[^{}]*\}),?)+\}', _in_order, text)


def _in_order(found: re.Match[str]) -> str:
    return json.dumps(json.loads(found[0]), sort_keys=True)


def page(server: Server) -> str:
    return server.ask("/metrics")


def leave(server: Server) -> None:
    """Begin a long streamed reply, and close the connection after its first token."""
    body = json.dumps({**completion(**STREAM)[1], "max_tokens": 500}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        seen = b""
        while b"data:" not in seen:
            seen += line.recv(1 << 16)


def wait_for(server: Server, text: str) -> None:
    """Wait until the log has a text."""
    deadline = time.monotonic() + 60
    while text not in server.log.read_text():
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def stock_side(folder: Path, stock: Engine) -> Side:
    """Stock's replies. Its engine core reads no request any more after the last one."""
    server = rust.server(stock, folder, "rust stock")
    try:
        server.wait()
        side = Side(server)
        for request, _ in GRAMMARS.values():
            assert reply(server, *request).startswith("500 ")
        with pytest.raises(OSError, match="timed out"):
            reply(server, *BAD["min_tokens beyond max_tokens"], patience=5)
        wait_for(server, "msgspec.ValidationError: min_tokens must be less than")
        return side
    finally:
        server.stop()


@pytest.fixture(scope="module")
def overlaid_server(folder: Path, overlaid: Engine) -> Iterator[Server]:
    """A server over an overlaid engine core."""
    server = rust.server(overlaid, folder, "rust overlaid")
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def overlaid_side(overlaid_server: Server) -> Side:
    return Side(overlaid_server)


def test_replies_are_stocks(stock_side: Side, overlaid_side: Side) -> None:
    for name in REQUESTS:
        assert overlaid_side.replies[name] == stock_side.replies[name], name
    assert "Only n=1 is supported" in stock_side.replies["several"]
    for name in [name for name in REQUESTS if name.startswith("streamed")]:
        assert stock_side.replies[name].endswith("data: [DONE]\n\n")
        assert '"total_tokens": ' in stock_side.replies[name]
    different = {name: stock_side.replies[name] for name in ("plain", "seed", "stop string")}
    assert len({*different.values()}) == len(different)


def test_the_engine_core_is_overlaid_and_the_metrics_are_stocks(
    stock_side: Side, overlaid_side: Side
) -> None:
    """The Rust front end has a page of its own, without the overlay's."""
    assert "Readiness overlay" in overlaid_side.log.read_text()
    assert "Readiness overlay" not in stock_side.log.read_text()
    assert overlaid_side.metrics == stock_side.metrics
    assert "vllm:generation_tokens" in stock_side.metrics


def test_bad_words_are_sent_with_tokens_alone(stock_side: Side) -> None:
    """/v1/completions ignores them, as docs/operations.md says."""
    assert stock_side.replies["bad words"] == stock_side.replies["plain"]
    assert stock_side.replies["bad words of tokens"] != stock_side.replies["no bad words"]


def test_a_client_that_leaves_is_not_served_on(overlaid_server: Server) -> None:
    before = reply(overlaid_server, *REQUESTS["plain"])
    deadline = time.monotonic() + PATIENCE
    while not re.search(r'"abort"} [1-9]', page(overlaid_server)):
        assert time.monotonic() < deadline
        leave(overlaid_server)
    assert reply(overlaid_server, *REQUESTS["plain"]) == before
    assert re.search(r"^vllm:num_requests_running\S* 0", page(overlaid_server), re.MULTILINE)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_reply_keeps_to_its_grammar(name: str, overlaid_server: Server) -> None:
    """Stock's, which name no backend, end with status 500."""
    (path, body), expected = GRAMMARS[name]
    (choice,) = json.loads(overlaid_server.ask(path, {**body, "ignore_eos": False}))["choices"]
    text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert re.fullmatch(expected, text), text


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_ends_alone(name: str, overlaid_server: Server) -> None:
    """It would end the engine, or the thread that reads requests."""
    path, body = BAD[name]
    said = reply(overlaid_server, path, body)
    refused = said.startswith("500 ") or '"finish_reason":"error"' in said
    assert refused, said
    assert '"finish_reason":"length"' in reply(overlaid_server, *REQUESTS["plain"], 60)


def test_a_prompt_from_the_cache_with_logprobs_can_be_read(overlaid_server: Server) -> None:
    """Stock gives uninitialised memory, and a rank below 1 in it ends the front end."""
    fields = {"prompt_logprobs": 1, "skip_reading_prefix_cache": False, "logprobs": None}
    prompt = list(range(70, 130))
    path, body = generate(prompt, **fields)
    whole, cached = (
        json.loads(overlaid_server.ask(path, body))["prompt_logprobs"] for _ in range(2)
    )
    assert whole[-11:] == cached[-11:]
    assert whole[1] != cached[1]
    assert [(token, one["logprob"]) for token, one in cached[1].items()] == [("0", -9999.0)]
