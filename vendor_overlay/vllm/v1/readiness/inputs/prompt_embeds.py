"""Fix ``prompt-embeds``: with drafts in flight, the model reads the right token ids.

With ``--enable-prompt-embeds``, 0.22.0's runner embeds the token ids at positions flagged in
``is_token_ids``, and reads prompt embeddings at all other positions. Under async scheduling, a step
with drafts is prepared before the host knows the number of accepted drafts. Positions count all
drafts as accepted, but flags are set for one token per step. From the second step with drafts on,
flags are missing or left by the row's previous request, and the model reads inputs of an earlier
step, often of another request. (https://github.com/vllm-project/vllm/pull/57356)
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs

from typing import TYPE_CHECKING

from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    import numpy as np


class PromptEmbeds(Feature):
    """Sets the ``is_token_ids`` flags of one batch."""

    pooling = True

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """See :meth:`Feature.mark_tokens`."""
        flags |= positions >= self.batch.num_prompt_tokens[rows]
