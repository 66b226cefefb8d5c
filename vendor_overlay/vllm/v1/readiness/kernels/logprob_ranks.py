"""Triton kernel that computes the ranks of tokens for logprobs."""

# mirrors: vllm.v1.sample.ops.logprobs:batched_count_greater_than

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["stride", "value_stride", "width"])
def rank_kernel(
    scores,  # float32 [rows, width]
    stride,
    values,  # float32 [rows, 1]
    value_stride,
    ranks,  # int64 [rows]
    width,
    BLOCK: tl.constexpr,
):
    """Count the scores of one row that are not less than the row's value; grid [rows]."""
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(values + row * value_stride)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        score = tl.load(scores + row * stride + column, mask=inside, other=0.0)
        counts += ((score >= value) & inside).to(tl.int32)
    tl.store(ranks + row, tl.sum(counts, axis=0).to(tl.int64))


def count(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Count the ``scores`` [rows, width] not less than the row's ``values`` [rows, 1]."""
    rows, width = scores.shape
    ranks = torch.empty(rows, dtype=torch.int64, device=scores.device)
    rank_kernel[(rows,)](
        *(scores, scores.stride(0), values, values.stride(0), ranks, width),
        BLOCK=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return ranks
