"""The results of one case: what `vllm bench serve` reports, and a request that was alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.compare import outputs
from bench.compare.summary import CaseResult
from bench.servers.load import CASES, Load

#: What requests returned.
TEXTS = "texts"
#: Figure to its key in a result of `vllm bench serve`. Times are in ms.
FIGURES: Mapping[str, str] = {
    "requests/s": "request_throughput",
    "tokens/s": "output_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
}


def read(result: Mapping[str, Any], case: str, load: Load, generated: bool) -> CaseResult:
    """Read what the client child wrote of a case.

    Args:
        result: its JSON: "client", the result of `vllm bench serve`; "single", the server's
            answer to a request that was alone; and "disturbance", of the server's processes.
        case: the case's name.
        load: the requests.
        generated: whether a text has one word for each token.
    """
    client, single = result["client"], result["single"]["choices"][0]
    texts = [text.strip(" ").split(" ") if text else [] for text in client["generated_texts"]]
    expected = load.requests * load.output
    counts = {
        "responses": (client["completed"], load.requests),
        "tokens": (client["total_output_tokens"], expected),
    }
    if generated:
        counts["tokens in the texts"] = (sum(map(len, texts)), expected)
    logprobs: list[str] = []
    if (top := CASES[case].get("logprobs")) is not None:
        given = single["logprobs"] or {"token_logprobs": [], "top_logprobs": []}
        logprobs = [
            f"{one!r} {sorted(more.items())!r}"
            for one, more in zip(given["token_logprobs"], given["top_logprobs"], strict=True)
            if one is not None and more and len(more) >= top
        ]
        counts["logprobs of one request"] = (len(logprobs), load.output)
    streams = {
        TEXTS: texts,
        "token ids of one request alone": [list(map(str, single["token_ids"]))],
        "logprobs of one request alone": [logprobs],
    }
    return _case(result, streams, counts)


def read_own(result: Mapping[str, Any]) -> CaseResult:
    """Read what the client child wrote of the user's own traffic; see :func:`read`."""
    client = result["client"]
    streams = {
        "prompts' lengths": [[str(length)] for length in client["input_lens"]],
        TEXTS: [text.split(" ") if text else [] for text in client["generated_texts"]],
    }
    return _case(result, streams, {"responses": (client["completed"], len(client["errors"]))})


def _case(
    result: Mapping[str, Any],
    streams: Mapping[str, Sequence[Sequence[str]]],
    counts: Mapping[str, Sequence[int]],
) -> CaseResult:
    client = result["client"]
    problems = [
        f"request {n} failed: {error.strip().splitlines()[-1]}"
        for n, error in enumerate(client["errors"])
        if error
    ][:1]
    # The client or the server's front end had no core to run on.
    if client["median_itl_ms"] < client["mean_itl_ms"] / 4:
        problems.append("most tokens came in bursts")
    longest = max((time for times in client["itls"] for time in times), default=None)
    return CaseResult(
        {
            **{figure: float(client[key]) for figure, key in FIGURES.items()},
            "ITL max": None if longest is None else longest * 1e3,
        },
        {kind: outputs.pack(stream) for kind, stream in streams.items()},
        counts,
        problems,
        disturbance=result["disturbance"],
    )
