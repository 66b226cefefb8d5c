"""Serve requests whose KV loads fail among others, and the same requests without a connector.

    python failing.py MODEL_DIR OUT.json PART...

Each PART is a key of :data:`PARTS`; synchronous ones come first. OUT.json holds, by part, each
request's output with the connector and without, what the connector counted, and the error that the
engine ended with, or null. On a GPU engines schedule asynchronously by themselves.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from support import asynchronous, shelf
from support.checkpoint import VOCABULARY, generate
from support.engine_loop import Arrival, build_engine, run_requests
from support.engine_stats import EngineStats

#: Requests of a part, and what the connector does for each kind of them.
REQUESTS = 36
KINDS = ("now", "beside", "lost", "beside", "later", "now")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"temperature": 1.0, "seed": 5, "logprobs": 1},
    {"presence_penalty": 1.8, "logprobs": 1},
    {"repetition_penalty": 1.6, "temperature": 0.8, "seed": 6},
    {"bad_words": [[token] for token in range(0, VOCABULARY, 5)], "logprobs": 1},
    {"frequency_penalty": 1.2, "max_tokens": 1},
    {"prompt_logprobs": 1, "logprobs": 0},
]
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
#: Prompts begin with one of so many prefixes.
PREFIXES = 3
#: Between logprobs of one token.
TOLERANCE = 1e-3

#: Whether a part schedules asynchronously, and its engine's arguments.
PARTS: dict[str, tuple[bool, dict[str, Any]]] = {
    "sync drafts": (False, {"speculative_config": DRAFTS}),
    "async": (True, {}),
    "async cached": (True, {"enable_prefix_caching": True}),
    "async crowded": (True, {"enable_prefix_caching": True, "num_gpu_blocks_override": 48}),
}


def shelved() -> list[Arrival]:
    """Requests that put the prefixes on the shelf, one after the other."""
    return [
        Arrival(f"shelve-{number}", prefix(number), {"max_tokens": 1}, step=8 * number)
        for number in range(PREFIXES)
    ]


def prefix(number: int) -> list[int]:
    """Draw a prefix, the same each time."""
    return random.Random(number).choices(range(3, VOCABULARY), k=70 + 16 * number)


def requests() -> list[Arrival]:
    """Draw the requests, the same each time."""
    chance = random.Random(36)
    arrivals = []
    for number in range(REQUESTS):
        settings = SETTINGS[chance.randrange(len(SETTINGS))]
        # Logprobs of a prompt are computed with the prompt: nothing of it may be loaded.
        kinds = ("lost", "beside") if "prompt_logprobs" in settings else KINDS
        kind = kinds[number % len(kinds)]
        prompt = prefix(chance.randrange(PREFIXES))
        prompt += chance.choices(range(3, VOCABULARY), k=chance.choice([1, 9, 30]))
        params = {"max_tokens": chance.randint(6, 14), "ignore_eos": True, **settings}
        aborted = number + chance.randrange(1, 6) if number % 12 == 11 else None
        arrivals.append(Arrival(f"{kind}-{number}", prompt, params, number, aborted))
    return arrivals


def differences(part: Any, tolerance: float = TOLERANCE) -> list[str]:
    """Return what differs between the outputs of a part with the connector and without.

    Args:
        part: of a report.
        tolerance: between logprobs of one token.
    """
    without, outputs = part["without"], part["with"]
    found = [f"{name}: missing" for name in without.keys() ^ outputs.keys()]
    for name in without.keys() & outputs.keys():
        one, other = without[name], outputs[name]
        if one["tokens"] != other["tokens"]:
            found.append(f"{name}: {one['tokens']} without, {other['tokens']} with")
        for field in ("logprobs", "prompt_logprobs"):
            # The last bits depend on which tokens are computed together.
            if [*_tokens(one[field])] != [*_tokens(other[field])] or any(
                abs(first - second) > tolerance
                for first, second in zip(_values(one[field]), _values(other[field]), strict=True)
            ):
                found.append(f"{name}: {field}")
    return found


def _tokens(logprobs: Any) -> Iterator[int]:
    """Yield the chosen token of each position."""
    return (position[0][0] for position in logprobs or () if position)


def _values(logprobs: Any) -> Iterator[float]:
    """Yield all logprobs, in order."""
    return (value for position in logprobs or () for _, value, _ in position or ())


def run(model: Path, asynchronously: bool, arguments: dict[str, Any]) -> Any:
    """Run the requests with the connector and, unless that ends the engine, without."""
    report: dict[str, Any] = {"error": None}
    for side, config in (("with", shelf.transfer_config()), ("without", None)):
        engine = build_engine(
            generate(model),
            dtype="float32",
            async_scheduling=asynchronously,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=64 << 20,  # no profiling, which other engines would disturb
            kv_transfer_config=config,
            **{
                "block_size": 16,
                "max_num_seqs": 8,
                "max_num_batched_tokens": 64,
                "num_gpu_blocks_override": 200,
                **arguments,
            },
        )
        stats = EngineStats(engine)
        try:
            run_requests(engine, shelved())
            shelf.COUNTS.clear()
            report[side], _ = run_requests(engine, requests())
        except Exception as error:
            report["error"] = f"{type(error).__name__}: {error}"
        if side == "with":
            report["counts"], report["stats"] = dict(shelf.COUNTS), stats.to_json()
        engine.engine_core.shutdown()
        if report["error"]:
            break
    return report


def main(model: Path, out: Path, *names: str) -> None:
    """Run the parts, and write the report."""
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    report = {}
    simulated = torch.cuda.is_available()
    for name in names:
        asynchronously, arguments = PARTS[name]
        if asynchronously and not simulated:
            asynchronous.register()
            simulated = True
        report[name] = run(model, asynchronously, arguments)
    out.write_text(json.dumps(report))
    os._exit(0)  # closing the sockets of several engines can block


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
