"""Feature ``penalties``: penalties from token counts that stay on the device.

On each step upstream recounts every request's tokens from Python lists, for which the host waits
for the newest token. Here each request with a penalty has a slot of counts on the device. Sampled
tokens are counted there, and one pass over the logits applies all three penalties.

The result equals that of ``apply_all_penalties`` bit for bit, on each platform and for each layout
of the logits. The order is repetition, frequency, presence, and each product is rounded before it
is subtracted. A slot is int32 [vocab]: the low 31 bits count output tokens, and the sign bit marks
prompt tokens. With a vocabulary of 151,936, a slot takes 0.61 MB.

Slots use device memory beyond ``gpu_memory_utilization``. If all slots may not fit there, they are
allocated while vLLM profiles memory, which reduces the KV cache by their size.
"""

# mirrors: vllm.v1.sample.ops.penalties:apply_all_penalties
# mirrors: vllm.v1.sample.ops.penalties:_convert_to_tensors
# mirrors: vllm.model_executor.layers.utils:apply_penalties
# mirrors: vllm.model_executor.layers.utils:get_token_bin_counts_and_mask
# mirrors: vllm._custom_ops:apply_repetition_penalties
# mirrors: vllm._custom_ops:apply_repetition_penalties_cuda
# mirrors: vllm._custom_ops:apply_repetition_penalties_torch
# mirrors: vllm.v1.sample.sampler:Sampler.apply_penalties
# mirrors: vllm.v1.sample.rejection_sampler:RejectionSampler.apply_penalties

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import _custom_ops
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.inputs import uploads
from vllm.v1.readiness.sample.slot_memory import SlotMemory
from vllm.v1.readiness.sample.slots import Slots, row_stride

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.readiness.outputs.history import History
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

logger = init_logger(__name__)

_PROMPT = np.iinfo(np.int32).min
_COUNT = np.iinfo(np.int32).max
#: Bytes that vLLM may use beyond gpu_memory_utilization: contexts, graphs, fragmentation.
_MARGIN = 1 << 30
_BLOCK = 1024
#: Fields of the sampling metadata, float32 [requests] each.
_FIELDS = ("repetition_penalties", "frequency_penalties", "presence_penalties")
_NUM_WARPS = 8


