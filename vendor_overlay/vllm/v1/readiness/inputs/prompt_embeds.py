"""Fix ``prompt-embeds``: with drafts in flight, the model reads the right token ids.

With ``--enable-prompt-embeds`` 0.22.0's runner embeds the tokens at positions marked in
``is_token_ids``, and reads prompt embeddings at all others. Under async scheduling a step with
drafts is prepared before the host knows the number of accepted drafts: positions count all of them,
while the flags are written as if each step added one token. From the second step with drafts on,
flags are missing, or belong to the row's earlier request. At these positions the model reads stale
inputs of an earlier step, often of another request. (https://github.com/vllm-project/vllm/pull/57356)
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs

from typing import TYPE_CHECKING

from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    import numpy as np


class PromptEmbeds(Feature):
    """Token flags of one batch's steps."""

    pooling = True

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """Mark positions after the prompt as token ids: they never hold embeddings."""
        flags |= positions >= self.batch.num_prompt_tokens[rows]
