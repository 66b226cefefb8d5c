"""The served model, the requests, and the arguments of vLLM's server and client."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.models import HALF_B

#: Case to its sampling parameters.
CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "presence_penalty 1.5": {"presence_penalty": 1.5},
    "5 logprobs": {"logprobs": 5},
}
#: The case of the user's own client arguments.
OWN = "own traffic"
#: The model's name in requests.
NAME = "bench"
#: Token ids that every model has.
_VOCABULARY = range(3, 1000)


class Load(NamedTuple):
    """A model and its requests.

    Attributes:
        model: fields of config.json that differ from the demo's model, if it is generated.
        requests: in each case.
        concurrency: requests at a time.
        prompt: tokens of each prompt.
        output: tokens of each request.
        server: further flags of the server.
    """

    model: Mapping[str, Any]
    requests: int
    concurrency: int
    prompt: int
    output: int
    server: Sequence[str] = ()


#: A step takes one core longer than the client takes for its tokens.
_SMALL: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LOADS: Mapping[str, Load] = {
    "full": Load(HALF_B, requests=256, concurrency=32, prompt=128, output=256),
    "small": Load(_SMALL, 16, concurrency=4, prompt=16, output=128, server=("--enforce-eager",)),
    "tiny": Load({}, 4, concurrency=2, prompt=8, output=32, server=("--enforce-eager",)),
}


def flags(load: Load) -> list[str]:
    """Return the server's flags for a load."""
    # The client may count a few tokens more in a prompt.
    length = load.prompt + load.output + 64
    fixed = ["--seed", "0", "--no-enable-prefix-caching", "--max-model-len", str(length)]
    return [*fixed, *load.server]


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
        own: arguments of :func:`case_arguments`, or of the user.
    """
    return [
        *("--backend", "openai", "--seed", str(seed), *own),
        *("--base-url", url, "--disable-tqdm", "--save-detailed", *_served(model, tokenizer)),
    ]


def case_arguments(case: str, load: Load) -> list[str]:
    """Return the client's arguments of a case."""
    parameters = dict(CASES[case])
    logprobs = parameters.pop("logprobs", None)
    return [
        *("--dataset-name", "random", "--ignore-eos", "--temperature", "0"),
        *("--random-input-len", str(load.prompt), "--random-output-len", str(load.output)),
        *("--num-prompts", str(load.requests), "--request-rate", "inf"),
        *("--max-concurrency", str(load.concurrency), "--num-warmups", str(load.concurrency)),
        *(["--extra-body", json.dumps(parameters)] if parameters else []),
        *(["--logprobs", str(logprobs)] if logprobs is not None else []),
    ]


def single_request(case: str, load: Load, seed: int) -> dict[str, Any]:
    """Return the body of a request to be sent alone after a case.

    vLLM's client keeps no token ids and logprobs; and alone on the server, a request does not
    depend on the arrival of others.
    """
    drawn = random.Random(f"{case}-{seed}")  # noqa: S311 (draws no secret)
    return {
        "model": NAME,
        "prompt": drawn.choices(_VOCABULARY, k=load.prompt),
        "max_tokens": load.output,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        **CASES[case],
    }
