"""Fix ``allowed-tokens``: a request's ``allowed_token_ids`` do not restrict other requests.

0.22.0 keeps forbidden tokens in a mask with one row per request. ``condense`` copies the last row
into a gap without clearing the original, which then restricts the next request in that row.
``swap_states`` swaps two rows by assigning views, which leaves the same mask in both.
(https://github.com/vllm-project/vllm/issues/43894)
"""

# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.swap_states
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.condense

from vllm.v1.readiness.feature import Feature


class AllowedTokens(Feature):
    """Masks of one batch for allowed tokens."""

    pooling = True

    def clear_mask(self, row: int) -> None:
        """Clear the mask of a row, if the batch has masks."""
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        if mask is not None:
            mask[row] = False

    def swap_masks(self, one: int, other: int) -> bool:
        """Swap the masks of two rows, if the batch has masks; return True."""
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        if mask is not None:
            mask[[one, other]] = mask[[other, one]]
        return True
