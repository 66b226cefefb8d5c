"""Fix ``undrafted-rows``: a hybrid model's row without drafts continues from its own state.

With drafts, a Mamba layer (Mamba 2, gated delta net) keeps one state per verified token, and the
row's next step continues from the state after its last accepted token. 0.22.0 passes the index of
this state to the layers only if the step has drafts, and gated delta nets use the index only for
rows with drafts. A row without drafts (no n-gram match, or an output close to its limit) continues
from the state after its first token of the previous step, and all its later tokens are wrong. Here
such rows count as rows with drafts, and the layers compute the same number of tokens. Only steps
with a row that has just accepted a draft are changed. Not fixed: steps without drafts that also
recompute a preempted request's output in a prefill chunk as short as a decode.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata
# mirrors: vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build
# mirrors: vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Draft count set for a row without drafts. If all were 0, the step would not count as drafted.
_NONE = 1


def include(runner: "GPUModelRunner", drafted: bool, requests: int) -> bool:
    """Count decoding rows without drafts as drafted, if their Mamba state depends on it.

    ``drafted`` is whether the step has drafts. ``requests`` excludes padding. Returns True to build
    metadata as for a step with drafts; False to fall back to upstream.
    """
    hybrid = runner.speculative_config and runner.model_config.is_hybrid
    if not hybrid or registry.UNDRAFTED_ROWS not in switch.enabled():
        return False
    batch, counts = runner.input_batch, runner.num_decode_draft_tokens.np
    lengths = np.diff(runner.query_start_loc.np[: requests + 1])
    decoding = batch.num_computed_tokens_cpu[:requests] >= batch.num_prompt_tokens[:requests]
    undrafted = decoding & (lengths == 1)
    if drafted:
        undrafted &= counts[:requests] < 0
    if not (undrafted & (runner.num_accepted_tokens.np[:requests] > 1)).any():
        return False
    if not drafted:
        # A short prefill chunk of a preempted request's output would count as a decode.
        if (decoding & (lengths > 1) & (lengths <= runner.uniform_decode_query_len)).any():
            return False
        counts.fill(-1)
    counts[:requests][undrafted] = _NONE
    return True
