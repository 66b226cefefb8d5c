"""Triton kernel for the inputs of a decode step whose batch has not changed."""

# mirrors: vllm.v1.worker.block_table:_compute_slot_mapping_kernel
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Rows per program.
_BLOCK = 128


@triton.jit(do_not_specialize=["rows", "sampled_stride", "groups"])
def advance_kernel(
    rows,
    computed,  # int32 [at least rows], advanced in place
    seq_lens,  # int32 [at least rows]
    positions,  # int64 [at least rows]
    input_ids,  # int32 [at least rows]; written if SAMPLED
    sampled,  # [rows, 1], any integer dtype; read if SAMPLED
    sampled_stride,
    groups,
    tables,  # int64 [groups, 4]: address of the block table, its stride, block size, slot mapping
    SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advance each row by one position; launch with grid [blocks of rows]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    position = tl.load(computed + row, mask=inside, other=0) + 1
    tl.store(computed + row, position, mask=inside)
    tl.store(seq_lens + row, position + 1, mask=inside)
    tl.store(positions + row, position.to(tl.int64), mask=inside)
    if SAMPLED:
        token = tl.load(sampled + row * sampled_stride, mask=inside, other=0)
        tl.store(input_ids + row, token.to(tl.int32), mask=inside)
    for group in range(groups):
        table = tl.load(tables + group * 4).to(tl.pointer_type(tl.int32))
        stride = tl.load(tables + group * 4 + 1)
        size = tl.load(tables + group * 4 + 2)
        slots = tl.load(tables + group * 4 + 3).to(tl.pointer_type(tl.int64))
        block = tl.load(table + row * stride + position // size, mask=inside, other=0)
        tl.store(slots + row, block.to(tl.int64) * size + position % size, mask=inside)


def advance(
    runner: "GPUModelRunner", rows: int, sampled: "torch.Tensor | None", tables: "torch.Tensor"
) -> None:
    """Advance the runner's buffers on the device.

    ``sampled`` [rows, 1] is the last step's tokens, or None if the host uploads them. ``tables``,
    int64 [groups, 4], comes from ``step_inputs.addresses``.
    """
    ids = runner.input_ids.gpu
    advance_kernel[(triton.cdiv(rows, _BLOCK),)](
        rows,
        runner.num_computed_tokens,
        runner.seq_lens,
        runner.positions,
        ids,
        ids if sampled is None else sampled,
        0 if sampled is None else sampled.stride(0),
        len(tables),
        tables,
        SAMPLED=sampled is not None,
        BLOCK=_BLOCK,
    )
