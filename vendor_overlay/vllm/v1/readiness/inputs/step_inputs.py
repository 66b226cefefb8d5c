"""Feature ``step-inputs``: a step's requests and inputs are updated for the whole batch at once.

In each step, 0.22.0's runner loops over all requests in Python, although most of them only continue
by one token. It then uploads about ten buffers one by one, and launches a kernel each for positions
and slot mappings. Here a few numpy operations update all requests that continue. One upload carries
a step's inputs, and one kernel writes all buffers on the device: positions, lengths, slot mappings,
sampled tokens and padding. Upstream's code still updates requests that come, leave or move, and all
if few continue. Steps with drafts, and unrecognised runners, fall back to upstream. Every value
that a later step reads equals upstream's.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_mrope_positions
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._calc_xdrope_positions
# mirrors: vllm.v1.worker.gpu_input_batch:InputBatch.update_req_spec_token_ids
# mirrors: vllm.v1.worker.block_table:BlockTable.append_row
# mirrors: vllm.v1.worker.block_table:BlockTable.compute_slot_mapping
# mirrors: vllm.v1.worker.block_table:_compute_slot_mapping_kernel

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.kv_cache_interface import CrossAttentionSpec, EncoderOnlyAttentionSpec
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import gauges, originals
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.inputs.input_ids import previous_rows
from vllm.v1.readiness.inputs.step_metadata import StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

#: Methods of runners, batches and block tables that are skipped, or not called for every row or
#: group. None may be overridden.
_RUNNERS = (
    "_prepare_input_ids",
    "_compute_prev_positions",
    "_get_cumsum_and_arange",
    "_calc_mrope_positions",
    "_calc_xdrope_positions",
)
_BATCHES = ("update_req_spec_token_ids",)
_TABLES = ("append_row", "commit_block_table", "compute_slot_mapping")

#: Fewest continuing requests that are updated together. The numpy operations take 0.14 ms, as long
#: as upstream's loop takes for some 30 requests.
ENOUGH = 24
#: Most rows whose token ids are gathered one by one.
_FEW = 8

_NO_REQUESTS = CachedRequestData.make_empty()


class Rows(NamedTuple):
    """A step's requests, by row."""

    lengths: np.ndarray  #: int32 [rows], number of tokens in the step.
    ends: np.ndarray  #: int32 [rows], index after the last token in the step.
    computed: np.ndarray  #: int32 [rows], number of computed tokens.
    discarded: np.ndarray  #: bool [rows], whether the sampled token is dropped.
    #: int [rows], row in the previous step, or -1; None if the host has all tokens.
    previous: np.ndarray | None
    #: int32 [tokens], token ids on the host; None if each request's only token is on the device. If
    #: ``previous`` has a request's row, the request's last token id is undefined.
    tokens: np.ndarray | None


