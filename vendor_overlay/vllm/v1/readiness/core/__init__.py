"""The scheduler and the KV cache manager."""

# mirrors: nothing

from vllm.v1.readiness.engine.doors import door

__getattr__ = door(
    __name__,
    "block_ids",
    "cache_keys",
    "ended_grammars",
    "failed_loads",
    "grammar_masks",
    "grammar_stops",
    "kv_transfers",
    "lora_limits",
    "mamba_blocks",
    "mask_rows",
    "orphan_drafts",
    "preemption",
    "reasoning_ends",
    "refused_grammars",
    "schedule",
    "sessions",
    "stalled_requests",
    "update_outputs",
    "window_blocks",
)
