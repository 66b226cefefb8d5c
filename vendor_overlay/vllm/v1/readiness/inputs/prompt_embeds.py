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

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.worker.gpu_input_batch import InputBatch


def mark_tokens(
    batch: "InputBatch", flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray"
) -> None:
    """Set ``flags``, bool [tokens], for tokens after the prompt: they are token ids.

    ``rows`` and ``positions`` [tokens] are each token's row and its position in the request.
    """
    if registry.PROMPT_EMBEDS in switch.enabled():
        flags |= positions >= batch.num_prompt_tokens[rows]