class StepInputs(Feature):
    """Prepares a runner's step inputs."""

    def __init__(self, batch: "InputBatch", metadata: StepMetadata) -> None:
        super().__init__(batch)
        self._metadata = metadata
        #: The runner's KV cache config at the last check, and whether the runner was supported.
        self._cache: object = None
        self._supported = False
        #: Skipped methods of a supported runner, and their values at the check.
        self._skipped = originals.Watch(())
        self._device: _Device | None = None
        self._tables: list[BlockTable] = []
        #: The last step's request ids, sampling metadata, rows and states.
        self._ids: list[str] = []
        self._ids_of: SamplingMetadata | None = None
        self._rows = np.empty(0, np.intp)
        self._states: list[CachedRequestState] = []
        #: The last step's sampling metadata, if all its rows decoded, and its computed tokens.
        self._decoded: SamplingMetadata | None = None
        self._computed = np.empty(0, np.int32)

    def warm_up(self) -> None:
        """Compile the kernel, with and without sampled tokens."""
        device = self.batch.device
        if device.type == "cpu":
            return
        from vllm.v1.readiness.kernels.prepare_inputs import launch

        ints = torch.ones(16, dtype=torch.int32, device=device)
        longs = ints.to(torch.int64)
        buffers = SimpleNamespace(
            num_computed_tokens=ints,
            seq_lens=ints[:1],
            positions=longs,
            query_start_loc=SimpleNamespace(gpu=ints),
            discard_request_mask=SimpleNamespace(gpu=ints.to(torch.bool)),
            input_ids=SimpleNamespace(gpu=ints),
        )
        for sampled in (None, ints.view(16, 1)):
            launch(buffers, ints, 1, 1, True, sampled, ints, longs.view(2, 8)[:0])

    def choose_slot_mappings(self, runner: "GPUModelRunner") -> None:
        """Allocate the buffers, whose addresses depend on the chosen slot mappings."""
        self._check(runner)

    def lose_block_tables(self) -> None:
        """Have the device's buffers allocated again by the next step: sleep mode discards them."""
        self._cache = None
        self._metadata.lose_block_tables()

    def forget_step(self) -> None:
        """Leave the step's metadata and the next step's M-RoPE positions to upstream."""
        self._decoded = None
        self._metadata.forget_step()

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Release the request states of the last step, the removed one's among them."""
        self._ids, self._ids_of, self._states, self._decoded = [], None, [], None

    def advance(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> "SchedulerOutput":
        """Update requests that continue; return the step without them, or whole to fall back."""
        cached = scheduled.scheduled_cached_reqs
        if (
            len(cached.req_ids) < ENOUGH
            or cached.resumed_req_ids
            or scheduled.scheduled_spec_decode_tokens
            or not self._check(runner)
            or not self._look_up(runner, cached.req_ids)
        ):
            return scheduled
        batch, rows, states = self.batch, self._rows, self._states
        ends = batch.num_prompt_tokens[rows]
        ends += np.fromiter(cached.num_output_tokens, ends.dtype, len(rows))
        if (ends < batch.num_tokens_no_spec[rows]).any():
            return scheduled  # an output is truncated
        for state, number in zip(states, cached.num_computed_tokens, strict=True):
            state.num_computed_tokens = number
        computed = batch.num_computed_tokens_cpu
        computed[rows] = np.fromiter(cached.num_computed_tokens, computed.dtype, len(rows))
        if any(cached.new_block_ids):
            for index, new in enumerate(cached.new_block_ids):
                if new is not None:
                    for blocks, ids in zip(states[index].block_ids, new, strict=False):
                        blocks.extend(ids)
                    batch.block_table.append_row(new, int(rows[index]))
        rest = object.__new__(type(scheduled))
        vars(rest).update(vars(scheduled), scheduled_cached_reqs=_NO_REQUESTS)
        return rest

    def _look_up(self, runner: "GPUModelRunner", ids: list[str]) -> bool:
        """Find the rows and states of requests; return whether all requests are in the batch."""
        batch = self.batch
        if self._ids_of is not batch.sampling_metadata or ids != self._ids:
            try:
                rows = [*map(batch.req_id_to_index.__getitem__, ids)]
            except KeyError:
                return False
            self._rows = np.array(rows, np.intp)
            self._states = [*map(runner.requests.__getitem__, ids)]
            self._ids, self._ids_of = ids, batch.sampling_metadata
        return True

    def _check(self, runner: "GPUModelRunner") -> bool:
        """Return whether the runner is supported; make the device's buffers for a new KV cache."""
        cache = getattr(runner, "kv_cache_config", None)
        if cache is None:
            return False
        if cache is not self._cache:
            self._cache = cache
            self._supported = is_supported(runner)
            if self._supported:
                tables = runner.input_batch.block_table.block_tables
                self._tables = [table for table in tables if table.maps_slots]
                # Without speculative decoding, nothing else writes these.
                runner.num_accepted_tokens.np.fill(1)
                runner.num_accepted_tokens.gpu.fill_(1)
                if runner.device.type != "cpu":
                    self._device = _Device(runner, self._tables)
                self._skipped = originals.Watch(_skipped(runner))
        elif self._supported and self._skipped.changed():
            self._supported = is_supported(runner)
            if not self._supported:
                gauges.fall_back(registry.STEP_INPUTS, gauges.REPLACED)
                logger.warning_once(
                    "Readiness overlay: methods that step-inputs skips were replaced. vLLM's own "
                    "code prepares all steps."
                )
        return self._supported

    def prepare(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", lengths: np.ndarray
    ) -> tuple[torch.Tensor, None] | None:
        """Prepare a step's inputs, and return the result of ``_prepare_inputs``; None to fall back.

        ``lengths``, int32 [requests], is the number of tokens per request in the step.
        """
        if scheduled.scheduled_spec_decode_tokens or not self._check(runner):
            self._decoded = None
            return None
        batch, count, total = self.batch, self.batch.num_reqs, scheduled.total_num_scheduled_tokens
        computed = batch.num_computed_tokens_cpu[:count]
        if (runner.uses_mrope or runner.uses_xdrope_dim > 0) and not self._rotate(
            runner, computed, total
        ):
            return None
        batch.block_table.commit_block_table(count)  # calls BlockTables.commit
        starts = runner.query_start_loc.np
        ends = starts[1 : count + 1]
        starts[0] = 0
        np.cumsum(lengths, out=ends)
        starts[count + 1 :] = total
        seq_lens = runner.optimistic_seq_lens_cpu.numpy()
        np.add(computed, lengths, out=seq_lens[:count])
        seq_lens[count:] = 0
        discarded = runner.discard_request_mask.np[:count]
        np.less(seq_lens[:count], batch.num_tokens_no_spec[:count], out=discarded)
        sampled = batch.prev_sampled_token_ids
        previous = None if sampled is None else previous_rows(batch, count)
        tokens = None
        if previous is None or total > count or previous.min() < 0:
            tokens = _gather(runner, lengths, ends, computed, previous)
        rows = Rows(lengths, ends, computed, discarded, previous, tokens)
        if self._device is None:
            logits_indices = write_on_cpu(runner, rows, sampled, self._tables)
        else:
            logits_indices = self._device.write(runner, rows, sampled)
        if runner.lora_config:
            runner.set_active_loras(batch, lengths, np.ones(count, np.int32))
        self._metadata.inputs_prepared()
        return logits_indices, None

    def _rotate(self, runner: "GPUModelRunner", computed: np.ndarray, total: int) -> bool:
        """Advance the M-RoPE or XD-RoPE positions of a decoding batch; False to fall back."""
        batch, count = self.batch, len(computed)
        last, self._decoded = self._decoded, None
        if total == count and (computed >= batch.num_prompt_tokens[:count]).all():
            self._decoded = batch.sampling_metadata
        before, self._computed = self._computed, computed.copy()
        if not (last is self._decoded is not None and np.array_equal(computed, before + 1)):
            return False
        positions = runner.mrope_positions if runner.uses_mrope else runner.xdrope_positions
        positions.gpu[:, :count] += 1
        return True


class _Device:
    """Staging buffers of the inputs, and the kernel's arguments for block tables."""

    def __init__(self, runner: "GPUModelRunner", tables: "Sequence[BlockTable]") -> None:
        size = 4 * runner.max_num_reqs + runner.max_num_tokens
        # One buffer suffices. Under async scheduling the runner waits for the previous step's
        # uploads, and otherwise the host has read the previous step's tokens.
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=runner.pin_memory)
        self._words = self._host.numpy()
        self._sent = torch.zeros(size, dtype=torch.int32, device=runner.device)
        self._logits_indices = torch.zeros(
            runner.max_num_reqs, dtype=torch.int32, device=runner.device
        )
        arguments = table_arguments(tables)
        arguments = arguments.pin_memory() if runner.pin_memory else arguments
        self._table_arguments = arguments.to(runner.device, non_blocking=True)

    def write(
        self, runner: "GPUModelRunner", rows: Rows, sampled: torch.Tensor | None
    ) -> torch.Tensor:
        """Write all buffers on the device; see :func:`write_on_cpu`."""
        from vllm.v1.readiness.kernels.prepare_inputs import launch

        size, count, total = pack(rows, self._words), len(rows.ends), int(rows.ends[-1])
        self._sent[:size].copy_(self._host[:size], non_blocking=True)
        launch(
            *(runner, self._sent, count, total, rows.tokens is not None, sampled),
            *(self._logits_indices, self._table_arguments),
        )
        return self._logits_indices[:count]


