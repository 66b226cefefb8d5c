"""The scheduler and the KV cache manager."""

# mirrors: nothing

from vllm.v1.readiness.engine.doors import door

__getattr__ = door(
    __name__,
    "block_ids",
    "cache_keys",
    "failed_loads",
    "grammar_masks",
    "kv_transfers",
    "orphan_drafts",
    "preemption",
    "refused_grammars",
    "schedule",
    "sessions",
    "stalled_requests",
    "update_outputs",
    "window_blocks",
)
