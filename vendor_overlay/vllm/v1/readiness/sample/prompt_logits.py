"""Fix ``prompt-logits``: ``logprobs_mode`` applies to the logprobs of prompts, too.

The setting says what is returned as logprobs and as prompt logprobs. 0.22.0 returns logprobs
for prompts in each of its modes. Here a prompt gets logits with ``raw_logits`` and
``processed_logits``. They are the same for it: no logits processor works on a prompt.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict
# mirrors: vllm.v1.sample.sampler:Sampler.compute_logprobs

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.sample.sampler import Sampler


def scores(sampler: "Sampler", logits: torch.Tensor, on: bool) -> torch.Tensor:
    """Compute what is returned of a prompt.

    Args:
        sampler: the runner's; an own one that has no mode gives logprobs.
        logits: [positions, vocab].
        on: whether the fix is on.

    Returns:
        [positions, vocab], float32.
    """
    if on and getattr(sampler, "logprobs_mode", "").endswith("logits"):
        return logits.to(torch.float32)
    return sampler.compute_logprobs(logits)