def pack(rows: Rows, words: np.ndarray) -> int:
    """Write ``rows`` to ``words``, int32, and return the number of words written.

    The kernel expects ends, computed tokens, previous rows, discarded flags, and token ids if any.
    """
    count = len(rows.ends)
    words[:count] = rows.ends
    words[count : 2 * count] = rows.computed
    words[2 * count : 3 * count] = -1 if rows.previous is None else rows.previous
    size = 4 * count
    words[3 * count : size] = rows.discarded
    if rows.tokens is not None:
        words[size : size + len(rows.tokens)] = rows.tokens
        size += len(rows.tokens)
    return size


def write_on_cpu(
    runner: "GPUModelRunner",
    rows: Rows,
    sampled: torch.Tensor | None,
    tables: "Sequence[BlockTable]",
) -> torch.Tensor:
    """Write the buffers of a runner on the CPU, as ``kernels.prepare_inputs`` does on a GPU.

    ``sampled`` [previous rows, 1] is the last step's tokens; None if ``rows`` has all tokens. Slot
    mappings are computed for ``tables``. Returns the index of each request's last token, int32
    [rows].
    """
    count, total = len(rows.ends), int(rows.ends[-1])
    runner.query_start_loc.copy_to_gpu()
    runner.discard_request_mask.copy_to_gpu(count)
    runner.seq_lens.copy_(runner.optimistic_seq_lens_cpu)
    runner.num_computed_tokens[:count] = torch.from_numpy(rows.computed)
    row_of = np.repeat(runner.arange_np[:count], rows.lengths)
    places = (rows.computed - rows.ends + rows.lengths)[row_of] + runner.arange_np[:total]
    positions = runner.positions[:total]
    positions.copy_(torch.from_numpy(places))
    ids = runner.input_ids.gpu
    if rows.tokens is not None:
        ids[:total] = torch.from_numpy(rows.tokens)
    if sampled is not None and rows.previous is not None:
        known = rows.previous >= 0
        ids[rows.ends[known] - 1] = sampled[rows.previous[known], 0].to(ids.dtype)
    for table in tables:
        slots = table.slot_mapping.gpu
        blocks = table.block_table.gpu[torch.from_numpy(row_of), positions // table.block_size]
        slots[:total] = positions % table.block_size + blocks.to(torch.int64) * table.block_size
        slots[total:] = -1
    return runner.query_start_loc.gpu[1 : count + 1] - 1


def table_arguments(tables: "Sequence[BlockTable]") -> torch.Tensor:
    """Return the kernel's arguments for block tables, int64 [groups, 5], on the host.

    The columns are the address of the table on the device, the table's stride, the block size in
    tokens, and the address and length of the slot mapping.
    """
    values = [
        (
            table.block_table.gpu.data_ptr(),
            table.block_table.gpu.stride(0),
            table.block_size,
            table.slot_mapping.gpu.data_ptr(),
            len(table.slot_mapping.gpu),
        )
        for table in tables
    ]
    return torch.tensor(values, dtype=torch.int64).view(-1, 5)


def _gather(
    runner: "GPUModelRunner",
    lengths: np.ndarray,
    ends: np.ndarray,
    computed: np.ndarray,
    previous: np.ndarray | None,
) -> np.ndarray:
    """Gather a step's token ids on the host; see :attr:`Rows.tokens`."""
    batch, total = runner.input_batch, int(ends[-1])
    if previous is not None:
        wanted = np.flatnonzero((lengths > 1) | (previous < 0))
        if len(wanted) <= _FEW:
            tokens: np.ndarray = np.empty(total, np.int32)
            for row in wanted.tolist():
                end, length, first = int(ends[row]), int(lengths[row]), int(computed[row])
                tokens[end - length : end] = batch.token_ids_cpu[row, first : first + length]
            return tokens
    width = batch.token_ids_cpu.shape[1]
    numbers = runner.arange_np
    firsts = numbers[: len(ends)] * width + computed - ends + lengths
    indices = np.repeat(firsts, lengths) + numbers[:total]
    flat = batch.token_ids_cpu_tensor.view(-1)
    tokens = flat.index_select(0, torch.from_numpy(indices)).numpy()
    return tokens


def _skipped(runner: "GPUModelRunner") -> Iterator[tuple[object, tuple[str, ...]]]:
    """Yield the owners of the skipped methods, with their names."""
    yield runner, _RUNNERS
    yield runner.input_batch, _BATCHES
    yield runner.input_batch.block_table, _TABLES
    for table in runner.input_batch.block_table.block_tables:
        yield table, _TABLES


def is_supported(runner: "GPUModelRunner") -> bool:
    """Return whether the inputs of a runner are known, and its methods vLLM's own."""
    if not hasattr(runner, "device"):
        return False  # made without vLLM's constructor
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
        and all(originals.all_vllms(owner, names) for owner, names in _skipped(runner))
        and all(table.pcp_world_size == table.dcp_world_size == 1 for table in tables)
        and len(tables) == len(groups)
        and not any(
            isinstance(group.kv_cache_spec, EncoderOnlyAttentionSpec | CrossAttentionSpec)
            for group in groups
        )
    )
