"""Feature ``logprob-ranks``: ranks of tokens are counted by a kernel that start-up has compiled.

A token's rank is the number of logprobs in its row that are not less than the token's. Upstream
counts them in a function under ``torch.compile``: the first request with logprobs stalls the engine
for about a second while inductor compiles the function, and each call evaluates dynamo's guards on
the host. Here a Triton kernel computes the same integers.
"""

# mirrors: vllm.v1.sample.sampler:Sampler.gather_logprobs
# mirrors: vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs
# mirrors: vllm.v1.sample.ops.logprobs:batched_count_greater_than

from collections.abc import Callable

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch


def warm_up(device: torch.device) -> None:
    """Compile the kernel."""
    if device.type == "cuda":
        scores = torch.zeros((1, 1), dtype=torch.float32, device=device)
        count(count, scores, scores)


def count(
    upstream: Callable[..., torch.Tensor], scores: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """Count the ``scores`` [rows, vocab] not less than the row's ``values`` [rows, 1].

    Returns int64 [rows]. Calls ``upstream`` for tensors that are not float32 on a CUDA device.
    """
    served = scores.is_cuda and scores.dtype == values.dtype == torch.float32
    if not served or scores.stride(1) != 1 or registry.LOGPROB_RANKS not in switch.enabled():
        return upstream(scores, values)
    from vllm.v1.readiness.kernels import logprob_ranks

    return logprob_ranks.count(scores, values)
