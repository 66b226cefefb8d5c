"""Fix ``row-state``: a row keeps no state of an earlier request.

In 0.22.0's InputBatch

- ``condense`` leaves block ids in the old row of a moved request. In dummy runs, Mamba layers write
  their states to these blocks, which may belong to another request by then;
- prompt embeddings of a request that has left stay in its row. They cost memory and time, although
  the row's next request overwrites them with the embeddings of its tokens;
- a request with prompt embeddings inherits the token ids of its row, and is penalised for them.
  Here the row is zeroed;
- the flag that a pooling request needs its prompt token ids is not moved with the row. If two rows
  are swapped without another change, the metadata keeps the prompt token ids in the old order;
- an all-token pooling request preempted between two prefill chunks keeps the hidden states of the
  first chunk, and returns them twice (https://github.com/vllm-project/vllm/pull/55192).
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
    """Clears and moves the state of one batch's rows."""

    def add_request(self, request: "CachedRequestState") -> None:
        """Zero the row for a prompt of embeddings; drop pooling states if the prompt restarts."""
        if request.prompt_token_ids is None:
            row = self.batch.req_id_to_index[request.req_id]
            self.batch.token_ids_cpu[row, : self.batch.num_prompt_tokens[row]] = 0
        if request.pooling_states is not None and request.num_computed_tokens == 0:
            request.pooling_states.clean()

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Drop the row's prompt embeddings."""
        self.batch.req_prompt_embeds.pop(row, None)

    def move_row(self, source: int, target: int) -> None:
        """Move the pooling flag, and clear the block ids of the old row."""
        needs = self.batch.logits_processing_needs_token_ids
        needs[target] = needs[source]
        self.batch.block_table.clear_row(source)

    def swap_rows(self, one: int, other: int) -> None:
        """Swap the pooling flags, and mark the batch as changed."""
        needs = self.batch.logits_processing_needs_token_ids
        needs[[one, other]] = needs[[other, one]]
        # Only for other models does upstream add the swap to the builder's moves.
        self.batch.batch_update_builder.batch_changed = True
