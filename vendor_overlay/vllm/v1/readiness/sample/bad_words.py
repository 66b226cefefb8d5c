"""Feature ``bad-words``: bad words matched and masked on the device.

On each step upstream compares the end of every output with every word in Python lists, for which
the host waits for the newest token. Here each request with bad words has a slot on the device. The
slot holds the words and a tail: the newest output tokens, as many as a word may match. Sampled
tokens are appended to the tail, and tokens that would complete a word are masked.

A word is a prefix and its last token. A slot is int32 and contains the number of words W; the
length T of the tail, which is that of the longest prefix; the tail [T], newest token last, padded
with -1 in front; the last tokens [W]; the lengths of the prefixes [W]; their offsets in the slot
[W]; and the prefixes. Without the kernels, a slot is only the tail (``bad_words_torch``).

The result equals that of ``apply_bad_words`` bit for bit: both write minus infinity and read no
logit. Prompts are not matched, and words whose last token is beyond the logits are skipped.
"""

# mirrors: vllm.v1.sample.ops.bad_words:apply_bad_words
# mirrors: vllm.v1.sample.ops.bad_words:apply_bad_words_with_drafts
# mirrors: vllm.v1.sample.ops.bad_words:_apply_bad_words_single_batch
# mirrors: vllm.v1.sample.ops.bad_words:_SMALLEST_LOGIT
# mirrors: vllm.v1.sample.sampler:Sampler.apply_logits_processors
# mirrors: vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.readiness import registry
from vllm.v1.readiness.kernels.drafts import draft_arguments, locate, row_stride
from vllm.v1.readiness.sample.bad_words_torch import MAX_ID, NOTHING, Tails, Words
from vllm.v1.readiness.sample.slots import Slots

if TYPE_CHECKING:
    from vllm.v1.readiness.outputs.history import History
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

_BLOCK = 32


