"""Serve requests with n-gram drafts, alone and beside requests that reach max_model_len.

    python drafted.py MODEL_DIR OUT.json

OUT.json has the token ids of each reply, by name: as "alone", and as "beside".
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from support.checkpoint import generate
from support.engine_loop import Arrival, build_engine, run_requests

LENGTH = 96
REQUESTS = 12
#: Few tokens, so that most of a reply's n-grams have been in it before.
FEW = [20, 30, 40]
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}


def seeded(number: int) -> Arrival:
    """Draw a request's parameters."""
    params = {"temperature": 8.0, "seed": number, "allowed_token_ids": FEW}
    params |= {"max_tokens": 40, "ignore_eos": True}
    return Arrival(f"seeded {number}", [*FEW, number], params)


def long(step: int) -> Arrival:
    """Make a request that ends at max_model_len, a few steps after it has arrived."""
    params = {"max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": FEW}
    return Arrival(f"long {step}", [50 + step, *FEW * 30], params, step)


def main(model: Path, out: Path) -> None:
    """Serve each request alone, and then all of them beside each other."""
    engine = build_engine(
        generate(model), max_model_len=LENGTH, max_num_seqs=REQUESTS + 4, speculative_config=DRAFTS
    )

    def serve(requests: Sequence[Arrival]) -> dict[str, list[int]]:
        outputs, _ = run_requests(engine, requests)
        return {name: output["tokens"] for name, output in outputs.items()}

    requests = [*map(seeded, range(REQUESTS)), *map(long, range(0, 40, 4))]
    alone = {name: ids for one in requests for name, ids in serve([replace(one, step=0)]).items()}
    out.write_text(json.dumps({"alone": alone, "beside": serve(requests)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
