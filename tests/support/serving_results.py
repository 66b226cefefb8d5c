"""Results of the serving benchmark's client, made up."""

from typing import Any

from bench.servers.load import CASES
from bench.servers.results import FIGURES

PLAIN, PENALTY, LOGPROBS = CASES


def answers(case: str) -> dict[str, Any]:
    """What a client child writes of a case of 4 requests and 3 tokens in which all went well."""
    logprobs = {"token_logprobs": [-0.5] * 3, "top_logprobs": [dict.fromkeys("abcde", -0.5)] * 3}
    client = {
        **dict.fromkeys(FIGURES.values(), 2.0),
        "mean_itl_ms": 2.0,
        "completed": 4,
        "total_output_tokens": 12,
        "generated_texts": [f" t{n} t1 t2" for n in range(4)],
        "errors": [""] * 4,
        "itls": [[0.002, 0.272]] * 4,
    }
    single = {"token_ids": [3, 4, 5], "logprobs": logprobs if case == LOGPROBS else None}
    disturbed = {"run delay": 0.01, "steal": 0.0}
    return {"client": client, "single": {"choices": [single]}, "disturbance": disturbed}
