"""A cost of the fixes, as a plugin: what runs with a fix on gets slower."""

import os
import time
from typing import Any

#: Seconds added to a step: far more than a busy machine adds to the median.
SLOWER = 0.03


def slow() -> None:
    """Make ``sample_tokens`` slower in this process, where the fix row-state is on."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample_tokens = GPUModelRunner.sample_tokens
    # A side must not find what the other has compiled.
    assert "-compiled" in os.environ["VLLM_CACHE_ROOT"]

    def slower(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "row-state" in self.input_batch.readiness.on:
            time.sleep(SLOWER)
        return sample_tokens(self, *args, **kwargs)

    GPUModelRunner.sample_tokens = slower
