"""Fix ``allowed-tokens``: the ``allowed_token_ids`` of one request bind no other request.

0.22.0 keeps the tokens that each request may not have in a mask of one row a request. A row
of it reaches other requests in two ways: ``condense`` copies the last row into a gap and
leaves the original for the next request, which may not ask for a mask of its own; and
``swap_states`` exchanges two rows by assigning views, so that both end with the same one.
(https://github.com/vllm-project/vllm/issues/43894)
"""

# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.swap_states
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.condense

from typing import TYPE_CHECKING

from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    pass


class AllowedTokens(Feature):
    """The mask of one batch; where no request has allowed tokens there is none."""

    pooling = True

    def clear_mask(self, row: int) -> None:
        """Clear the mask of a row that ``condense`` has copied into another."""
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        if mask is not None:
            mask[row] = False

    def swap_masks(self, one: int, other: int) -> bool:
        """Swap the masks of two rows."""
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        if mask is not None:
            mask[[one, other]] = mask[[other, one]]
        return True
