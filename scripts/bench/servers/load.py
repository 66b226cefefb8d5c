"""The requests of closed-loop streams, and the arguments of the server and of stock's client."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.loops.rows import ENGINES, draw

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
    """Return the body of a request; see :func:`bench.loops.rows.draw`."""
    _, prompt, output, parameters = draw(load.engine, case, seed, stream, number)
    letters = string.ascii_lowercase  # a token each in most tokenizers
    words = [f"{MARK}{n}" if load.generated else letters[n % len(letters)] for n in prompt]
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