class Penalties(Slots):
    """Penalties of one batch."""

    name = registry.PENALTIES

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        super().__init__(batch, history)
        self.memory = SlotMemory(self.vocab_size, self.capacity, self.device)
        if current_platform.is_cuda():
            from vllm.v1.readiness.kernels import penalties as kernels

            self.kernels = kernels

    def warm_up(self) -> None:
        """End memory profiling, and compile and load the kernels."""
        self.memory.end_profile()
        if self.kernels is None:
            return
        zeros = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._metadata = SimpleNamespace(**dict.fromkeys(_FIELDS, zeros))
        super().warm_up()
        slot = torch.empty(self.vocab_size, dtype=torch.int32, device=self.device)
        self._launch_build([slot], [np.zeros(1, np.int32)] * 2)

    def reserve(self, cache: "CacheConfig") -> None:
        """Allocate all slots now if the device may lack memory for them later."""
        fraction = None if cache.kv_cache_memory_bytes else cache.gpu_memory_utilization
        try:
            reserved = self.memory.begin_profile(fraction, _MARGIN)
        except torch.OutOfMemoryError:
            self._warn_no_room()
            return
        if reserved:
            logger.info_once(
                "Readiness overlay: the KV cache is %.0f MiB smaller, to leave room for the "
                "penalties of %d requests. Set %s=N to reserve memory for N requests.",
                *(reserved / (1 << 20), self.capacity, switch.SLOTS),
            )

    def _release(self) -> None:
        self.memory.release()

    def _allocated(self) -> int:
        return self.memory.nbytes * self.memory.allocated

    def _wants(self, request: "CachedRequestState") -> bool:
        params = request.sampling_params
        return params is not None and (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    def _can_serve(self, metadata: "SamplingMetadata", width: int) -> bool:
        # Upstream's padding id is the vocabulary size: a valid id if the logits are wider, and out
        # of range if they are narrower. Fall back in both cases.
        return not metadata.no_penalties and width == self.vocab_size

    def _describes_rows(self, metadata: "SamplingMetadata") -> bool:
        live = self._metadata
        return live is not None and all(
            getattr(metadata, field) is getattr(live, field) for field in _FIELDS
        )

    @staticmethod
    def _of(live: "LiveBatch") -> "Penalties | None":
        return live.penalties

    @staticmethod
    def _used(metadata: "SamplingMetadata") -> bool:
        return not metadata.no_penalties

    def restore(self, metadata: "SamplingMetadata") -> None:
        """Fill in the prompt token ids, int64 [requests, longest prompt]."""
        if metadata.prompt_token_ids is None and not metadata.no_penalties:
            ids = self.batch._make_prompt_token_ids_cpu_tensor()
            metadata.prompt_token_ids = ids.to(self.device, non_blocking=True)

    @staticmethod
    def _strip(metadata: "SamplingMetadata") -> None:
        metadata.no_penalties = True

    def _apply(
        self, logits: torch.Tensor, drafts: "SpecDecodeMetadata | None", per_draft: bool
    ) -> None:
        if self.kernels is not None and logits.dtype == torch.float32 and logits.stride(-1) == 1:
            divide = logits.is_cuda and logits.is_contiguous()
            self._launch(logits, drafts, per_draft, divide)
            return
        drafted: list[Any] = [None] * len(self._rows)
        if drafts is not None:
            drafted = drafts.draft_token_ids.split(drafts.num_draft_tokens)
        position = 0
        for row, ids in enumerate(drafted):
            for before in [ids[:count] for count in range(len(ids))] if per_draft else [ids]:
                self._apply_row(logits, position, row, before)
                position += 1

    def _update_slots(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        if self.kernels is not None and sampled.stride(-1) == 1:
            assert self._addresses is not None
            shape = (sampled.stride(0), sampled.shape[1])
            arguments = (sampled, *shape, discarded, self._addresses, self.vocab_size)
            self.kernels.count_kernel[(len(self._addresses),)](*arguments, num_warps=1)
            return
        ids, valid = self._valid(sampled)
        counted = valid & ~discarded[: len(ids), None]
        for row, slot in enumerate(self._rows):
            if slot is not None:
                slot.index_add_(0, ids[row], counted[row].to(torch.int32))

    def _build_slots(self, rows: list[int]) -> Iterator[torch.Tensor]:
        """Build the slots of all rows by one upload and one launch."""
        if self.kernels is None:
            return super()._build_slots(rows)
        slots = [self.memory.take() for _ in rows]
        self._launch_build(slots, [tokens for row in rows for tokens in self._tokens(row)])
        return iter(slots)

    def _build_slot(self, row: int) -> torch.Tensor:
        slot = self.memory.take().zero_()
        prompt, generated = map(self._upload, self._tokens(row))
        if prompt is not None:
            slot.index_fill_(0, prompt, _PROMPT)
        if generated is not None:
            slot.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        return slot

    def _tokens(self, row: int) -> "tuple[np.ndarray, np.ndarray]":
        """Return the tokens of a row's prompt and output, int32 [tokens] each.

        Like upstream, include the placeholder ids of prompt embeddings.
        """
        tokens = self.batch.token_ids_cpu[row]
        prompt_end = int(self.batch.num_prompt_tokens[row])
        output = self.batch.req_output_token_ids[row]
        assert output is not None
        return tokens[:prompt_end], tokens[prompt_end : prompt_end + len(output)]

    def _upload(self, tokens: "np.ndarray") -> torch.Tensor | None:
        """Upload the tokens that are in the vocabulary, as int64; None if there are none."""
        tokens = tokens[(tokens >= 0) & (tokens < self.vocab_size)]
        return self._staged(tokens, torch.int64) if tokens.size else None

    def _valid(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids clamped to the vocabulary, and a mask of the ids that are in it."""
        ids = tokens.long()
        return ids.clamp(0, self.vocab_size - 1), (ids >= 0) & (ids < self.vocab_size)

    def _launch_build(self, slots: list[torch.Tensor], histories: "list[np.ndarray]") -> None:
        """Fill slots; ``histories`` holds the tokens of each prompt, followed by its output's."""
        assert self.kernels is not None
        addresses = np.array([slot.data_ptr() for slot in slots], np.int64)
        lengths = [len(tokens) for tokens in histories]
        (places,), (ends, tokens) = uploads.together(
            [addresses],
            [np.cumsum(lengths, dtype=np.int32), np.concatenate(histories)],
            self.device,
            self.batch.pin_memory,
        )
        self.kernels.build_kernel[(len(slots),)](
            *(places, ends, tokens, self.vocab_size), BLOCK=_BLOCK, num_warps=_NUM_WARPS
        )

    def _apply_row(
        self, logits: torch.Tensor, position: int, row: int, drafts: torch.Tensor | None
    ) -> None:
        """Apply a row's penalties at one position by upstream's operations."""
        slot = self._rows[row]
        metadata = self._metadata
        if slot is None:
            return
        assert metadata is not None
        counts = slot & _COUNT
        if drafts is not None and len(drafts):
            ids, valid = self._valid(drafts)
            counts.index_add_(0, ids, valid.to(torch.int32))
        generated = (counts > 0).unsqueeze(0)
        logit = logits[position : position + 1]
        this = slice(row, row + 1)
        if self.batch.repetition_penalties_cpu[row] != 1.0:
            repeat = (
                _custom_ops.apply_repetition_penalties_cuda
                if logits.is_cuda and logits.is_contiguous()
                else _custom_ops.apply_repetition_penalties_torch
            )
            prompt = (slot < 0).unsqueeze(0)
            repeat(logit, prompt, generated, metadata.repetition_penalties[this])
        logit -= metadata.frequency_penalties[this].unsqueeze(1) * counts
        logit -= metadata.presence_penalties[this].unsqueeze(1) * generated

    def _launch(
        self,
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None",
        per_draft: bool,
        divide: bool,
    ) -> None:
        assert self.kernels is not None
        assert self._addresses is not None
        penalties = [getattr(self._metadata, field) for field in _FIELDS]
        ids, ends, mode, positions = self._kernel_drafts(drafts, per_draft)
        blocks = -(-self.vocab_size // _BLOCK)
        self.kernels.apply_kernel[(len(self._addresses), blocks, positions)](
            *(logits, row_stride(logits), self._addresses, *penalties, ids, ends, self.vocab_size),
            MODE=mode,
            DIVIDE=divide,
            BLOCK=_BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


#: Entry point of the samplers.
take = Penalties.take
