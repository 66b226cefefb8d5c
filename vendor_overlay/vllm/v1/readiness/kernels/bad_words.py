"""Triton kernels for bad words: mask tokens that would complete a word, and append to tails.

A request's tail is the newest part of its output, as long as the prefix of its longest word. A word
consists of a prefix and its last token. A slot is int32 and contains the number of words W; the
length T of the tail; the tail [T], newest token last, padded with -1 in front; the last tokens [W];
the lengths of the prefixes [W]; their offsets in the slot [W]; and the prefixes. A slot is passed
by its address, 0 for a request without bad words.
"""

# mirrors: vllm.v1.sample.ops.bad_words:apply_bad_words
# mirrors: vllm.v1.sample.ops.bad_words:apply_bad_words_with_drafts
# mirrors: vllm.v1.sample.ops.bad_words:_apply_bad_words_single_batch
# mirrors: vllm.v1.sample.ops.bad_words:_SMALLEST_LOGIT

import triton
import triton.language as tl
from vllm.v1.readiness.kernels.drafts import BONUS, NO_DRAFTS, TARGET, locate

__all__ = ["BONUS", "NO_DRAFTS", "TARGET", "append_kernel", "mask_kernel"]

#: Offset of the tail in a slot.
_TAIL = tl.constexpr(2)


@triton.jit
def mask_kernel(
    logits,  # floating [rows, width], changed in place
    row_stride,
    column_stride,
    slots,  # int64 [requests]: addresses
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
    address = tl.load(slots + request)
    if address == 0:
        return
    row, exists, first, preceding = locate(drafts_end, MODE)
    if not exists:
        return

    slot = address.to(tl.pointer_type(tl.int32))
    words = tl.load(slot)
    longest = tl.load(slot + 1)
    tail_end = slot + _TAIL + longest
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
        if MODE != NO_DRAFTS:
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
    slots,  # int64 [requests]: addresses
    BLOCK: tl.constexpr,
):
    """Append one request's sampled tokens, up to a negative id, to its tail; grid [requests]."""
    request = tl.program_id(0)
    address = tl.load(slots + request)
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
    tail = slot + _TAIL
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
