"""Run every kind of output on an engine of two ranks, each on a GPU of its own.

    python parallel.py MODEL_DIR OUT.json tensor|pipeline sync|async

OUT.json holds the outputs of :mod:`gpu.kinds`, batches with thinking budgets included.
"""

import json
import sys
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
from bench import thinking
from engine.generate import DTYPE
from gpu.kinds import BATCHES, BUDGET, REQUESTS, THINKING, requests, run
from support.checkpoint import generate
from support.engine_loop import build_engine


def start(model: Path, parallel: str, scheduling: str) -> Any:
    """Start an engine whose workers are two processes.

    Args:
        model: the checkpoint's directory.
        parallel: "tensor" or "pipeline".
        scheduling: "sync" or "async".
    """
    return build_engine(
        generate(model),
        dtype=DTYPE,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=BUDGET,
        max_logprobs=-1,
        reasoning_config=thinking.config(),
        async_scheduling=scheduling == "async",
        # No profiling, which other engines on the same devices would disturb.
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=64 << 20,
        **{f"{parallel}_parallel_size": 2},
    )


def main(model: Path, out: Path, parallel: str, scheduling: str) -> None:
    """Run every batch, and write the outputs of each."""
    engine = start(model, parallel, scheduling)
    out.write_text(json.dumps({name: run(engine, requests(name, False)) for name in RUN}))


#: Batches by name.
RUN = (*BATCHES, *THINKING)

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
