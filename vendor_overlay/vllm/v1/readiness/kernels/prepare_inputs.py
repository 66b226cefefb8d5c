"""Triton kernel that writes a step's inputs into the runner's buffers on the device."""

# mirrors: vllm.v1.worker.block_table:_compute_slot_mapping_kernel
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Tokens or padding entries per iteration.
_BLOCK = 1024


@triton.jit(do_not_specialize=["rows", "max_rows", "tokens", "on_host", "sampled_stride", "groups"])
def prepare_kernel(
    staged,  # int32; see step_inputs.pack
    rows,
    max_rows,
    tokens,
    on_host,  # whether token ids are staged
    computed,  # int32 [max_rows]
    seq_lens,  # int32 [max_rows]
    starts,  # int32 [max_rows + 1]
    discarded,  # bool [max_rows]
    positions,  # int64 [at least tokens]
    input_ids,  # int32 [at least tokens]
    logits_indices,  # int32 [max_rows]
    sampled,  # [previous rows, 1], any integer dtype; read if SAMPLED
    sampled_stride,
    groups,
    tables,  # int64 [groups, 5]; see step_inputs.table_arguments
    SAMPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the inputs of one row; in the last program of grid [rows + 1], the padding."""
    row = tl.program_id(0)
    if row == rows:
        for i in range(rows, max_rows, BLOCK):
            entry = i + tl.arange(0, BLOCK)
            tl.store(seq_lens + entry, 0, mask=entry < max_rows)
        for i in range(rows, max_rows + 1, BLOCK):
            entry = i + tl.arange(0, BLOCK)
            tl.store(starts + entry, tokens, mask=entry <= max_rows)
        for group in range(groups):
            slots = tl.load(tables + group * 5 + 3).to(tl.pointer_type(tl.int64))
            most = tl.load(tables + group * 5 + 4).to(tl.int32)
            for i in range(tokens, most, BLOCK):
                entry = i + tl.arange(0, BLOCK)
                tl.store(slots + entry, -1, mask=entry < most)
        return
    start = tl.load(staged + row - 1, mask=row > 0, other=0)
    end = tl.load(staged + row)
    first = tl.load(staged + rows + row)
    previous = tl.load(staged + 2 * rows + row)
    tl.store(starts + row, start)
    tl.store(logits_indices + row, end - 1)
    tl.store(computed + row, first)
    tl.store(seq_lens + row, first + end - start)
    tl.store(discarded + row, tl.load(staged + 3 * rows + row) != 0)
    for i in range(start, end, BLOCK):
        token = i + tl.arange(0, BLOCK)
        inside = token < end
        position = first + token - start
        tl.store(positions + token, position.to(tl.int64), mask=inside)
        held = inside
        if SAMPLED:
            held = inside & ((previous < 0) | (token < end - 1))
        ids = tl.load(staged + 4 * rows + token, mask=held & (on_host != 0), other=0)
        tl.store(input_ids + token, ids, mask=held)
        for group in range(groups):
            table = tl.load(tables + group * 5).to(tl.pointer_type(tl.int32))
            stride = tl.load(tables + group * 5 + 1)
            size = tl.load(tables + group * 5 + 2)
            slots = tl.load(tables + group * 5 + 3).to(tl.pointer_type(tl.int64))
            block = tl.load(table + row * stride + position // size, mask=inside, other=0)
            tl.store(slots + token, block.to(tl.int64) * size + position % size, mask=inside)
    if SAMPLED:
        known = previous >= 0
        newest = tl.load(sampled + previous.to(tl.int64) * sampled_stride, mask=known, other=0)
        tl.store(input_ids + end - 1, newest.to(tl.int32), mask=known)


def launch(
    runner: "GPUModelRunner",
    staged: "torch.Tensor",
    rows: int,
    tokens: int,
    on_host: bool,
    sampled: "torch.Tensor | None",
    logits_indices: "torch.Tensor",
    tables: "torch.Tensor",
) -> None:
    """Write the runner's buffers on the device for a step of ``rows`` requests.

    ``step_inputs.pack`` wrote ``staged``, which includes token ids if ``on_host``. ``sampled``
    [previous rows, 1] is the last step's tokens; None if ``staged`` includes all tokens.
    ``logits_indices``, int32 [at least rows], receives the index of each request's last token.
    ``tables``, int64 [groups, 5], comes from ``step_inputs.table_arguments``.
    """
    ids = runner.input_ids.gpu
    prepare_kernel[(rows + 1,)](
        staged,
        rows,
        len(runner.seq_lens),
        tokens,
        int(on_host),
        runner.num_computed_tokens,
        runner.seq_lens,
        runner.query_start_loc.gpu,
        runner.discard_request_mask.gpu,
        runner.positions,
        ids,
        logits_indices,
        ids if sampled is None else sampled,
        0 if sampled is None else sampled.stride(0),
        len(tables),
        tables,
        SAMPLED=sampled is not None,
        BLOCK=_BLOCK,
    )
