"""Fix ``prompt-logits``: ``logprobs_mode`` applies to the logprobs of prompts, too.

In every mode, 0.22.0 returns logprobs for the tokens of a prompt. Here ``raw_logits`` and
``processed_logits`` return logits. The two modes are equal for prompts, because no logits processor
runs on prompts.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict
# mirrors: vllm.v1.sample.sampler:Sampler.compute_logprobs

from typing import TYPE_CHECKING

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.sample.sampler import Sampler


def scores(sampler: "Sampler", logits: torch.Tensor) -> torch.Tensor | None:
    """Return the logits in float32 if the mode selects logits; None to compute logprobs."""
    reports_logits = getattr(sampler, "logprobs_mode", "").endswith("logits")
    if reports_logits and registry.PROMPT_LOGITS in switch.enabled():
        return logits.to(torch.float32)
    return None
