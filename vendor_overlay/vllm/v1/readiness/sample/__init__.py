"""Sampling: penalties, bad words, thinking budgets, seeds, grammars and their state."""

# mirrors: nothing

from vllm.v1.readiness.engine.doors import door

__getattr__ = door(
    __name__,
    "bad_words",
    "closed_grammars",
    "cpu_drafts",
    "cpu_seeds",
    "logprob_ranks",
    "logprob_tokens",
    "penalties",
    "sampler_copies",
    "sampler_copies_mrv2",
    "seeds",
    "thinking_budget",
)
