"""The scheduler and the KV cache manager."""

# mirrors: nothing

from vllm.v1.readiness.engine.doors import door

__getattr__ = door(
    __name__,
    "block_ids",
    "cache_keys",
    "ended_grammars",
    "grammar_masks",
    "grammar_stops",
    "mamba_blocks",
    "mask_rows",
    "orphan_drafts",
    "preemption",
    "reasoning_ends",
    "step",
    "window_blocks",
)
