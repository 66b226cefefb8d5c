"""A cost of the fixes, as a plugin: what runs with a fix on gets slower.

Where a side keeps what it compiles, the first step of all leaves a kernel.
"""

import os
import time
from pathlib import Path
from typing import Any

#: Seconds added to a step: far more than a busy machine adds to the median.
SLOWER = 0.03


def slow() -> None:
    """Make ``sample_tokens`` slower in this process, where the fix row-state is on."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample_tokens = GPUModelRunner.sample_tokens
    kernel = Path(os.environ["VLLM_CACHE_ROOT"]) / "kernel.cpp"

    def slower(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "row-state" in self.input_batch.readiness.on:
            time.sleep(SLOWER)
        kernel.parent.mkdir(parents=True, exist_ok=True)
        kernel.touch()
        return sample_tokens(self, *args, **kwargs)

    GPUModelRunner.sample_tokens = slower
