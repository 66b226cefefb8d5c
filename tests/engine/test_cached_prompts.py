"""A real server: logprobs of prompts of which a part comes from the prefix cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import clients
from support.engine import Engine
from support.server import Server

pytestmark = pytest.mark.slow
PROMPT = [3 + 7 * n % 900 for n in range(75)]
#: Tokens of a block, which the cache keeps whole.
BLOCK = 32


@pytest.fixture(scope="module")
def server(folder: Path, overlaid: Engine) -> Iterator[Server]:
    """A server with a prefix cache."""
    arguments = ["--dtype", "float32", "--enforce-eager", "--enable-prefix-caching"]
    with clients.serving(folder / "cached prompts", overlaid, [], {}, arguments) as server:
        yield server


def logprobs(server: Server, prompt: list[int], **params: Any) -> Any:
    """Return the logprobs of a prompt: tokens and ranks by position."""
    reply = server.generate(prompt, max_tokens=1, temperature=0.0, prompt_logprobs=2, **params)[
        "prompt_logprobs"
    ]
    return [each and {token: one["rank"] for token, one in each.items()} for each in reply]


def test_positions_from_the_cache_are_null(server: Server) -> None:
    """In any order of requests, and for a prompt that is a cached one's beginning."""
    whole = logprobs(server, PROMPT)
    assert whole[0] is None
    assert all(whole[1:])
    reading = {"skip_reading_prefix_cache": False}
    for length, cached in ((75, 2 * BLOCK), (64, BLOCK), (60, BLOCK), (75, 2 * BLOCK)):
        shown = logprobs(server, PROMPT[:length], **reading)
        assert shown == [None] * (cached + 1) + whole[cached + 1 : length]
    assert logprobs(server, PROMPT) == whole


def test_a_prompt_in_chunks_begins_where_the_cache_ends(server: Server) -> None:
    """A step has 48 tokens."""
    longer = PROMPT + [5 + 3 * n % 700 for n in range(80)]
    logprobs(server, PROMPT)
    shown = logprobs(server, longer, skip_reading_prefix_cache=False)
    assert shown == [None] * (2 * BLOCK + 1) + logprobs(server, longer)[2 * BLOCK + 1 :]
