"""A plugin of vLLM that gives the second rank of an engine another VLLM_READINESS."""

import os
import sys
from typing import Any


def other_switch() -> None:
    """Change the variable when the rank makes its device, before it makes its model runner."""
    from vllm.v1.worker import gpu_worker

    join = gpu_worker.init_worker_distributed_environment

    def then_change(config: Any, rank: int, *rest: Any, **named: Any) -> None:
        join(config, rank, *rest, **named)
        if rank == 1:  # as another node's shell may
            os.environ["VLLM_READINESS"] = "-penalties"

    gpu_worker.init_worker_distributed_environment = then_change
    if worker := sys.modules.get("vllm.v1.worker.cpu_worker"):
        worker.init_worker_distributed_environment = then_change  # type: ignore[attr-defined]
