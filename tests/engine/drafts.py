"""Run requests with drafts through an engine on the CPU, and write their tokens.

    python drafts.py MODEL_DIR OUT.json

Writes the tokens of each kind of request by prompt, without drafts and with them, and how many
drafts were accepted.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from demo.model import write
from support.checkpoint import VOCABULARY
from support.engine_loop import Arrival, build_engine, run_requests

PROMPTS = 6
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
#: Requests that have the likeliest token alone to choose from.
ONE = {
    "greedy": {},
    "top_k": {"temperature": 0.9, "top_k": 1},
    "top_p": {"temperature": 1.2, "top_p": 1e-6, "seed": 3},
}
#: Requests that draw by their seed.
DRAWN = {
    "seed": {"temperature": 0.6, "seed": 1},
    "seed and top_k": {"temperature": 0.4, "top_k": 20, "top_p": 0.9, "seed": 2},
    "seed and penalty": {"temperature": 0.5, "top_k": 20, "presence_penalty": 0.8, "seed": 4},
}


def requests(kinds: dict[str, dict[str, Any]]) -> list[Arrival]:
    """Requests of all kinds for each prompt, which is periodic, so that drafts are accepted."""
    prompts = [[(11 * n + k % (3 + n)) % 1000 + 3 for k in range(24)] for n in range(PROMPTS)]
    return [
        Arrival(f"{kind} {n}", prompt, {"max_tokens": 24, "ignore_eos": True, **params})
        for n, prompt in enumerate(prompts)
        for kind, params in kinds.items()
    ]


def tokens(engine: Any, kinds: dict[str, dict[str, Any]]) -> dict[str, list[list[int]]]:
    """Run all requests; the tokens of each kind, by prompt."""
    outputs, _ = run_requests(engine, requests(kinds))
    return {kind: [outputs[f"{kind} {n}"]["tokens"] for n in range(PROMPTS)] for kind in kinds}


def main(model: Path, out: Path) -> None:
    """Run the requests without drafts, and twice with them."""
    drawn = write(model.with_name("periodic"), vocab_size=VOCABULARY, torch_dtype="float32")
    arguments = {"load_format": "dummy"}
    plain = build_engine(drawn, **arguments)
    report: dict[str, Any] = {"plain": tokens(plain, ONE)}
    plain.engine_core.shutdown()
    engine = build_engine(drawn, speculative_config=DRAFTS, **arguments)
    scheduler = engine.engine_core.engine_core.scheduler
    count, accepted = scheduler.make_spec_decoding_stats, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal accepted
        accepted += kwargs["num_accepted_tokens"]
        return count(*args, **kwargs)

    scheduler.make_spec_decoding_stats = counted
    report |= {name: tokens(engine, {**ONE, **DRAWN}) for name in ("drafts", "again")}
    report["accepted"] = accepted
    out.write_text(json.dumps(report))
    os._exit(0)  # closing the sockets of several engines can block


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
