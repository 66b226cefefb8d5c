"""Triton kernels for penalties: one pass over the logits, and one increment per token.

A slot is int32 [vocab]: the low 31 bits count the token in the request's output, and the sign bit
is set if the prompt contains the token. Slots need not be adjacent: each is passed by its address,
0 for a request without penalties.
"""

# mirrors: vllm.v1.sample.ops.penalties:apply_all_penalties
# mirrors: vllm.v1.sample.ops.penalties:_convert_to_tensors
# mirrors: vllm.model_executor.layers.utils:apply_penalties
# mirrors: vllm.model_executor.layers.utils:get_token_bin_counts_and_mask
# mirrors: vllm._custom_ops:apply_repetition_penalties
# mirrors: vllm._custom_ops:apply_repetition_penalties_cuda
# mirrors: vllm._custom_ops:apply_repetition_penalties_torch

import triton
import triton.language as tl
from vllm.v1.readiness.kernels.drafts import BONUS, NO_DRAFTS, TARGET, locate

__all__ = ["BONUS", "NO_DRAFTS", "TARGET", "apply_kernel", "build_kernel", "count_kernel"]


@triton.jit
def apply_kernel(
    logits,  # float32 [rows, vocab], changed in place
    logits_stride,
    slots,  # int64 [requests]: addresses
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
    slot = tl.load(slots + request)
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
    if MODE != NO_DRAFTS:
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


@triton.jit(do_not_specialize=["sampled_stride", "width"])
def count_kernel(
    sampled,  # int32 or int64 [requests, width]
    sampled_stride,
    width,
    discarded,  # bool [requests]
    slots,  # int64 [requests]: addresses
    vocab,
):
    """Count one request's sampled tokens in its slot; grid [requests]."""
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


@triton.jit
def build_kernel(
    slots,  # int64 [requests]: addresses
    ends,  # int32 [requests, 2]: index after the last token of each prompt, and of its output
    tokens,  # int32 [tokens of all requests], each prompt followed by its output
    vocab,
    BLOCK: tl.constexpr,
):
    """Fill one request's slot, which may hold anything; grid [requests]."""
    request = tl.program_id(0)
    counts = tl.multiple_of(tl.load(slots + request).to(tl.pointer_type(tl.int32)), 16)
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
