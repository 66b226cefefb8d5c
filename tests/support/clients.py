"""Two clients of one server: a hostile one, and an honest one who must not notice the other."""

import contextlib
import itertools
import json
import random
import socket
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import model

from support import thinking
from support.checkpoint import VOCABULARY, generate
from support.engine import Engine
from support.server import Server

REPLIES = 200
#: Requests that each client has at the server at a time.
AT_A_TIME = 6
#: A token in five.
STOPS = list(range(3, VOCABULARY, 5))

_TEXT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
#: The hostile client's grammars: complete before the tokens are, twice, and invalid.
_CHOICE, _SCHEMA, _INVALID = {"choice": ["t9"]}, {"json": _TEXT}, {"regex": "(t1|"}
#: Grammars beyond a bound, with its variable: one for the front end, and one for the engine core.
BEYOND_BOUNDS: list[tuple[dict[str, Any], str]] = [
    (
        {"json": '{"type":"object","properties":{"t":' * 450 + "{}" + "}}" * 450},
        "VLLM_READINESS_GRAMMAR_DEPTH",
    ),
    ({"regex": "((([a-z0-9]{1,100}){1,100}){1,100}){1,100}"}, "VLLM_READINESS_GRAMMAR_REPEATS"),
]


@dataclass(frozen=True)
class Request:
    """A prompt of tokens, and the fields of its sampling parameters."""

    prompt: list[int]
    params: dict[str, Any]


#: What the honest client asks for. All are greedy, or have a seed. None has a top-p: on a GPU vLLM
#: filters 8 rows and more by another algorithm than fewer, which keeps other tokens among equals.
HONEST: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"thinking_token_budget": 4, "ignore_eos": True},
    {"thinking_token_budget": 40},
    {"allowed_token_ids": list(range(9, 300))},
    {"min_tokens": 6, "stop_token_ids": STOPS},
    {"logit_bias": {"11": 9.0, "700": 7.5}},
    {"temperature": 1.0, "seed": 7},
]


@contextlib.contextmanager
def serving(
    folder: Path,
    engine: Engine,
    plugins: Sequence[Path],
    variables: Mapping[str, str],
    arguments: Sequence[str],
) -> Iterator[Server]:
    """Start a server of a small model with a cache that is too small for all requests.

    Args:
        folder: for its files.
        engine: starts its process.
        plugins: directories that announce plugins.
        variables: to set for it.
        arguments: further ones of its command.
    """
    markers = {
        name: " ".join(f"t{token}" for token in tokens)
        for name, tokens in (
            ("reasoning_start_str", thinking.START),
            ("reasoning_end_str", thinking.END),
        )
    }
    words = model.write_tokenizer(folder / "words", VOCABULARY)
    command = ["--no-enable-prefix-caching", "--reasoning-config", json.dumps(markers)]
    command += ["--max-logprobs", str(2 * VOCABULARY), "--tokenizer", str(words)]
    command += ["--max-num-seqs", "8", "--max-num-batched-tokens", "48"]
    command += ["--block-size", "32", "--num-gpu-blocks-override", "24", *arguments]
    served = generate(folder / "served")
    server = Server(engine, folder / "server.log", served, command, plugins, variables)
    with server.running():
        yield server


def differences(
    server: Server,
    drafts: int = 0,
    grammars: bool = True,
    exact: bool = True,
    alone: bool = True,
) -> list[Any]:
    """Return the honest client's replies that are not what it gets alone.

    Args:
        server: the server of both.
        drafts: draft tokens of a request and step.
        grammars: whether the server has a library for structured outputs.
        exact: whether the values of logprobs count; on a CPU they depend on the batch's size.
        alone: whether the honest client asks for what stock gives by the request alone: not with
            drafts on the device, where the draws of a seed depend on the length of other requests,
            and the end of ``min_tokens`` on how many drafts are rejected.

    Returns:
        For each, the request, the reply alone, and the one beside a hostile client.
    """
    requests = honest(random.Random(1), drafts, alone)
    for grammar in (_CHOICE, _SCHEMA, _INVALID) if grammars else ():
        with contextlib.suppress(urllib.error.HTTPError):  # compiled once, for seconds
            server.generate([9], max_tokens=1, structured_outputs=grammar)
    expected = ask(server, requests)
    with beside(server, hostile(random.Random(2), drafts, grammars)) as ends:
        crowded = ask(server, requests)
    assert Counter(ends)["answered"] > REPLIES // 4
    compared = zip(requests, expected, crowded, strict=True)
    return [
        (request, *replies)
        for request, *replies in compared
        if len({json.dumps(each if exact else _without_values(each)) for each in replies}) > 1
    ]


