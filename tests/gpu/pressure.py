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
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from demo.model import write
from support.engine_loop import Arrival, build_engine, run_requests

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
    engine = build_engine(
        directory,
        load_format="dummy",
        gpu_memory_utilization=UTILIZATION,
        max_model_len=A_STEP,
        max_num_seqs=requests,
        max_num_batched_tokens=A_STEP,
        enforce_eager=False,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [requests],
        },
    )
    blocks = engine.vllm_config.cache_config.num_gpu_blocks
    free = torch.cuda.mem_get_info()[0]

    def prompt(number: int, length: int) -> list[int]:
        return [(number * 31 + n) % vocabulary for n in range(length)]

    penalised = {"presence_penalty": 1.5, "max_tokens": TOKENS, "ignore_eos": True}
    long = {"max_tokens": 4, "ignore_eos": True}
    batch = [Arrival(str(n), prompt(n, 16), penalised) for n in range(requests - 2)]
    batch += [
        Arrival(str(n), prompt(n, A_STEP - 8), long, step=TOKENS // 2)
        for n in (requests - 2, requests - 1)
    ]
    outputs, _ = run_requests(engine, batch)
    tokens = sorted((name, output["tokens"]) for name, output in outputs.items())
    return {
        "blocks": blocks,
        "free": free,
        "least free": torch.cuda.mem_get_info()[0],
        "finished": len(outputs),
        "digest": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
