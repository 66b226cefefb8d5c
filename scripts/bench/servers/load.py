"""The model that is served, the requests it gets, and the cases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.engines.prompts import Place, draw
from bench.engines.rows import HALF_B

#: Case to the sampling parameters that make it.
CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "presence_penalty 1.5": {"presence_penalty": 1.5},
    "5 logprobs": {"logprobs": 5},
}
#: The case of requests that the user's own client arguments make.
OWN = "own traffic"
#: The model's name in requests.
NAME = "bench"
#: What the client is to write.
_REPORTING = ("--disable-tqdm", "--save-detailed")
#: Token ids that every model has.
_VOCABULARY = 1000


@dataclass(frozen=True)
class Load:
    """A model and its requests.

    Attributes:
        model: fields of config.json that differ from the demo's model, if it is generated.
        requests: in each case.
        concurrency: requests at a time.
        prompt: tokens of each prompt.
        output: tokens that each request generates.
        server: more arguments for the server.
    """

    model: Mapping[str, Any]
    requests: int
    concurrency: int
    prompt: int
    output: int
    server: Sequence[str] = ()


#: Of a size at which a step takes one core longer than the client takes for its tokens.
_SMALL: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
#: Size to the load.
LOADS: Mapping[str, Load] = {
    "full": Load(HALF_B.model, requests=256, concurrency=32, prompt=128, output=256),
    "small": Load(_SMALL, 16, concurrency=4, prompt=16, output=128, server=("--enforce-eager",)),
    "tiny": Load({}, 4, concurrency=2, prompt=8, output=32, server=("--enforce-eager",)),
}


def flags(load: Load) -> list[str]:
    """Return the server's flags for a load."""
    # The client may count a few tokens more in a prompt.
    length = load.prompt + load.output + 64
    fixed = ["--seed", "0", "--no-enable-prefix-caching", "--max-model-len", str(length)]
    return [*fixed, *load.server]


def shared_device(servers: int) -> list[str]:
    """Return the flags of servers that are on one device at a time."""
    return ["--gpu-memory-utilization", f"{0.88 / servers:.2f}"]


def server_arguments(model: str, tokenizer: str, port: int, flags: Sequence[str]) -> list[str]:
    """Return the arguments of vLLM's server, with the load's flags or the user's own."""
    return [*_served(model, tokenizer), *flags, "--host", "127.0.0.1", "--port", str(port)]


def _served(model: str, tokenizer: str) -> list[str]:
    return ["--model", model, "--served-model-name", NAME, "--tokenizer", tokenizer]


def own_client_arguments(
    model: str, tokenizer: str, url: str, number: int, own: Sequence[str]
) -> list[str]:
    """Return the arguments of `vllm bench serve` for the user's own traffic in a round.

    Prompts are drawn anew in each round, unless the user's arguments name a seed.
    """
    return [
        *("--backend", "openai", "--seed", str(number), *own),
        *("--base-url", url, *_REPORTING, *_served(model, tokenizer)),
    ]


def seed(case: str, number: int) -> int:
    """Return the seed of a case's prompts in a round: no two cases or rounds have the same."""
    return number * len(CASES) + list(CASES).index(case)


def client_arguments(
    case: str, load: Load, model: str, tokenizer: str, url: str, number: int
) -> list[str]:
    """Return the arguments of `vllm bench serve` for a case in a round."""
    parameters = dict(CASES[case])
    logprobs = parameters.pop("logprobs", None)
    return [
        *("--backend", "openai", "--base-url", url, *_REPORTING, *_served(model, tokenizer)),
        *(
            "--dataset-name",
            "random",
            "--seed",
            str(seed(case, number)),
            "--ignore-eos",
            "--temperature",
            "0",
        ),
        *("--random-input-len", str(load.prompt), "--random-output-len", str(load.output)),
        *("--num-prompts", str(load.requests), "--request-rate", "inf"),
        *("--max-concurrency", str(load.concurrency), "--num-warmups", str(load.concurrency)),
        *(["--extra-body", json.dumps(parameters)] if parameters else []),
        *(["--logprobs", str(logprobs)] if logprobs is not None else []),
    ]


def single_request(case: str, load: Load, number: int) -> dict[str, Any]:
    """Return the body of one request, which is sent alone in a round.

    vLLM's client does not keep token ids and logprobs; and alone on the server, a request does
    not depend on the arrival of others.
    """
    return {
        "model": NAME,
        "prompt": draw(Place(number, NAME, case), 1, load.prompt, _VOCABULARY)[0],
        "max_tokens": load.output,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        **CASES[case],
    }
