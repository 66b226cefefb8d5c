"""Fix ``allowed-tokens``: a request's ``allowed_token_ids`` do not restrict other requests.

0.22.0 keeps forbidden tokens in a mask with one row per request. ``condense`` copies the last row
into a gap without clearing the original, which then restricts the next request in that row.
``swap_states`` swaps two rows by assigning views, which leaves the same mask in both.
(https://github.com/vllm-project/vllm/issues/43894)
"""

# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.swap_states
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.condense

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch


def clear_mask(batch: "InputBatch", row: int) -> None:
    """Clear the mask of a row that ``condense`` has moved, if the batch has masks."""
    mask = batch.allowed_token_ids_mask_cpu_tensor
    if mask is not None and registry.ALLOWED_TOKENS in switch.enabled():
        mask[row] = False


def swap_masks(batch: "InputBatch", one: int, other: int) -> bool:
    """Swap the masks of two rows, if the batch has masks; False to fall back to upstream."""
    if registry.ALLOWED_TOKENS not in switch.enabled():
        return False
    mask = batch.allowed_token_ids_mask_cpu_tensor
    if mask is not None:
        mask[[one, other]] = mask[[other, one]]
    return True
