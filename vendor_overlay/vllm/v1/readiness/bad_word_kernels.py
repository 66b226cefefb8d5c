"""Triton kernels for bad words: match and mask a request's words, and append to its tail.

Import only where Triton has a driver, or under its interpreter (TRITON_INTERPRET=1).

A slot is int32, one part behind the other: the number of words W; the length T of the
tail; the tail [T], the newest tokens of the output, the newest last, -1 in front of an
output that is shorter; each word's last token [W]; how many tokens go before that [W];
where in the slot they begin [W]; and those tokens, word by word. A row's slot is given by
its address, 0 for a row without bad words.
"""

import triton
import triton.language as tl

#: Which drafts count within the step: none; those before the position (target rows); all
#: of the request's (bonus rows).
PLAIN = 0
TARGET = 1
BONUS = 2

#: Where in a slot the tail begins.
HEADER = 2


@triton.jit
def mask_kernel(
    logits,  # floating [positions, width], changed in place
    row_stride,
    column_stride,
    slots,  # int64 [requests]: addresses
    drafts,  # [drafts of all requests], any integer dtype
    drafts_end,  # int32 [requests]: end of each request's drafts
    width,
    MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mask what would complete one block of one request's words at one of its positions.

    Launch with grid [requests, blocks, positions a request].
    """
    request = tl.program_id(0)
    address = tl.load(slots + request)
    if address == 0:
        return
    position = request.to(tl.int64)
    first = 0
    seen = 0
    if MODE != 0:
        first = tl.load(drafts_end + request - 1, mask=request > 0, other=0)
        seen = tl.load(drafts_end + request) - first
    if MODE == 1:
        if tl.program_id(2) >= seen:
            return
        seen = tl.program_id(2)
        position = (first + seen).to(tl.int64)

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
    for before in range(longest):
        at = seen - 1 - before
        token = tl.load(tail_end + at, mask=at < 0, other=0)
        if MODE != 0:
            draft = tl.load(drafts + first + at, mask=at >= 0, other=0)
            token = tl.where(at < 0, token, draft.to(tl.int32))
        compared = before < length
        wanted = tl.load(end - 1 - before, mask=inside & compared, other=0)
        matches = matches & ((wanted == token) | (before >= length))
    to = logits + position * row_stride + last.to(tl.int64) * column_stride
    tl.store(to, float("-inf"), mask=matches)


@triton.jit(do_not_specialize=["row_stride", "column_stride", "width"])
def append_kernel(
    sampled,  # int32 or int64 [requests, width]
    row_stride,
    column_stride,
    width,
    discarded,  # bool [requests]: sampled for nothing
    slots,  # int64 [requests]: addresses
    BLOCK: tl.constexpr,
):
    """Append to one request's tail what it has just been given; grid [requests].

    A row of ``sampled`` ends at its first negative id.
    """
    request = tl.program_id(0)
    address = tl.load(slots + request)
    if address == 0:
        return
    if tl.load(discarded + request) != 0:
        return
    row = sampled + request.to(tl.int64) * row_stride
    count = 0
    given = 1
    for column in range(width):
        given = given * (tl.load(row + column * column_stride) >= 0).to(tl.int32)
        count += given

    slot = address.to(tl.pointer_type(tl.int32))
    longest = tl.load(slot + 1)
    tail = slot + 2
    for start in range(0, longest, BLOCK):
        to = start + tl.arange(0, BLOCK)
        inside = to < longest
        source = to + count
        kept = tl.load(tail + source, mask=source < longest, other=0)
        new = tl.load(
            row + (source - longest) * column_stride,
            mask=inside & (source >= longest),
            other=0,
        )
        # Each thread has read before another writes there; a later block reads behind it.
        tl.debug_barrier()
        tl.store(tail + to, tl.where(source < longest, kept, new.to(tl.int32)), mask=inside)
