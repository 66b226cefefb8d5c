"""Fix ``row-state``: a row keeps no state of an earlier request.

In 0.22.0's InputBatch

- block ids stay in a row that ``condense`` has moved. Only dummy runs read them there; for those a
  Mamba layer writes its state into blocks that now belong to another request;
- the prompt embeddings of a request that left stay with its row, or move with it. The next
  request's tokens are embedded over them, so that they only cost memory and time;
- a request whose prompt is embeddings inherits the token ids of its row, and is penalised for them.
  Here the row is zeroed, as a fresh row is;
- the flag that a pooled request needs its prompt's tokens stays when its row moves, and prompts
  stay when rows are swapped and nothing else has changed;
- a request to pool every token that is preempted between two chunks of its prompt keeps the hidden
  states of the first, and returns them twice (https://github.com/vllm-project/vllm/pull/55192).
"""

# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.add_request
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.remove_request
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.condense
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.swap_states
# mirrors: vllm.v1.pool.metadata:PoolingStates

from typing import TYPE_CHECKING

from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class RowState(Feature):
    """Rows of one batch."""

    pooling = True

    def add_request(self, request: "CachedRequestState") -> None:
        """Zero the row for a prompt of embeddings; drop pooled states if the prompt restarts."""
        if request.prompt_token_ids is None:
            row = self.batch.req_id_to_index[request.req_id]
            self.batch.token_ids_cpu[row, : self.batch.num_prompt_tokens[row]] = 0
        if request.pooling_states is not None and request.num_computed_tokens == 0:
            request.pooling_states.clean()

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Drop the row's prompt embeddings."""
        self.batch.req_prompt_embeds.pop(row, None)

    def move_row(self, source: int, target: int) -> None:
        """Move the flag of a pooled request, and clear the blocks of its old row."""
        needs = self.batch.logits_processing_needs_token_ids
        needs[target] = needs[source]
        self.batch.block_table.clear_row(source)

    def swap_rows(self, one: int, other: int) -> None:
        """Swap the flags of pooled requests, and gather their prompts again."""
        needs = self.batch.logits_processing_needs_token_ids
        needs[[one, other]] = needs[[other, one]]
        # A pooling model records the swap nowhere else; other models read the builder's moves.
        self.batch.batch_update_builder.batch_changed = True
