"""The requests of closed-loop streams, and the arguments of the server and of stock's client."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.loops.rows import ENGINES, ROWS, draw_length

#: Rows of :data:`bench.loops.rows.ROWS` that chat completions can ask for.
CASES = ("plain", "mixed", "logprobs", "presence", "seeded", "greedy")
#: The case of the user's own client arguments.
OWN = "own traffic"
#: The model's name in requests.
NAME = "bench"
#: Of the generated model; its tokenizer takes each word as a token.
TEMPLATE = "{% for each in messages %}{{ each['content'] }} {% endfor %}"
#: Begins each word of the generated model's tokenizer, and is nowhere else in it.
MARK = "t"
#: The first token id in prompts.
_FIRST = 9
#: Tokens that a warm-up request generates.
_WARMUP = 4


class Load(NamedTuple):
    """Closed-loop streams of chat completions.

    Attributes:
        engine: a name of :data:`bench.loops.rows.ENGINES`, which gives the lengths.
        streams: requests at a time.
        generated: whether the model is the engine's generated one: a text then has one word for
            each token.
    """

    engine: str
    streams: int
    generated: bool


def request(load: Load, case: str, seed: int, stream: int, number: int) -> dict[str, Any]:
    """Return the body of a request; equal arguments give equal ones.

    Args:
        load: the streams.
        case: a name of :data:`CASES`.
        seed: of the lengths and prompts.
        stream: from 0.
        number: of the request in its stream. The first one, 0, is cut at a random length: with all
            streams started together, their ends would come together, too. -1 is a short one that
            asks for the same as the stream's others.
    """
    engine, row = ENGINES[load.engine], ROWS[case]
    drawn = random.Random(f"{seed}-{case}-{stream}-{number}")  # noqa: S311 (draws no secret)
    length = draw_length(drawn, engine.prompt, engine.length // 4)
    output = draw_length(drawn, engine.output, engine.length // 2)
    if number <= 0:
        output = math.ceil(output * drawn.random()) if number == 0 else _WARMUP
    if load.generated:
        tokens = drawn.choices(range(_FIRST, engine.vocabulary), k=length)
        words = [f"{MARK}{token}" for token in tokens]
    else:
        # A token each in most tokenizers.
        words = drawn.choices(string.ascii_lowercase, k=length)
    parameters: dict[str, Any] = {
        "temperature": 1.0,
        **row.parameters[stream % len(row.parameters)],
    }
    if parameters.get("seed") is True:
        parameters["seed"] = drawn.getrandbits(31)
    if (top := parameters.pop("logprobs", None)) is not None:
        parameters |= {"logprobs": True, "top_logprobs": top}
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **parameters,
    }


def flags(load: Load) -> list[str]:
    """Return the server's flags for closed-loop streams, as those of bench.traffic."""
    engine = ENGINES[load.engine]
    return [
        *("--seed", "0", "--max-model-len", str(engine.length)),
        *("--max-num-seqs", str(max(load.streams, *engine.concurrency))),
        *("--max-num-batched-tokens", "8192"),
        *(["--load-format", "dummy"] if load.generated else []),
    ]


def _served(model: str, tokenizer: str | None) -> list[str]:
    named = ["--tokenizer", tokenizer] if tokenizer is not None else []
    return ["--model", model, "--served-model-name", NAME, *named]


def server_arguments(
    model: str, tokenizer: str | None, port: int, flags: Sequence[str]
) -> list[str]:
    """Return the arguments of vLLM's server; the model's tokenizer is beside it if None."""
    return [*_served(model, tokenizer), *flags, "--host", "127.0.0.1", "--port", str(port)]


def client_arguments(
    model: str, tokenizer: str, url: str, seed: int, own: Sequence[str]
) -> list[str]:
    """Return the arguments of `vllm bench serve`.

    Args:
        model: its directory.
        tokenizer: its directory.
        url: of the server.
        seed: of the prompts, unless ``own`` names one.
        own: the user's arguments.
    """
    return [
        *("--backend", "openai", "--seed", str(seed), *own),
        *("--base-url", url, "--disable-tqdm", "--save-detailed", *_served(model, tokenizer)),
    ]
