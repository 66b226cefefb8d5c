"""Rows that hold what is their own request's: allowed tokens, and what else stays behind.

Upstream keeps the tokens that each request may not have in a mask with a row for each of the
batch's. The mask of one request reaches others in two ways. ``condense`` copies the last
row's into a gap and leaves it where it was, too, for the next request that is given the row
and asks for no mask of its own. ``swap_states`` exchanges two rows by assigning views, so
that both end with the same one. Here the row that was left is cleared, and the exchange
keeps a copy.

Other state of a row has faults of the same kind, which are mended with it:

- the block ids stay in the row that ``condense`` has left. Nothing reads them there but dummy
  runs, for which a Mamba layer then writes its state into blocks that are no longer the row's;
- the prompt embeddings of a request that has left stay with the row, or follow it. The next
  request's tokens are embedded over them, so that they only take memory and time;
- a request whose prompt is embeddings finds in its row the tokens of those who had it before,
  and is penalised for them. Here it finds what a row holds that nobody has had: zeros;
- whether a pooled request needs its prompt's tokens stays with the row when the request
  moves, and where rows are exchanged nothing else having changed, so do the prompts, which
  leaves it without its own.

This is where an overlaid engine may give other tokens than stock does: what the requests asked
for. Where no request has allowed tokens there is no mask, and none is made.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class AllowedTokens:
    """The rows of one batch."""

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch

    def add_request(self, request: "CachedRequestState") -> None:
        """Zero the row for prompt-embedding requests."""
        if request.prompt_token_ids is None:
            row = self.batch.req_id_to_index[request.req_id]
            self.batch.token_ids_cpu[row, : self.batch.num_prompt_tokens[row]] = 0

    def remove_request(self, row: int) -> None:
        """Let go what a request that leaves the batch has in its row."""
        self.batch.req_prompt_embeds.pop(row, None)

    def move_row(self, source: int, target: int) -> None:
        """Called when ``condense`` has moved the blocks of a row into an empty one."""
        needs = self.batch.logits_processing_needs_token_ids
        needs[target] = needs[source]
        self.batch.block_table.clear_row(source)

    def swap_rows(self, one: int, other: int) -> None:
        """Called when ``swap_states`` has exchanged the blocks of two rows."""
        needs = self.batch.logits_processing_needs_token_ids
        needs[[one, other]] = needs[[other, one]]
        # Else a model that pools would keep the prompts of the rows as they were; others ask
        # the builder what was moved.
        self.batch.batch_update_builder.batch_changed = True

    def leave_mask(self, row: int) -> None:
        """Called when ``condense`` has copied the mask of a row into another."""
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        if mask is not None:
            mask[row] = False

    def swap_masks(self, one: int, other: int) -> None:
        """Exchange the masks of two rows, if there are any."""
        mask = self.batch.allowed_token_ids_mask_cpu_tensor
        if mask is None:
            return
        kept = mask[one].clone()
        mask[one] = mask[other]
        mask[other] = kept
