"""Drafts of a step, for the kernels of penalties and bad words.

The drafts of all requests are concatenated in one tensor. A kernel's grid is [requests, blocks,
positions per request], and each program processes one row of the logits. The request's drafts
before that row count as output tokens. MODE is the kind of the rows.
"""

# mirrors: vllm.v1.spec_decode.metadata:SpecDecodeMetadata

import triton
import triton.language as tl

#: One row per request, before all drafts of the step.
NO_DRAFTS = tl.constexpr(0)
#: One row per draft, after the request's earlier drafts.
TARGET = tl.constexpr(1)
#: One row per request, after all of its drafts.
BONUS = tl.constexpr(2)


@triton.jit
def locate(
    drafts_end,  # int32 [requests]: end of each request's drafts; not read if MODE is NO_DRAFTS
    MODE: tl.constexpr,
):
    """Locate this program's row of the logits and the request's drafts before it.

    Returns:
        Scalars: the row, int64; whether it exists; the index of the request's first draft; and the
        number of its drafts before the row.
    """
    request = tl.program_id(0)
    row = request.to(tl.int64)
    exists = True
    first = 0
    count = 0
    if MODE != NO_DRAFTS:
        first = tl.load(drafts_end + request - 1, mask=request > 0, other=0)
        count = tl.load(drafts_end + request) - first
    if MODE == TARGET:
        before = tl.program_id(2)
        exists = before < count
        count = before
        row = (first + before).to(tl.int64)
    return row, exists, first, count
