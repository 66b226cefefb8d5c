"""Fix ``allowed-tokens``: a request's ``allowed_token_ids`` do not restrict other requests.

0.22.0 keeps forbidden tokens in a mask with one row per request. Two methods apply a request's mask
to another request. ``condense`` copies the mask of the last row into a gap, and leaves the original
to the row's next request, which may not have a mask. ``swap_states`` swaps two masks by assigning
views, so that both rows get the same mask. (https://github.com/vllm-project/vllm/issues/43894)
"""

# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.swap_states
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.condense

from vllm.v1.readiness.feature import Feature


class AllowedTokens(Feature):
    """Mask of one batch, which is None if no request has allowed tokens."""

    pooling = True

    def clear_mask(self, row: int) -> None:
        """Clear a mask that ``condense`` has copied into another row."""
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        if mask is not None:
            mask[row] = False

    def swap_masks(self, one: int, other: int) -> bool:
        """Swap the masks of two rows."""
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        if mask is not None:
            mask[[one, other]] = mask[[other, one]]
        return True