class BadWords(Slots):
    """Bad words of one batch."""

    name = registry.BAD_WORDS
    fields = ("bad_words_token_ids",)
    unused = ("bad_words_token_ids", {})

    def __init__(self, batch: "InputBatch", history: "History") -> None:
        super().__init__(batch, history)
        #: Supported words by request id.
        self._words: dict[str, Words] = {}
        #: Number of kernel blocks for the longest list of words.
        self._blocks = 1
        #: Tails of all rows, for PyTorch.
        self._tails: Tails | None = None

    # A request joins the batch, and its words and tail are sent

    def wanted(self, request: "CachedRequestState") -> bool:
        """Return whether a request has bad words, all of them supported."""
        params = request.sampling_params
        words = [] if params is None else params.bad_words_token_ids or []
        return bool(words) and all(
            word and min(word) >= 0 and max(word) <= MAX_ID for word in words
        )

    def add_request(self, request: "CachedRequestState") -> None:
        """Track the words of a request that may have a slot."""
        super().add_request(request)
        params = request.sampling_params
        if request.req_id in self._slots and params is not None and params.bad_words_token_ids:
            self._words[request.req_id] = Words.of(params.bad_words_token_ids)

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Keep the request's slot, and drop its words."""
        super().remove_request(request, row)
        self._words.pop(request.req_id, None)

    def supports(self, metadata: "SamplingMetadata", width: int) -> bool:
        """Return whether slots support a step."""
        words = metadata.bad_words_token_ids
        return (
            bool(words)
            and words is self.batch.bad_words_token_ids
            and len(words) == len(self._words)  # those of all requests are supported
            and width <= self.vocab_size  # upstream drops some tokens beyond the vocabulary
        )

    def build(self, rows: list[int]) -> list[torch.Tensor]:
        """Build the slots of rows."""
        return [self._build_slot(row) for row in rows]

    def _build_slot(self, row: int) -> torch.Tensor:
        words = self._words[self.batch.req_ids[row]]
        longest = words.longest
        tail = np.full(longest, NOTHING, np.int32)
        output = self.batch.req_output_token_ids[row]
        assert output is not None
        if longest and output:
            newest = output[-longest:]
            tail[longest - len(newest) :] = newest
        if not self.kernels:
            return self.send(tail, torch.int32)
        header = np.array([len(words.lasts), longest], np.int32)
        begin = len(header) + longest + 3 * len(words.lasts)
        starts = begin + words.lengths.cumsum(dtype=np.int32) - words.lengths
        parts = (header, tail, words.lasts, words.lengths, starts, words.prefixes)
        return self.send(np.concatenate(parts), torch.int32)

    def send_addresses(self) -> None:
        """Send the addresses of slots, or without kernels, all words and tails."""
        super().send_addresses()
        if self.kernels:
            most = max(len(words.lasts) for words in self._words.values())
            self._blocks = -(-most // _BLOCK)
            return
        of_rows = [self._words.get(req_id) for req_id in self.batch.req_ids]
        self._tails = tails = Tails(self.send, of_rows, self.tensors(), self.width)
        for req_id, view in zip(self.batch.req_ids, tails.views, strict=True):
            if (slot := self._slots.get(req_id)) is not None:
                slot.tensor = view

    # The samplers mask tokens, and the sampled tokens are appended to the tails

    def apply(
        self, logits: torch.Tensor, drafts: "SpecDecodeMetadata | None", per_draft: bool
    ) -> None:
        """Mask the tokens that would complete a word."""
        if not self.kernels:
            assert self._tails is not None
            self._tails.mask(logits, drafts, per_draft)
            return
        ids, ends, mode, positions = draft_arguments(drafts, per_draft, self.addresses)
        strides = row_stride(logits), logits.stride(1)
        arguments = (logits, *strides, self.addresses, ids, ends, self.width)
        grid = (len(self.addresses), self._blocks, positions)
        mask_kernel[grid](*arguments, MODE=mode, BLOCK=_BLOCK, num_warps=1)

    def update(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Append the sampled tokens to the tails."""
        if not self.kernels:
            assert self._tails is not None
            self._tails.append(sampled, discarded)
            return
        arguments = (sampled, *sampled.stride(), sampled.shape[1], discarded, self.addresses)
        append_kernel[(len(self.addresses),)](*arguments, BLOCK=_BLOCK, num_warps=1)

    def _forget_step(self) -> None:
        super()._forget_step()
        self._tails = None


@triton.jit
def mask_kernel(
    logits,  # floating [rows, width], changed in place
    row_stride,
    column_stride,
    addresses,  # int64 [requests]: of slots
    drafts,  # [drafts of all requests], any integer dtype
    drafts_end,  # int32 [requests]: see drafts.locate
    width,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mask tokens in one row that would complete one of a block of a request's bad words.

    Launch with grid [requests, blocks of words, positions per request].
    """
    request = tl.program_id(0)
    address = tl.load(addresses + request)
    if address == 0:
        return
    row, exists, first, preceding = locate(drafts_end, MODE)
    if not exists:
        return

    slot = address.to(tl.pointer_type(tl.int32))
    words = tl.load(slot)
    longest = tl.load(slot + 1)
    tail_end = slot + 2 + longest
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words
    last = tl.load(tail_end + word, mask=inside, other=0)
    length = tl.load(tail_end + words + word, mask=inside, other=0)
    end = slot + tl.load(tail_end + 2 * words + word, mask=inside, other=0) + length

    matches = inside & (last < width)
    for back in range(longest):
        # A negative index is in the tail, others are in the drafts.
        index = preceding - 1 - back
        token = tl.load(tail_end + index, mask=index < 0, other=0)
        if MODE != "plain":
            draft = tl.load(drafts + first + index, mask=index >= 0, other=0)
            token = tl.where(index < 0, token, draft.to(tl.int32))
        compared = back < length
        wanted = tl.load(end - 1 - back, mask=inside & compared, other=0)
        matches = matches & ((wanted == token) | (back >= length))
    target = logits + row * row_stride + last.to(tl.int64) * column_stride
    tl.store(target, float("-inf"), mask=matches)


@triton.jit(do_not_specialize=["row_stride", "column_stride", "width"])
def append_kernel(
    sampled,  # int32 or int64 [requests, width]
    row_stride,
    column_stride,
    width,
    discarded,  # bool [requests]
    addresses,  # int64 [requests]: of slots
    BLOCK: tl.constexpr,
):
    """Append one request's sampled tokens, up to a negative id, to its tail; grid [requests]."""
    request = tl.program_id(0)
    address = tl.load(addresses + request)
    if address == 0:
        return
    if tl.load(discarded + request) != 0:
        return
    row = sampled + request.to(tl.int64) * row_stride
    count = 0
    valid = 1
    for column in range(width):
        valid = valid * (tl.load(row + column * column_stride) >= 0).to(tl.int32)
        count += valid

    slot = address.to(tl.pointer_type(tl.int32))
    longest = tl.load(slot + 1)
    tail = slot + 2
    for start in range(0, longest, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < longest
        source = index + count
        shifted = tl.load(tail + source, mask=source < longest, other=0)
        new = tl.load(
            row + (source - longest) * column_stride, mask=inside & (source >= longest), other=0
        )
        # All threads must read before any writes; later blocks read only higher indices.
        tl.debug_barrier()
        tokens = tl.where(source < longest, shifted, new.to(tl.int32))
        tl.store(tail + index, tokens, mask=inside)
