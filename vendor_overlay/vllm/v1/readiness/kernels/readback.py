"""Triton kernel that stores device tensors into pinned host memory.

CUDA's unified virtual addressing lets a kernel write to pinned memory. The host sees the result
once an event recorded after the launch has completed.
"""

# mirrors: nothing

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024
#: Tensors per launch.
_TENSORS = 4


@triton.jit(
    do_not_specialize=[
        *("source0", "source1", "source2", "source3"),
        *("target0", "target1", "target2", "target3"),
        *("size0", "size1", "size2", "size3"),
    ]
)
def store_kernel(
    source0,  # int64: address of device memory
    source1,
    source2,
    source3,
    target0,  # int64: address of pinned host memory
    target1,
    target2,
    target3,
    size0,  # int32: number of 4-byte words; 0 if there is no such tensor
    size1,
    size2,
    size3,
    BLOCK: tl.constexpr,
):
    """Store one block of one tensor; grid [tensors, blocks of the largest tensor].

    Addresses are passed as unspecialized integers, to compile the kernel only once.
    """
    which = tl.program_id(0)
    source = tl.where(which < 2, tl.where(which < 1, source0, source1), source2)
    target = tl.where(which < 2, tl.where(which < 1, target0, target1), target2)
    size = tl.where(which < 2, tl.where(which < 1, size0, size1), size2)
    source = tl.where(which < 3, source, source3)
    target = tl.where(which < 3, target, target3)
    size = tl.where(which < 3, size, size3)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source.to(tl.pointer_type(tl.int32)) + word, mask=word < size)
    tl.store(target.to(tl.pointer_type(tl.int32)) + word, values, mask=word < size)


def store(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Store ``sources`` into pinned ``targets``, contiguous and of equal shapes and dtypes.

    A tensor that does not consist of aligned 4-byte words is copied instead.
    """
    jobs = []
    for source, target in zip(sources, targets, strict=True):
        origin, destination, size = source.data_ptr(), target.data_ptr(), source.nbytes
        if (origin | destination | size) % 4:
            target.copy_(source, non_blocking=True)
        elif size:
            jobs.append((origin, destination, size // 4))
    for first in range(0, len(jobs), _TENSORS):
        group = jobs[first : first + _TENSORS]
        largest = max(size for _, _, size in group)
        # Pad with real addresses: Triton infers the width of an integer from its value.
        idle = [(*group[0][:2], 0)] * (_TENSORS - len(group))
        grid = (len(group), triton.cdiv(largest, _BLOCK))
        columns = zip(*group, *idle, strict=True)
        store_kernel[grid](*(number for column in columns for number in column), BLOCK=_BLOCK)
