"""The user's own traffic, by `vllm bench serve`."""

from __future__ import annotations

import argparse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import disturbance, outputs
from bench.results.slices import DISTURBANCE
from bench.servers.load import client_arguments

TEXTS = "texts"
#: Figure to its key in a result of `vllm bench serve`. Times are in ms.
FIGURES: Mapping[str, str] = {
    "tokens/s": "output_throughput",
    "requests/s": "request_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "ITL p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
}


def measure(
    url: str, server: int, model: str, tokenizer: str, own: Sequence[str], seed: int, compared: bool
) -> dict[str, Any]:
    """Drive a server; return the figures, outputs, counts and problems.

    Args:
        url: of the server.
        server: its process.
        model: its directory.
        tokenizer: its directory.
        own: the user's arguments.
        seed: unless they name one.
        compared: whether texts are compared.

    Raises:
        OSError: the server has not outlived the traffic. To vLLM's client, a reply that the
            server's end has cut is a whole one.
    """
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as drive

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    before = disturbance.snapshot(server)
    client = drive(parser.parse_args(client_arguments(model, tokenizer, url, seed, own)))
    disturbed = disturbance.during(before, disturbance.snapshot(server))
    try:
        urllib.request.urlopen(f"{url}/health", timeout=60).close()
    except OSError as error:
        raise OSError(f"the server has not outlived its traffic: {error}") from error
    return read(client, compared, disturbed)


def read(client: Mapping[str, Any], compared: bool, disturbed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures, outputs, counts and problems of a result of `vllm bench serve`.

    Args:
        client: the result.
        compared: whether texts are compared.
        disturbed: of the server's processes.
    """
    packed = {"lengths of the prompts": [[str(length)] for length in client["input_lens"]]}
    if compared:
        texts = client["generated_texts"]
        packed[TEXTS] = [text.strip(" ").split(" ") if text else [] for text in texts]
    problems = [
        f"request {n} failed: {error.strip().splitlines()[-1]}"
        for n, error in enumerate(client["errors"])
        if error
    ][:1]
    # The client or the server's front end had no core to run on. A reply that comes in one piece
    # has no interval, and no time per token.
    whole = client["total_output_tokens"] > client["completed"] and client["median_tpot_ms"] <= 0
    if whole or client["median_itl_ms"] < client["mean_itl_ms"] / 4:
        problems.append("most tokens came in bursts")
    return {
        "figures": {
            **{figure: float(client[key]) for figure, key in FIGURES.items()},
            DISTURBANCE: disturbed,
        },
        "outputs": {kind: outputs.pack(stream) for kind, stream in packed.items()},
        "counts": {"responses": (client["completed"], len(client["errors"]))},
        "problems": problems,
    }
