"""Fork vLLM's workers on the CPU, as it does on a GPU by default.

On the CPU vLLM makes each worker import everything again and compile one function, which
takes half of the time of a short run.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: For engines that load :func:`fork` as a plugin.
ENVIRONMENT: Mapping[str, str] = MappingProxyType({"TORCH_COMPILE_DISABLE": "1"})


def fork() -> None:
    """Make this process fork its workers; a general plugin of vLLM."""
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def then_fork(config: Any) -> None:
        decide(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(then_fork)
