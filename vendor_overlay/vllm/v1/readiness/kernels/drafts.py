"""What the kernels of penalties and bad words have in common: drafts within a step.

The drafts of all requests are in one tensor, one request's after another's. In a grid of
[requests, blocks, positions a request], a program's row of the logits follows some of its
request's drafts, whose tokens count as if they had been generated. Which ones is the kernel's
MODE.
"""

# mirrors: vllm.v1.spec_decode.metadata:SpecDecodeMetadata

import triton
import triton.language as tl

#: A row for each request, which follows none of the step's drafts.
NO_DRAFTS = tl.constexpr(0)
#: A row for each draft, which follows the request's drafts before that one.
TARGET = tl.constexpr(1)
#: A row for each request, which follows all of its drafts.
BONUS = tl.constexpr(2)


@triton.jit
def locate(
    drafts_end,  # int32 [requests]: end of each request's drafts; not read if MODE is NO_DRAFTS
    MODE: tl.constexpr,
):
    """Locate the row of the logits that this program works on, and the drafts before it.

    Returns:
        Scalars: the row, int64; whether there is such a row; the index of the request's
        first draft; and how many of its drafts precede the row.
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
