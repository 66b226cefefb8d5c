"""Fix ``undrafted-rows``: a hybrid model's row without drafts continues from its own state.

With drafts, a recurrent layer (Mamba 2, gated delta net) keeps one state per verified token, and a
row's next step continues from the state of its last accepted token. 0.22.0 passes the state's index
to the layers only if the step has drafts, and gated delta nets use it only for rows with drafts. A
row without drafts (n-grams without a match, an output close to its limit) then continues from the
state after its first token of the previous step, and stays wrong.

Here such rows count as rows with drafts. The number of tokens that the layers compute is unchanged.
Only steps in which such a row has just accepted a draft are affected, except steps that also
recompute a preempted request's output in a prefill chunk as short as a decode.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata
# mirrors: vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build
# mirrors: vllm.v1.attention.backends.mamba_attn:BaseMambaAttentionMetadataBuilder

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Draft count of a row without drafts; a step of zeros would count as a step without drafts.
_NONE = 1


class UndraftedRows(Feature):
    """Rows without drafts of one batch."""

    pooling = True

    def include_undrafted(
        self, runner: "GPUModelRunner", drafted: bool, requests: int
    ) -> bool | None:
        """Count decoding rows without drafts as drafted, if their state depends on it."""
        if not (runner.speculative_config and runner.model_config.is_hybrid):
            return None
        batch, counts = runner.input_batch, runner.num_decode_draft_tokens.np
        lengths = np.diff(runner.query_start_loc.np[: requests + 1])
        decoding = batch.num_computed_tokens_cpu[:requests] >= batch.num_prompt_tokens[:requests]
        undrafted = decoding & (lengths == 1)
        if drafted:
            undrafted &= counts[:requests] < 0
        if not (undrafted & (runner.num_accepted_tokens.np[:requests] > 1)).any():
            return None
        if not drafted:
            # A short prefill chunk of a preempted request's output would count as a decode.
            if (decoding & (lengths > 1) & (lengths <= runner.uniform_decode_query_len)).any():
                return None
            counts.fill(-1)
        counts[:requests][undrafted] = _NONE
        return True
