"""Fix ``draft-gates``: a gated delta net computes each drafted token with the token's own gates.

In a step in which only some rows have drafts, a gated delta net (Qwen3-Next, Qwen3.5) computes the
rows with drafts and the other rows separately. For the rows with drafts, 0.22.0 selects the
queries, keys and values, but passes the gates ``a`` and ``b`` of all tokens to the kernel, which
reads the first ones. Rows without drafts may precede rows with drafts: prefill chunks as short as a
decode, outputs close to max_model_len, and outputs without an n-gram match. The state of a row with
drafts is then updated with the gates of other tokens, possibly of another client, and all its later
tokens are wrong. Here the gates are selected as the queries are.
(https://github.com/vllm-project/vllm/pull/51812)
"""

# mirrors: vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention

from typing import TYPE_CHECKING

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata


def select(metadata: "GDNAttentionMetadata", gates: torch.Tensor) -> torch.Tensor:
    """Return the gates of the tokens of rows with drafts.

    Args:
        metadata: of a step with drafts.
        gates: [tokens, heads], of all tokens of the step.

    Returns:
        [drafted tokens, heads]; ``gates`` itself if all rows have drafts, or with the fix off.
    """
    mixed = metadata.num_prefills or metadata.num_decodes
    if not mixed or registry.DRAFT_GATES not in switch.enabled():
        return gates
    assert metadata.spec_token_indx is not None
    return gates.index_select(0, metadata.spec_token_indx)
