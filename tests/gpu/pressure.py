"""Serve penalised requests on a device that is nearly full, and write the outcome.

    python pressure.py MODEL_DIR OUT.json VOCABULARY [REQUESTS]

Another process holds the whole device except vLLM's share and LEFT bytes, half of which vLLM's
context takes. When every request holds a slot, long prompts arrive, whose activations need all
the memory that vLLM has planned for them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from demo.model import write

UTILIZATION = 0.98
LEFT = 900 << 20
REQUESTS = 512
TOKENS = 40
A_STEP = 16384

_HOLD = f"""
import sys, torch
torch.zeros(1, device="cuda")
free, total = torch.cuda.mem_get_info()
size = max(0, free - int({UTILIZATION} * total) - {LEFT})
held = torch.empty(size, dtype=torch.uint8, device="cuda")
print("held", held.nbytes, flush=True)
sys.stdin.read()
"""


def main(directory: Path, out: Path, vocabulary: int, requests: int = REQUESTS) -> None:
    """Write a digest of all tokens and the memory left, or the error."""
    write(
        directory,
        vocab_size=vocabulary,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=16,
        max_position_embeddings=A_STEP,
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    report: dict[str, Any] = {"held": holder.stdout.readline().split()[-1]}
    try:
        report |= serve(directory, vocabulary, requests)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"[:2000]
    finally:
        holder.communicate("")
    out.write_text(json.dumps(report))


def serve(directory: Path, vocabulary: int, requests: int) -> dict[str, Any]:
    """Run the requests."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        gpu_memory_utilization=UTILIZATION,
        max_model_len=A_STEP,
        max_num_seqs=requests,
        max_num_batched_tokens=A_STEP,
        enable_prefix_caching=False,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [requests],
        },
    )
    core = engine.llm_engine
    blocks = core.vllm_config.cache_config.num_gpu_blocks
    free = torch.cuda.mem_get_info()[0]

    def add(number: int, prompt: int, **asked: Any) -> None:
        params = SamplingParams(ignore_eos=True, detokenize=False, **asked)
        tokens = [(number * 31 + n) % vocabulary for n in range(prompt)]
        core.add_request(str(number), TokensPrompt(prompt_token_ids=tokens), params)

    for number in range(requests - 2):
        add(number, 16, presence_penalty=1.5, temperature=0.0, max_tokens=TOKENS)
    digests: dict[str, str] = {}
    began = time.monotonic()
    steps = 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                ids = json.dumps(list(output.outputs[0].token_ids)).encode()
                digests[output.request_id] = hashlib.sha256(ids).hexdigest()[:16]
        steps += 1
        if steps == TOKENS // 2:
            for number in (requests - 2, requests - 1):
                add(number, A_STEP - 8, temperature=0.0, max_tokens=4)
    return {
        "blocks": blocks,
        "free": free,
        "least free": torch.cuda.mem_get_info()[0],
        "seconds": time.monotonic() - began,
        "finished": len(digests),
        "digest": hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
