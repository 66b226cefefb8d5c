"""A cost of the process's own model runner, as a plugin: stock's twin has none."""

import time
from typing import Any

#: Seconds added to a step: far more than a busy machine adds to the median.
SLOWER = 0.1


def slow() -> None:
    """Make ``_prepare_inputs`` of this process's ``vllm.v1.worker.gpu_model_runner`` slower."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    prepare = GPUModelRunner._prepare_inputs

    def slower(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(SLOWER)
        return prepare(self, *args, **kwargs)

    GPUModelRunner._prepare_inputs = slower
