"""Workers that have what their parent has imported, as they have it on a GPU by default.

On CPUs vLLM has each worker import everything again, and has it compile one function:
together half of what a short run takes.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: For engines that :func:`fork` is announced to.
ENVIRONMENT: Mapping[str, str] = MappingProxyType({"TORCH_COMPILE_DISABLE": "1"})


def fork() -> None:
    """Have this process fork its workers; a general plugin of vLLM."""
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def then_fork(config: Any) -> None:
        decide(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(then_fork)
