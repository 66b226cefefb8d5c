"""Feature ``step-inputs``: decode steps of an unchanged batch are advanced in place.

For each step 0.22.0's runner looks up each request, computes its token positions, fills about ten
buffers and uploads them. While a batch decodes, nearly all of that repeats the previous step: each
request is one token further, and some have a new block.

Here such a step is recognised by the scheduler's output, and because no verb of
:class:`~vllm.v1.readiness.feature.Feature` has reported a change since the previous step.
Unchanged buffers are reused. Values that grow by one are advanced in place: on the host by numpy,
on the device by one kernel, which also copies the sampled tokens and computes each token's slot.
The host uploads only new blocks and, under synchronous scheduling, the tokens. All other steps and
unrecognised runners fall back to upstream, which also fills the buffers that later steps advance.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_mrope_positions
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_xdrope_positions
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.refresh_metadata
# mirrors: vllm.v1.worker.block_table:BlockTable.append_row
# mirrors: vllm.v1.worker.block_table:BlockTable.compute_slot_mapping
# mirrors: vllm.v1.worker.block_table:_compute_slot_mapping_kernel

from collections.abc import Callable, Sequence
from operator import lt
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.readiness.engine.subclasses import all_vllms
from vllm.v1.readiness.feature import Feature, Live
from vllm.v1.readiness.inputs.step_metadata import StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Methods of the runner, the batch and its block tables that a step served here does not call.
_RUNNERS = (
    "_prepare_input_ids",
    "_compute_prev_positions",
    "_get_cumsum_and_arange",
    "_may_reorder_batch",
    "_calc_mrope_positions",
    "_calc_xdrope_positions",
)
_BATCHES = ("update_req_spec_token_ids", "condense")
_TABLES = ("append_row", "commit_block_table", "compute_slot_mapping")


class Decoding:
    """Requests of a batch that decodes, in the scheduler's order.

    Attributes:
        ids: request ids.
        rows: their rows.
        states: their states.
        computed: number of computed tokens per request.
        outputs: output list per request.
        logits_indices: int32 [requests] on the device: index of each row's token in the step.
    """

    __slots__ = ("computed", "ids", "logits_indices", "outputs", "rows", "states")

    def __init__(self, ids: list[str], runner: "GPUModelRunner") -> None:
        rows = runner.input_batch.req_id_to_index
        self.ids = ids
        self.rows = [rows[req_id] for req_id in ids]
        self.states: list[CachedRequestState] = [runner.requests[req_id] for req_id in ids]
        self.outputs = [state.output_token_ids for state in self.states]
        self.computed = [state.num_computed_tokens for state in self.states]
        self.logits_indices: torch.Tensor = runner.query_start_loc.gpu[1 : len(ids) + 1] - 1

    def continues(self, cached: "CachedRequestData") -> bool:
        """Return whether the step adds one token to each request, and cuts no output."""
        lengths = list(map(len, self.outputs))
        return (
            cached.req_ids == self.ids
            and cached.num_computed_tokens == [number + 1 for number in self.computed]
            and (
                cached.num_output_tokens == lengths
                or not any(map(lt, cached.num_output_tokens, lengths))
            )
        )


class StepInputs(Feature):
    """Inputs of one runner's decode steps.

    Attributes:
        changing: callback before the batch changes.
    """

    def __init__(self, batch: "InputBatch", metadata: StepMetadata) -> None:
        super().__init__(batch)
        self._metadata = metadata
        self.changing: Callable[[], None] = lambda: None
        #: Requests of the last step, if upstream prepared it and each had one token.
        self._last: list[str] | None = None
        self._decoding: Decoding | None = None
        #: Whether the batch was advanced for a step that is not prepared yet.
        self._advanced = False
        self._new_blocks = False
        #: The runner's KV cache config when last checked; whether the runner is supported.
        self._cache: object = None
        self._suits = self._small = False
        #: int64 [groups, 4] on the device; see :func:`addresses`.
        self._addresses: torch.Tensor | None = None
        self._tables: list[BlockTable] = []

    @classmethod
    def make(cls, live: "Live") -> "StepInputs":
        """Create the inputs, which tell the batch's metadata when a step begins or is forgotten."""
        metadata = live.find(StepMetadata)
        assert metadata is not None
        return cls(live.batch, metadata)

    def lose_block_tables(self) -> None:
        """Fall back to upstream for the next step."""
        self.forget_step()

    def warm_up(self) -> None:
        """Compile the kernel, for tokens on the device and for uploaded tokens."""
        device = self.batch.device
        if device.type == "cpu":
            return
        from vllm.v1.readiness.kernels.step_inputs import advance

        ints = torch.zeros(4, dtype=torch.int32, device=device)
        longs = ints.to(torch.int64)
        buffers = SimpleNamespace(
            num_computed_tokens=ints,
            seq_lens=ints,
            positions=longs,
            input_ids=SimpleNamespace(gpu=ints),
        )
        for sampled in (None, ints.view(4, 1)):
            advance(buffers, 1, sampled, longs.view(1, 4)[:0])

    def add_request(self, request: "CachedRequestState") -> None:
        """Fall back to upstream for the next step."""
        self.forget_step()

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Fall back to upstream for the next step."""
        self.forget_step()

    def move_row(self, source: int, target: int) -> None:
        """Fall back to upstream for the next step."""
        self.forget_step()

    def swap_rows(self, one: int, other: int) -> None:
        """Fall back to upstream for the next step."""
        self.forget_step()

    def cut(self, req_id: str, length: int) -> None:
        """Fall back to upstream for the next step."""
        self.forget_step()

    def forget_step(self) -> None:
        """Fall back to upstream for the next step."""
        if self._decoding is not None:
            self.changing()
        self._last = self._decoding = None
        self._advanced = False
        self._metadata.forget()

    @property
    def unchanged(self) -> bool:
        """Whether the batch has decoded unchanged, and outputs are small."""
        return self._decoding is not None and self._small

    def advance(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> bool:
        """Advance a decoding batch that has not changed."""
        last, self._last = self._last, None
        if self._advanced:  # the last step ended before its inputs were prepared
            self.forget_step()
        if last is None and self._decoding is None:
            return False
        cached = scheduled.scheduled_cached_reqs
        count = len(cached.req_ids)
        if (
            scheduled.scheduled_new_reqs
            or scheduled.scheduled_spec_decode_tokens
            or scheduled.scheduled_encoder_inputs
            or cached.resumed_req_ids
            or not count == self.batch.num_reqs == scheduled.total_num_scheduled_tokens
            or (self.batch.prev_sampled_token_ids is not None) != runner.use_async_scheduling
        ):
            self.forget_step()
            return False
        decoding = self._decoding
        if decoding is None:
            if cached.req_ids != last or not self._suit(runner) or not _all_decoded(runner, count):
                return False
            decoding = Decoding(cached.req_ids, runner)
        if not decoding.continues(cached):
            self.forget_step()
            return False
        self._decoding = decoding
        self._update(decoding, cached)
        self.batch.refresh_metadata()
        self._advanced = True
        return True

    def _suit(self, runner: "GPUModelRunner") -> bool:
        """Return whether the runner and its batch are supported; update the tables to advance."""
        if runner.kv_cache_config is not self._cache:
            self._cache = runner.kv_cache_config
            self._suits = _suits(runner)
            self._small = self._suits and not runner.routed_experts_initialized
            if self._suits:
                groups = runner.kv_cache_config.kv_cache_groups
                tables = runner.input_batch.block_table.block_tables
                self._tables = [
                    table
                    for table, group in zip(tables, groups, strict=True)
                    if not isinstance(group.kv_cache_spec, MambaSpec)
                ]
                if runner.device.type != "cpu":
                    values = addresses(self._tables)
                    staged = values.pin_memory() if runner.pin_memory else values
                    self._addresses = staged.to(runner.device, non_blocking=True)
        return self._suits

    def _update(self, decoding: Decoding, cached: "CachedRequestData") -> None:
        batch = self.batch
        self._new_blocks = False
        decoding.computed = cached.num_computed_tokens
        for state, number in zip(decoding.states, decoding.computed, strict=True):
            state.num_computed_tokens = number
        batch.num_computed_tokens_cpu[: len(decoding.rows)] += 1
        if not any(cached.new_block_ids):
            return
        for index, new in enumerate(cached.new_block_ids):
            if new is not None:
                self._new_blocks = True
                for blocks, ids in zip(decoding.states[index].block_ids, new, strict=False):
                    blocks.extend(ids)
                batch.block_table.append_row(new, decoding.rows[index])

    def prepare_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", lengths: np.ndarray
    ) -> tuple[torch.Tensor, None] | None:
        """Advance the inputs of a step whose batch was advanced."""
        advanced, self._advanced = self._advanced, False
        decoding, count = self._decoding, self.batch.num_reqs
        if not advanced or decoding is None:
            cached = scheduled.scheduled_cached_reqs
            alone = len(cached.req_ids) == count == scheduled.total_num_scheduled_tokens
            self.forget_step()
            if alone and not scheduled.scheduled_spec_decode_tokens:
                self._last = cached.req_ids
            return None
        if self._new_blocks:
            self.batch.block_table.commit_block_table(count)
        runner.optimistic_seq_lens_cpu[:count] += 1
        sampled = self.batch.prev_sampled_token_ids
        if sampled is None:
            rows = runner.arange_np[:count]
            columns = self.batch.num_computed_tokens_cpu[:count]
            runner.input_ids.np[:count] = self.batch.token_ids_cpu[rows, columns]
            runner.input_ids.copy_to_gpu(count)
        if self._addresses is None:
            advance(runner, count, sampled, self._tables)
        else:
            from vllm.v1.readiness.kernels import step_inputs as kernels

            kernels.advance(runner, count, sampled, self._addresses)
        if runner.uses_mrope:
            runner.mrope_positions.gpu[:, :count] += 1
        elif runner.uses_xdrope_dim > 0:
            runner.xdrope_positions.gpu[:, :count] += 1
        if runner.lora_config:
            runner.set_active_loras(self.batch, lengths, np.ones(count, np.int32))
        self._metadata.begin_step()
        return decoding.logits_indices, None


def advance(
    runner: "GPUModelRunner",
    count: int,
    sampled: torch.Tensor | None,
    tables: "Sequence[BlockTable]",
) -> None:
    """Advance the buffers of a runner on the CPU; see ``kernels.step_inputs``.

    ``sampled`` [rows, 1] is the last step's tokens, or None if ``input_ids`` holds them. Slots are
    computed for ``tables``.
    """
    computed, positions = runner.num_computed_tokens[:count], runner.positions[:count]
    computed += 1
    torch.add(computed, 1, out=runner.seq_lens[:count])
    positions.copy_(computed)
    if sampled is not None:
        runner.input_ids.gpu[:count] = sampled[:, 0]
    rows = torch.from_numpy(runner.arange_np[:count])
    for table in tables:
        blocks = table.block_table.gpu[rows, positions // table.block_size]
        offsets = positions % table.block_size
        torch.add(offsets, blocks, alpha=table.block_size, out=table.slot_mapping.gpu[:count])


def addresses(tables: "Sequence[BlockTable]") -> torch.Tensor:
    """Return the kernel's view of block tables, int64 [groups, 4] on the host.

    Columns: address of the table on the device, its stride, block size in tokens, and address of
    the slot mapping.
    """
    values = [
        (
            table.block_table.gpu.data_ptr(),
            table.block_table.gpu.stride(0),
            table.block_size,
            table.slot_mapping.gpu.data_ptr(),
        )
        for table in tables
    ]
    return torch.tensor(values, dtype=torch.int64).view(-1, 4)


def _all_decoded(runner: "GPUModelRunner", count: int) -> bool:
    """Return whether each row got a token in the last step, after its prompt.

    Models with M-RoPE compute positions of prompts and of outputs differently.
    """
    batch = runner.input_batch
    return (
        not runner.discard_request_mask.np[:count].any()
        and bool((batch.num_computed_tokens_cpu[:count] >= batch.num_prompt_tokens[:count]).all())
        and (not runner.use_async_scheduling or len(batch.prev_req_id_to_index or ()) == count)
    )


def _suits(runner: "GPUModelRunner") -> bool:
    batch = runner.input_batch
    groups = runner.kv_cache_config.kv_cache_groups
    tables = batch.block_table.block_tables
    return (
        runner.device.type in ("cpu", "cuda")
        and runner.speculative_config is None
        and not runner.is_pooling_model
        and not runner.enable_prompt_embeds
        and not runner.model_config.is_encoder_decoder
        and runner.parallel_config.pipeline_parallel_size == 1
        and all_vllms(runner, _RUNNERS)
        and all_vllms(batch, _BATCHES)
        and all_vllms(batch.block_table, _TABLES)
        and all(all_vllms(table, _TABLES) for table in tables)
        and all(table.pcp_world_size == table.dcp_world_size == 1 for table in tables)
        and len(tables) == len(groups)
        and all(_has_slots(group.kv_cache_spec) for group in groups)
    )


def _has_slots(spec: KVCacheSpec) -> bool:
    return not isinstance(spec, EncoderOnlyAttentionSpec | CrossAttentionSpec)
