"""Run a fixed set of requests through the vLLM that this Python imports.

    python generate.py MODEL_DIR OUT.json [SPECULATIVE_CONFIG]

Writes each request's token ids and logprobs, so that two installations can be compared. With a
speculative_config (JSON), requests that it does not allow are left out, and prompts are periodic,
so that drafts are accepted.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from demo.model import write
from support.engine_loop import Arrival, build_engine, run_requests

#: FlashAttention 3 takes no float32.
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 3},
    {"temperature": 1.0, "seed": 1, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 2, "logprobs": 2},
    {"temperature": 0.9, "min_p": 0.05, "seed": 3},
    {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 1},
    {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.8, "presence_penalty": -0.5, "seed": 4, "logprobs": 1},
    {"temperature": 0.0, "min_tokens": 8, "stop_token_ids": [3, 5, 7]},
    {"temperature": 0.0, "logit_bias": {11: 5.0, 13: -5.0}, "logprobs": 3},
    {"temperature": 0.0, "ignore_eos": True, "max_tokens": 64},
]
#: Settings that vLLM refuses with speculative decoding.
NOT_WITH_DRAFTS = {"min_p", "logit_bias"}


def main(model: Path, out: Path, speculative: str = "null") -> None:
    """Generate with every setting in one batch, and write the outputs."""
    drafts = json.loads(speculative)
    engine = build_engine(
        write(model.with_name("drawn"), vocab_size=1009, torch_dtype=DTYPE),
        load_format="dummy",
        gpu_memory_utilization=0.3,
        enable_prefix_caching=True,
        speculative_config=drafts,
    )
    settings = [each for each in SETTINGS if not (drafts and each.keys() & NOT_WITH_DRAFTS)]
    period = 4 if drafts else 10**6
    requests = [
        Arrival(
            str(number),
            [(7 * number + k % period) % 1000 + 3 for k in range(5 + number)],
            {"max_tokens": 24, **fields},
        )
        for number, fields in enumerate(settings)
    ]
    outputs, _ = run_requests(engine, requests)
    out.write_text(json.dumps([outputs[request.name] for request in requests]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
