"""Penalties by PyTorch's operations, for devices without the Triton kernels (CPU, ROCm, XPU).

Also for logits and sampled ids of other dtypes and layouts than the kernels take. The slots are
those of :mod:`~vllm.v1.readiness.sample.penalties`; a row without penalties has None.
"""

# mirrors: vllm.model_executor.layers.utils:apply_penalties
# mirrors: vllm.model_executor.layers.utils:get_token_bin_counts_and_mask
# mirrors: vllm._custom_ops:apply_repetition_penalties
# mirrors: vllm._custom_ops:apply_repetition_penalties_cuda
# mirrors: vllm._custom_ops:apply_repetition_penalties_torch

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm import _custom_ops

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

_PROMPT = np.iinfo(np.int32).min
_COUNT = np.iinfo(np.int32).max


def build(
    slots: Sequence[torch.Tensor],
    histories: Sequence[np.ndarray],
    send: Callable[[np.ndarray], torch.Tensor],
) -> None:
    """Fill slots; ``histories`` holds the tokens of each prompt, followed by its output's."""
    for slot, prompt, output in zip(slots, histories[::2], histories[1::2], strict=True):
        slot.zero_()
        slot.index_fill_(0, send(prompt[(prompt >= 0) & (prompt < len(slot))]), _PROMPT)
        ids = send(output[(output >= 0) & (output < len(slot))])
        slot.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))


def count(
    slots: Sequence[torch.Tensor | None],
    sampled: torch.Tensor,
    discarded: torch.Tensor,
    vocab_size: int,
) -> None:
    """Count ``sampled`` [rows, tokens] in the slots, except in ``discarded`` rows."""
    ids, counted = _valid(sampled, vocab_size)
    counted = counted.masked_fill(discarded[: len(sampled), None], 0)
    for row, slot in enumerate(slots):
        if slot is not None:
            slot.index_add_(0, ids[row], counted[row])


def _valid(tokens: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids clamped to the vocabulary, and an int32 mask of the ids that are in it."""
    ids = tokens.long()
    valid = (ids >= 0) & (ids < vocab_size)
    return ids.clamp(0, vocab_size - 1), valid.to(torch.int32)


def apply(
    slots: Sequence[torch.Tensor | None],
    penalties: Sequence[torch.Tensor],
    logits: torch.Tensor,
    drafts: "SpecDecodeMetadata | None",
    per_draft: bool,
    repeated: np.ndarray,
    divide: bool,
) -> None:
    """Apply the penalties in place to logits [positions, vocab] by upstream's operations.

    ``penalties`` are repetition, frequency and presence, float32 [rows] each. With ``per_draft``,
    there is one position per draft, after the row's earlier drafts. Otherwise there is one per row,
    after all of its drafts. ``repeated``, bool [rows], marks the rows whose repetition penalty is
    not 1. ``divide`` selects the kernel that upstream uses for contiguous logits.
    """
    repeat = (
        _custom_ops.apply_repetition_penalties_cuda
        if divide
        else _custom_ops.apply_repetition_penalties_torch
    )
    ids = torch.empty(0, dtype=torch.int32, device=logits.device)
    drafted = [ids] * len(slots)
    if drafts is not None:
        drafted = drafts.draft_token_ids.split(drafts.num_draft_tokens)
    position = 0
    for row, slot in enumerate(slots):
        ids = drafted[row]
        for preceding in range(len(ids)) if per_draft else (len(ids),):
            logit = logits[position : position + 1]
            position += 1
            if slot is None:
                continue
            counts = slot & _COUNT
            if preceding:
                counts.index_add_(0, *_valid(ids[:preceding], len(slot)))
            generated = (counts > 0).unsqueeze(0)
            repetition, frequency, presence = (values[row : row + 1] for values in penalties)
            if repeated[row]:
                repeat(logit, (slot < 0).unsqueeze(0), generated, repetition)
            logit -= frequency.unsqueeze(1) * counts
            logit -= presence.unsqueeze(1) * generated
