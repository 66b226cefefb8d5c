"""Drafts of a step, for the kernels of penalties and bad words.

The drafts of all requests are concatenated in one tensor. A kernel's grid is [requests, blocks,
positions per request], and each program processes one row of the logits. The request's drafts
before that row count as output tokens. MODE is the kind of the rows:

- "plain": one row per request, before all drafts of the step
- "target": one row per draft, after the request's earlier drafts
- "bonus": one row per request, after all of its drafts
"""

# mirrors: vllm.v1.spec_decode.metadata:SpecDecodeMetadata

from typing import TYPE_CHECKING

import torch
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def draft_arguments(
    drafts: "SpecDecodeMetadata | None", per_draft: bool, unread: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, str, int]:
    """Return a kernel's draft arguments: ids, ends, MODE and positions per request.

    ``per_draft`` is True for target rows. Without drafts, ``unread`` stands in for ids and ends.
    """
    if drafts is None:
        return unread, unread, "plain", 1
    mode, positions = ("target", drafts.max_spec_len) if per_draft else ("bonus", 1)
    return drafts.draft_token_ids, drafts.cu_num_draft_tokens, mode, positions


def row_stride(logits: torch.Tensor) -> int:
    """Return the row stride of logits [rows, vocab] for a kernel.

    The stride of a single row is arbitrary, and could make Triton compile another variant.
    """
    stride: int = logits.stride(0) if len(logits) > 1 else logits.shape[1]
    return stride


@triton.jit
def locate(
    drafts_end,  # int32 [requests]: end of each request's drafts; not read if MODE is "plain"
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
    if MODE != "plain":
        first = tl.load(drafts_end + request - 1, mask=request > 0, other=0)
        count = tl.load(drafts_end + request) - first
    if MODE == "target":
        before = tl.program_id(2)
        exists = before < count
        count = before
        row = (first + before).to(tl.int64)
    return row, exists, first, count
