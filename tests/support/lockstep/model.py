"""Simulated model and drafter, which give every runner the same logits and drafts."""

import random
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from support.scheduling import VOCABULARY

#: Drafts consist of this many first tokens of the vocabulary, so that their penalties matter.
DRAFTED = 3


def draw_logits(seed: int, rows: int, favour_drafts: bool) -> torch.Tensor:
    """Draw logits, float32 [rows, vocabulary].

    Args:
        seed: of the draw.
        rows: number of rows.
        favour_drafts: raise the logits of the tokens that drafts and markers consist of.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, VOCABULARY), generator=generator) * 2
    if favour_drafts:
        logits[:, :DRAFTED] += 6.0
    return logits


def draw_drafts(seed: int, req_id: str, count: int) -> list[int]:
    """Draw a request's draft tokens."""
    chooser = random.Random(f"{seed} {req_id}")
    return [chooser.randrange(DRAFTED) for _ in range(count)]


def draw_kept_drafts(seed: int, req_id: str, count: int) -> int:
    """Draw how many of ``count`` drafts a runner that trims them keeps."""
    chooser = random.Random(f"{seed} {req_id} valid")
    return chooser.choice([0, 0, chooser.randint(0, count)]) if seed % 3 else 0


def constrain(
    structured: Collection[str], scheduled: Any, batch: Any, logits: torch.Tensor
) -> None:
    """Forbid every second token to requests with structured output, in place."""
    if not structured:
        return
    spec = scheduled.scheduled_spec_decode_tokens
    req_ids = [r for r in batch.req_ids if r in structured]
    rows = sum(1 + len(spec.get(r, ())) for r in req_ids)
    words = -(-VOCABULARY // 32)
    mask = np.full((rows, words), 0x55555555, dtype=np.int32)
    apply_grammar_bitmask(scheduled, GrammarOutput(req_ids, mask), batch, logits)
