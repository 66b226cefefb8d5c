"""Fix ``prompt-embeds``: with drafts in flight, the model is given the tokens that it reads.

With ``--enable-prompt-embeds`` 0.22.0's runner embeds the tokens at positions that
``is_token_ids`` names, and takes the embeddings of a prompt elsewhere. Under async scheduling
a step with drafts is made before the host knows how many of the last drafts were accepted:
positions count them all, while the flags are written where each step adds one token. From the
second step with drafts on, flags are missing, or are those of a request that had the row
before. There the model reads whatever an earlier step, often another request's, left in the
buffer. (https://github.com/vllm-project/vllm/pull/57356)
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs

from typing import TYPE_CHECKING

from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    import numpy as np


class PromptEmbeds(Feature):
    """The flags of one batch's steps."""

    pooling = True

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """Mark the positions behind a prompt as tokens, which they always are.

        Args:
            flags: [tokens] bool, whether the model is given a token; changed in place.
            rows: [tokens] row of each token.
            positions: [tokens] position of each token in its request.
        """
        flags |= positions >= self.batch.num_prompt_tokens[rows]