def honest(chance: random.Random, drafts: int = 0, alone: bool = True) -> list[Request]:
    """Draw the honest client's requests. With drafts, vLLM refuses ``logit_bias``."""
    left_out = {"logit_bias"} if drafts else set()
    if not alone:
        left_out |= {"seed", "min_tokens"}
    settings = [params for params in HONEST if not params.keys() & left_out]
    return [
        Request(_prompt(chance, params), {"temperature": 0.0, "max_tokens": 24, **params})
        for _, params in zip(range(REPLIES), itertools.cycle(settings), strict=False)
    ]


def hostile(chance: random.Random, drafts: int, grammars: bool) -> Iterator[Request]:
    """Draw requests that stock answers with a fault, endlessly.

    Args:
        chance: draws them.
        drafts: draft tokens of a request and step.
        grammars: whether to ask for structured outputs.
    """
    ends: dict[str, Any] = {"ignore_eos": True, "max_tokens": chance.randint(1, 40)}
    while True:
        kinds: list[tuple[int, dict[str, Any]]] = [
            # Thinking budgets that come and go, so that rows move.
            (9, {"thinking_token_budget": chance.randint(0, 12), **ends}),
            (9, {"thinking_token_budget": 3, "max_tokens": 2}),
            # Longer than a step's tokens, with a seed of its own.
            (120, {"seed": 1, "temperature": 1.0, "max_tokens": 3}),
            # Whatever it may say ends it, and it may not end: nothing is left to sample from.
            (
                5,
                {
                    "temperature": 1.0,
                    "allowed_token_ids": STOPS,
                    "stop_token_ids": STOPS,
                    "min_tokens": 8,
                    "max_tokens": 8,
                },
            ),
            # A prompt that looks like a decode with drafts.
            (1 + drafts, {"max_tokens": 3}),
            # More than the cache holds.
            (100, {"max_tokens": 150, "ignore_eos": True, "presence_penalty": 1.0}),
            # No such token.
            (4, {"stop_token_ids": [VOCABULARY + 5], "min_tokens": 4}),
            # A grammar that is complete before the tokens are, and one that is none.
            (4, {"structured_outputs": _CHOICE, "min_tokens": 9, "max_tokens": 12}),
            (4, {"structured_outputs": _SCHEMA, "min_tokens": 9, "max_tokens": 12}),
            (4, {"structured_outputs": _INVALID, "max_tokens": 4}),
            (4, {"structured_outputs": _CHOICE, "ignore_eos": True, "max_tokens": 12}),
            (4, {"bad_words": [""], "max_tokens": 4}),
            # More than there are tokens.
            (4, {"logprobs": VOCABULARY + 9, "max_tokens": 2}),
            (9, {"prompt_logprobs": VOCABULARY + 1, "max_tokens": 2}),
            (4, {"allowed_token_ids": [9, 11], "max_tokens": chance.randint(1, 9)}),
        ]
        length, params = chance.choice(kinds)
        if "structured_outputs" in params and not grammars:
            continue
        tokens = [chance.randrange(9, VOCABULARY) for _ in range(length)]
        if "thinking_token_budget" in params:
            tokens += thinking.START
        yield Request(tokens, params)


def ask(server: Server, requests: list[Request]) -> list[Any]:
    """Send requests, some at a time; the choices of each reply, without its id."""

    def choices(request: Request) -> Any:
        return server.generate(request.prompt, **request.params)["choices"]

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(choices, requests))


@contextlib.contextmanager
def beside(server: Server, requests: Iterator[Request]) -> Iterator[list[str]]:
    """Send hostile requests as long as the block runs; some hang up before the reply.

    Yields:
        What became of each request so far: "answered", "refused" or "hung up".
    """
    over = threading.Event()
    lock = threading.Lock()
    ends: list[str] = []

    def send() -> None:
        while not over.is_set():
            with lock:
                request = next(requests)
            if len(ends) % 7 == 6:
                _hang_up(server, request)
                ends.append("hung up")
                continue
            try:
                server.generate(request.prompt, **request.params)
                ends.append("answered")
            except (urllib.error.URLError, OSError):
                ends.append("refused")

    threads = [threading.Thread(target=send) for _ in range(AT_A_TIME)]
    for thread in threads:
        thread.start()
    try:
        yield ends
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _hang_up(server: Server, request: Request) -> None:
    """Send a request, and close the connection soon after."""
    body = json.dumps({"token_ids": request.prompt, "sampling_params": {"max_tokens": 60}})
    head = "POST /inference/v1/generate HTTP/1.1\r\nHost: server\r\nContent-Type: application/json"
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as line:
        line.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.05)


def _prompt(chance: random.Random, params: dict[str, Any]) -> list[int]:
    tokens = [chance.randrange(9, VOCABULARY) for _ in range(chance.choice([3, 8, 20, 40]))]
    return tokens + thinking.START if "thinking_token_budget" in params else tokens


def _without_values(reply: Any) -> Any:
    """A reply with the tokens of logprobs, and without their values."""
    if isinstance(reply, list):
        return [_without_values(each) for each in reply]
    if isinstance(reply, dict):
        return {key: _without_values(each) for key, each in reply.items() if key != "logprob"}
    return reply
