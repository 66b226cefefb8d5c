"""Measure what an idle engine holds on the device after steps with large logprobs.

    python idle.py MODEL_DIR OUT.json

256 requests ask for the logprobs of a whole vocabulary, 311 MB a step. The core's output is not
processed further, which would take too long.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from demo.model import write
from support.engine_loop import Arrival, build_engine

VOCABULARY = 151_936
REQUESTS = 256
TOKENS = 3


def main(directory: Path, out: Path) -> None:
    """Write the bytes allocated before the requests, and after their last output."""
    engine = build_engine(
        write(directory, vocab_size=VOCABULARY),
        load_format="dummy",
        gpu_memory_utilization=0.3,
        max_num_seqs=REQUESTS,
        max_logprobs=-1,
        async_scheduling=True,
    )
    params = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": -1}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for number in range(REQUESTS):
        Arrival(str(number), [1, 2, number], params).add_to(engine)
    finished = 0
    while finished < REQUESTS:
        finished += sum(each.finished for each in engine.engine_core.get_output().outputs)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    out.write_text(json.dumps({"before": before, "after": after}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
