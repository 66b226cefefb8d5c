"""A Triton kernel that stores tensors of the device into pinned memory of the host.

Import only where Triton has a driver, or under its interpreter (TRITON_INTERPRET=1).

The driver maps pinned memory into the device's address space (CUDA's unified virtual
addressing), so that a kernel can write to it. What it wrote is seen by the host once an
event behind it has completed.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024
#: How many tensors one launch stores.
_WIDTH = 4


@triton.jit(
    do_not_specialize=[
        *("source0", "source1", "source2", "source3"),
        *("target0", "target1", "target2", "target3"),
        *("size0", "size1", "size2", "size3"),
    ]
)
def store_kernel(
    source0,  # int64: address on the device
    source1,
    source2,
    source3,
    target0,  # int64: address on the host, pinned
    target1,
    target2,
    target3,
    size0,  # int32: words of four bytes; 0 for nothing
    size1,
    size2,
    size3,
    BLOCK: tl.constexpr,
):
    """Store one block of one tensor; grid [tensors, blocks of the largest].

    Addresses are numbers and nothing is specialised, so that there is one compiled form.
    """
    which = tl.program_id(0)
    source = tl.where(which < 2, tl.where(which < 1, source0, source1), source2)
    target = tl.where(which < 2, tl.where(which < 1, target0, target1), target2)
    size = tl.where(which < 2, tl.where(which < 1, size0, size1), size2)
    source = tl.where(which < 3, source, source3)
    target = tl.where(which < 3, target, target3)
    size = tl.where(which < 3, size, size3)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source.to(tl.pointer_type(tl.int32)) + at, mask=at < size)
    tl.store(target.to(tl.pointer_type(tl.int32)) + at, words, mask=at < size)


def store(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Store contiguous tensors into contiguous pinned ones of the same shapes and dtypes.

    Those that are not whole words of four bytes are copied.
    """
    jobs = []
    for source, target in zip(sources, targets, strict=True):
        at, to, size = source.data_ptr(), target.data_ptr(), source.nbytes
        if (at | to | size) % 4:
            target.copy_(source, non_blocking=True)
        elif size:
            jobs.append((at, to, size // 4))
    for first in range(0, len(jobs), _WIDTH):
        group = jobs[first : first + _WIDTH]
        largest = max(size for _, _, size in group)
        # A real address, for Triton tells the width of a number from its value.
        idle = [(*group[0][:2], 0)] * (_WIDTH - len(group))
        grid = (len(group), triton.cdiv(largest, _BLOCK))
        columns = zip(*group, *idle, strict=True)
        store_kernel[grid](*(number for column in columns for number in column), BLOCK=_BLOCK)
