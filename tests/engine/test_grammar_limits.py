"""Grammars that take too much time or memory, sent to a real server, beside honest requests."""

import json
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import clients
from support.engine import Engine
from support.server import Server

pytestmark = pytest.mark.slow

SECONDS, MEMORY = 4, 512
#: Seconds in which an honest request is answered, on a busy machine.
PROMPT = 12.0
#: The tokens of the server are words such as "t17".
HONEST: dict[str, dict[str, Any]] = {
    "no grammar": {},
    "a regex": {"regex": "(t[0-9]+)+"},
    "a choice": {"choice": ["t1" * 8, "t4" * 9]},
    "a schema": {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
    "a grammar": {"grammar": 'root ::= "t1" root | "t2" root'},
}


def chain(rule: str, number: int) -> str:
    """A grammar of rules, each of which refers to the next."""
    rules = [rule.format(this=n, next=n + 1) for n in range(number)]
    return "\n".join(["root ::= r0", *rules, f'r{number} ::= "t"'])


#: Request to the setting whose limit it exceeds.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "nullable rules, slow to compile": (
        {"grammar": chain('r{this} ::= "t1"? r{next}', 6000)},
        "VLLM_READINESS_GRAMMAR_SECONDS",
    ),
    "left recursion, large in memory": (
        {"grammar": chain('r{this} ::= r{next} "t1"', 20000)},
        "VLLM_READINESS_GRAMMAR_",  # either, whichever it exceeds first
    ),
}


@pytest.fixture(scope="module")
def server(folder: Path, overlaid: Engine) -> Iterator[Server]:
    """A server on the overlaid installation."""
    variables = {
        "VLLM_READINESS_GRAMMAR_SECONDS": str(SECONDS),
        "VLLM_READINESS_GRAMMAR_MEMORY": str(MEMORY),
    }
    arguments = ["--dtype", "float32", "--enforce-eager"]
    home = folder / "grammar limits"
    with clients.serving(home, overlaid, [], variables, arguments) as server:
        yield server


def ask(server: Server, grammar: dict[str, Any]) -> tuple[float, Any]:
    """Send a request; its seconds, and its reply."""
    begin = time.monotonic()
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}
    reply = server.generate(
        [3, 4, 5], **params, **({"structured_outputs": grammar} if grammar else {})
    )
    return time.monotonic() - begin, reply["choices"][0]


@pytest.mark.parametrize("name", HOSTILE)
def test_honest_requests_are_served_beside_a_hostile_one(server: Server, name: str) -> None:
    grammar, setting = HOSTILE[name]
    alone = {kind: ask(server, honest)[1] for kind, honest in HONEST.items()}
    with ThreadPoolExecutor(1) as pool:
        hostile = pool.submit(ask, server, grammar)
        time.sleep(0.2)
        for kind, honest in HONEST.items():
            seconds, reply = ask(server, honest)
            assert (kind, reply) == (kind, alone[kind])
            assert seconds < PROMPT
        new = {"regex": f"(t[0-9]+|x{len(name)})+"}  # one that was not tried before
        seconds, reply = ask(server, new)
        assert seconds < PROMPT
        assert reply["finish_reason"] in ("stop", "length")
        with pytest.raises(urllib.error.HTTPError) as refused:
            hostile.result()
    assert refused.value.code == 400
    message = json.loads(refused.value.read())["error"]["message"]
    assert setting in message
