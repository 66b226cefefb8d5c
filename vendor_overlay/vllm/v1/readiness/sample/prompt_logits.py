"""Fix ``prompt-logits``: ``logprobs_mode`` applies to the logprobs of prompts, too.

The setting says what is returned as logprobs and as prompt logprobs. 0.22.0 returns logprobs
for prompts in each of its modes. Here a prompt gets logits with ``raw_logits`` and
``processed_logits``. They are the same for it: no logits processor works on a prompt.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict
# mirrors: vllm.v1.sample.sampler:Sampler.compute_logprobs

from typing import TYPE_CHECKING

import torch
from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.sample.sampler import Sampler


class PromptLogits(Feature):
    """The scores of prompts of one batch."""

    pooling = True

    def prompt_scores(self, sampler: "Sampler", logits: torch.Tensor) -> torch.Tensor | None:
        """Return a prompt's logits where the mode asks for logits.

        Args:
            sampler: the runner's; one without a mode gives logprobs.
            logits: [positions, vocab].

        Returns:
            float32 [positions, vocab], or None for logprobs.
        """
        if getattr(sampler, "logprobs_mode", "").endswith("logits"):
            return logits.to(torch.float32)
        return None
