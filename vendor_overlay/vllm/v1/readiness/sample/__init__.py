"""Sampling: penalties, bad words, thinking budgets, seeds, grammars and their state."""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine.doors import door

if TYPE_CHECKING:  # for editors
    from vllm.v1.readiness.sample import (
        bad_words,
        closed_grammars,
        cpu_drafts,
        cpu_seeds,
        logprob_ranks,
        logprob_tokens,
        penalties,
        sampler_copies,
        sampler_copies_mrv2,
        seeds,
        thinking_budget,
    )

__getattr__ = door(__name__)
