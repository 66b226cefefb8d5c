"""Feature ``penalties``: penalties from token counts that stay on the device.

On each step upstream recounts every request's tokens from Python lists, for which the host waits
for the newest token. Here each request with a penalty has a slot of counts on the device. Sampled
tokens are counted there, and one pass over the logits applies all three penalties.

The result equals that of ``apply_all_penalties`` bit for bit, on each platform and for each layout
of the logits. The order is repetition, frequency, presence, and each product is rounded before it
is subtracted. A slot is int32 [vocab]: the low 31 bits count output tokens, and the sign bit marks
prompt tokens. With a vocabulary of 151,936, a slot takes 0.61 MB, of :mod:`~.slot_memory`.
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

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.readiness import registry
from vllm.v1.readiness.inputs import uploads
from vllm.v1.readiness.kernels.drafts import draft_arguments, locate, row_stride
from vllm.v1.readiness.sample import penalties_torch
from vllm.v1.readiness.sample.slot_memory import SlotMemory
from vllm.v1.readiness.sample.slots import Slots

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.readiness.outputs.history import History
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

_BLOCK = 1024


class Penalties(Slots):
    """Penalties of one batch. :mod:`~.slots` says when each method is called."""

    name = registry.PENALTIES
    fields = ("repetition_penalties", "frequency_penalties", "presence_penalties")
    unused = ("no_penalties", True)

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        super().__init__(batch, history)
        self.memory: SlotMemory = SlotMemory(self.vocab_size, self.capacity, self.device)

    def reserve(self, cache: "CacheConfig") -> None:
        """Allocate all slots now if the device may lack memory for them later."""
        try:
            self.memory.begin_profile(cache)
        except torch.OutOfMemoryError:
            self.warn_no_room()

    def warm_up(self) -> None:
        """End memory profiling, and compile and load the kernels."""
        self.memory.end_profile()
        super().warm_up()
        if self.kernels:
            slot = torch.empty(self.vocab_size, dtype=torch.int32, device=self.device)
            self._launch_build([slot], [np.zeros(1, np.int32)] * 2)

    # A slot is built

    def wanted(self, request: "CachedRequestState") -> bool:
        """Return whether a request has a penalty."""
        params = request.sampling_params
        return params is not None and (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    def supports(self, metadata: "SamplingMetadata", width: int) -> bool:
        """Return whether a step uses a penalty, with as many columns as a slot."""
        # Upstream's padding id is the vocabulary size: a valid id if the logits are wider, and out
        # of range if they are narrower. Fall back in both cases.
        return not metadata.no_penalties and width == self.vocab_size

    def build(self, rows: list[int]) -> list[torch.Tensor]:
        """Build the slots of rows, with kernels by one upload and one launch."""
        slots = [self.memory.allocate() for _ in rows]
        histories = [tokens for row in rows for tokens in self._tokens(row)]
        if self.kernels:
            self._launch_build(slots, histories)
        else:
            penalties_torch.build(slots, histories, self.send)
        return slots

    def _tokens(self, row: int) -> "tuple[np.ndarray, np.ndarray]":
        """Return the tokens of a row's prompt and output, int32 [tokens] each.

        Like upstream, include the placeholder ids of prompt embeddings.
        """
        tokens = self.batch.token_ids_cpu[row]
        prompt_end = int(self.batch.num_prompt_tokens[row])
        output = self.batch.req_output_token_ids[row]
        assert output is not None
        return tokens[:prompt_end], tokens[prompt_end : prompt_end + len(output)]

    def _launch_build(self, slots: list[torch.Tensor], histories: "list[np.ndarray]") -> None:
        """Fill slots; ``histories`` holds the tokens of each prompt, followed by its output's."""
        addresses = np.array([slot.data_ptr() for slot in slots], np.int64)
        lengths = [len(tokens) for tokens in histories]
        (places,), (ends, tokens) = uploads.together(
            [addresses],
            [np.cumsum(lengths, dtype=np.int32), np.concatenate(histories)],
            self.device,
            self.batch.pin_memory,
        )
        arguments = (places, ends, tokens, self.vocab_size)
        build_kernel[(len(slots),)](*arguments, BLOCK=_BLOCK, num_warps=8)

    # A step is sampled

    def restore(self, metadata: "SamplingMetadata") -> None:
        """Fill in the prompt token ids, int64 [requests, longest prompt]."""
        if metadata.prompt_token_ids is None and not metadata.no_penalties:
            ids = self.batch._make_prompt_token_ids_cpu_tensor()
            metadata.prompt_token_ids = ids.to(self.device, non_blocking=True)

    def apply(
        self, logits: torch.Tensor, drafts: "SpecDecodeMetadata | None", per_draft: bool
    ) -> None:
        """Apply penalties."""
        divide = logits.is_cuda and logits.is_contiguous()  # or multiply by an inverse
        if not (self.kernels and logits.dtype == torch.float32 and logits.stride(-1) == 1):
            how = (per_draft, self.batch.repetition_penalties_cpu != 1.0, divide)
            penalties_torch.apply(self.tensors(), self.values, logits, drafts, *how)
            return
        ids, ends, mode, positions = draft_arguments(drafts, per_draft, self.addresses)
        grid = (len(self.addresses), -(-self.vocab_size // _BLOCK), positions)
        stride = row_stride(logits)
        arguments = (logits, stride, self.addresses, *self.values, ids, ends, self.vocab_size)
        apply_kernel[grid](
            *arguments, MODE=mode, DIVIDE=divide, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
        )

    def update(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Count the sampled tokens in the slots."""
        if not (self.kernels and sampled.stride(-1) == 1):
            penalties_torch.count(self.tensors(), sampled, discarded, self.vocab_size)
            return
        arguments = (sampled, sampled.stride(0), sampled.shape[1], discarded, self.addresses)
        count_kernel[(len(self.addresses),)](*arguments, self.vocab_size, num_warps=1)


@triton.jit
def build_kernel(
    addresses,  # int64 [requests]: of slots
    ends,  # int32 [requests, 2]: index after the last token of each prompt, and of its output
    tokens,  # int32 [tokens of all requests], each prompt followed by its output
    vocab,
    BLOCK: tl.constexpr,
):
    """Fill one request's slot, which may hold anything; grid [requests]."""
    request = tl.program_id(0)
    # True where the vocabulary is a multiple of 4; elsewhere the masks prevent vector loads.
    counts = tl.multiple_of(tl.load(addresses + request).to(tl.pointer_type(tl.int32)), 16)
    for i in range(0, vocab, BLOCK):
        token = i + tl.arange(0, BLOCK)
        tl.store(counts + token, 0, mask=token < vocab)
    tl.debug_barrier()  # another thread may count what this one has zeroed
    start = tl.load(ends + 2 * request - 1, mask=request > 0, other=0)
    prompt_end = tl.load(ends + 2 * request)
    end = tl.load(ends + 2 * request + 1)
    for i in range(start, end, BLOCK):
        index = i + tl.arange(0, BLOCK)
        token = tl.load(tokens + index, mask=index < end, other=-1)
        inside = (token >= 0) & (token < vocab)
        tl.atomic_or(counts + token, -0x80000000, mask=inside & (index < prompt_end))
        tl.atomic_add(counts + token, 1, mask=inside & (index >= prompt_end))


@triton.jit(do_not_specialize=["sampled_stride", "width"])
def count_kernel(
    sampled,  # int32 or int64 [requests, width]
    sampled_stride,
    width,
    discarded,  # bool [requests]
    addresses,  # int64 [requests]: of slots
    vocab,
):
    """Count one request's sampled tokens in its slot; grid [requests]."""
    request = tl.program_id(0)
    slot = tl.load(addresses + request)
    if slot == 0:
        return
    if tl.load(discarded + request) != 0:
        return
    counts = slot.to(tl.pointer_type(tl.int32))
    for column in range(width):
        token = tl.load(sampled + request.to(tl.int64) * sampled_stride + column)
        tl.atomic_add(counts + token, 1, mask=(token >= 0) & (token < vocab))


@triton.jit
def apply_kernel(
    logits,  # float32 [rows, vocab], changed in place
    logits_stride,
    addresses,  # int64 [requests]: of slots
    repetition,  # float32 [requests]
    frequency,  # float32 [requests]
    presence,  # float32 [requests]
    drafts,  # [drafts of all requests], any integer dtype
    drafts_end,  # int32 [requests]: see drafts.locate
    vocab,
    MODE: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply one request's penalties to one block of one of its rows.

    Launch with grid [requests, blocks, positions per request] and enable_fp_fusion=False, because
    each product must be rounded before it is subtracted.
    """
    request = tl.program_id(0)
    slot = tl.load(addresses + request)
    if slot == 0:
        return
    row, exists, first, preceding = locate(drafts_end, MODE)
    if not exists:
        return

    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    counts = tl.multiple_of(slot.to(tl.pointer_type(tl.int32)), 16)
    packed = tl.load(counts + token, mask=inside, other=0)
    count = packed & 0x7FFFFFFF
    if MODE != "plain":
        for index in range(preceding):
            count += (token == tl.load(drafts + first + index)).to(tl.int32)
    generated = count > 0
    occurs = generated | (packed < 0)

    address = logits + row * logits_stride + token
    logit = tl.load(address, mask=inside, other=0.0)
    penalty = tl.load(repetition + request)
    if DIVIDE:
        scaled = tl.where(logit > 0, tl.div_rn(logit, penalty), logit * penalty)
    else:
        scaled = logit * tl.where(logit > 0, tl.div_rn(1.0, penalty), penalty)
    logit = tl.where(occurs, scaled, logit)
    logit -= tl.load(frequency + request) * count.to(tl.float32)
    logit -= tl.load(presence + request) * generated.to(tl.float32)
    tl.store(address, logit, mask=inside)
