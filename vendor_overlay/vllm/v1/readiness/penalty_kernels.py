"""Triton kernels for penalties: one pass over the logits, and one increment a token.

Import only where Triton has a driver, or under its interpreter (TRITON_INTERPRET=1).

A slot is int32 [vocab]: the low 31 bits count how often the request has generated the
token, the sign bit says that its prompt holds it. A row's slot is given by its address,
0 for a row without penalties, so that slots need not be neighbours in memory.
"""

import triton
import triton.language as tl

#: Which drafts count within the step: none; those before the position (target rows); all
#: of the request's (bonus rows).
PLAIN = 0
TARGET = 1
BONUS = 2


@triton.jit
def apply_kernel(
    logits,  # float32 [positions, vocab], changed in place
    logits_stride,
    slots,  # int64 [requests]: addresses
    repetition,  # float32 [requests]
    frequency,  # float32 [requests]
    presence,  # float32 [requests]
    drafts,  # [drafts of all requests], any integer dtype
    drafts_end,  # int32 [requests]: end of each request's drafts
    vocab,
    MODE: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply the penalties of one request to one block of one of its positions.

    Launch with grid [requests, blocks, positions a request] and enable_fp_fusion=False:
    each product is rounded before it is subtracted.
    """
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    if slot == 0:
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

    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    counts = tl.multiple_of(slot.to(tl.pointer_type(tl.int32)), 16)
    packed = tl.load(counts + token, mask=inside, other=0)
    count = packed & 0x7FFFFFFF
    if MODE != 0:
        for before in range(seen):
            count += (token == tl.load(drafts + first + before)).to(tl.int32)
    generated = count > 0
    occurs = generated | (packed < 0)

    at = logits + position * logits_stride + token
    logit = tl.load(at, mask=inside, other=0.0)
    penalty = tl.load(repetition + request)
    if DIVIDE:
        scaled = tl.where(logit > 0, tl.div_rn(logit, penalty), logit * penalty)
    else:
        scaled = logit * tl.where(logit > 0, tl.div_rn(1.0, penalty), penalty)
    logit = tl.where(occurs, scaled, logit)
    logit -= tl.load(frequency + request) * count.to(tl.float32)
    logit -= tl.load(presence + request) * generated.to(tl.float32)
    tl.store(at, logit, mask=inside)


@triton.jit(do_not_specialize=["sampled_stride", "width"])
def count_kernel(
    sampled,  # int32 or int64 [requests, width]
    sampled_stride,
    width,
    discarded,  # bool [requests]: sampled for nothing
    slots,  # int64 [requests]: addresses
    vocab,
):
    """Count the tokens that one request has just been given; grid [requests]."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    if slot == 0:
        return
    if tl.load(discarded + request) != 0:
        return
    counts = slot.to(tl.pointer_type(tl.int32))
    for column in range(width):
        token = tl.load(sampled + request.to(tl.int64) * sampled_stride + column)
        tl.atomic_add(counts + token, 1, mask=(token >= 0) & (token < vocab))
