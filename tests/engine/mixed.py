"""Mixed requests for a KV cache that is too small for all of them.

They arrive over many steps, some are aborted, prompts are prefilled in chunks, and requests are
preempted and resumed. All are greedy: their outputs must not depend on the schedule.
"""

import random
from pathlib import Path
from typing import Any

from support import thinking
from support.checkpoint import VOCABULARY, generate
from support.engine_loop import Arrival, build_engine

#: A token in thirteen: many requests give one.
STOPS = list(range(7, VOCABULARY, 13))
#: No token twice in a row.
STUTTERS = [[token, token] for token in range(VOCABULARY)]

#: Settings of requests. min_tokens occurs only with penalties: without them, stock truncates
#: the request's history under async scheduling when a penalised request joins.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 5, "ignore_eos": True},
    {"presence_penalty": 1.8, "logprobs": 1},
    {"presence_penalty": -1.5, "logprobs": 1},
    {"frequency_penalty": 1.2, "stop_token_ids": STOPS},
    {"frequency_penalty": -0.9, "logprobs": 0},
    {"repetition_penalty": 1.6, "logprobs": 5},
    {"repetition_penalty": 0.6, "ignore_eos": True},
    {"presence_penalty": -0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 1},
    {"repetition_penalty": 0.7, "min_tokens": 12, "stop_token_ids": STOPS, "logprobs": 1},
    {"presence_penalty": 2.0, "min_tokens": 25, "stop_token_ids": STOPS},
    {"logit_bias": {11: 9.0, 13: -9.0, 700: 7.5}, "logprobs": 5},
    {"stop_token_ids": STOPS},
    {"bad_words": [[token] for token in range(0, VOCABULARY, 5)], "logprobs": 1},
    {"bad_words": STUTTERS, "repetition_penalty": 0.5, "logprobs": 1},
    {"bad_words": STUTTERS, "logit_bias": {17: 30.0, 19: 29.0}},
    {"thinking_token_budget": 5, "logprobs": 1},
    {"thinking_token_budget": 0, "ignore_eos": True},
    {"thinking_token_budget": 18, "repetition_penalty": 0.7, "ignore_eos": True},
    {"thinking_token_budget": 500, "stop_token_ids": STOPS},
]
REQUESTS = 100


def requests() -> list[Arrival]:
    """Draw the requests, the same ones each time."""
    chance = random.Random(20)
    arrivals = []
    for number in range(REQUESTS):
        step = number * 3 // 2
        settings = SETTINGS[number % len(SETTINGS)]
        aborted = step + chance.choice([0, 1, 2, 5, 12, 25]) if number % 8 == 5 else None
        prompt = chance.choices(range(3, VOCABULARY), k=chance.choice([4, 9, 20, 33, 70, 120]))
        if "thinking_token_budget" in settings:
            prompt += thinking.START
        params = dict(settings)
        if aborted is None:
            params["max_tokens"] = chance.randint(settings.get("min_tokens", 8), 60)
        else:  # it must still be running when it is aborted
            params |= {"max_tokens": 60, "ignore_eos": True, "stop_token_ids": []}
        arrivals.append(Arrival(f"request-{number}", prompt, params, step, aborted))
    return arrivals


def build_small_cache(model: Path, asynchronous: bool, blocks: int, **arguments: Any) -> Any:
    """Start an engine with logits that lie well apart, which prefills in chunks.

    Args:
        model: the checkpoint's directory; it is written unless it exists.
        asynchronous: whether it schedules asynchronously.
        blocks: of KV cache.
        arguments: further ones of the engine.
    """
    chunked = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "block_size": 32}
    return build_engine(
        generate(model),
        dtype="float32",
        num_gpu_blocks_override=blocks,
        async_scheduling=asynchronous,
        **{**chunked, **arguments},
    )
