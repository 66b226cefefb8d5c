"""The scheduler and the KV cache manager."""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine.doors import door

if TYPE_CHECKING:  # for editors
    from vllm.v1.readiness.core import (
        block_ids,
        cache_keys,
        ended_grammars,
        grammar_masks,
        grammar_stops,
        mamba_blocks,
        mask_rows,
        orphan_drafts,
        preemption,
        reasoning_ends,
        step,
        window_blocks,
    )

__getattr__ = door(__name__)
