"""Fix ``window-blocks``: keep blocks that an attention window needs if drafts are rejected.

KV cache groups with a sliding window or chunked local attention free the blocks before the window.
Under async scheduling, 0.22.0 computes the window as if all in-flight drafts were accepted. If
drafts are rejected, the window moves back into a freed block, and the request attends to the KV of
another request (https://github.com/vllm-project/vllm/pull/47728). Here these groups count in-flight
drafts as rejected, as Mamba groups do in 0.22.0.
"""

# mirrors: vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots
# mirrors: vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.remove_skipped_blocks
# mirrors: vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks
# mirrors: vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.get_num_skipped_tokens
# mirrors: vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.request import Request

_WINDOWS = (SlidingWindowManager, ChunkedLocalAttentionManager)


def remove_skipped_blocks(
    coordinator: KVCacheCoordinator, request: "Request", computed: int
) -> None:
    """Free the blocks before a request's attention windows.

    ``computed`` is the number of computed tokens if all in-flight drafts are accepted.
    """
    # One placeholder is for the token that a step always samples, the others are for drafts.
    drafts = request.num_output_placeholders - 1
    if drafts <= 0 or not _has_windows(coordinator):
        coordinator.remove_skipped_blocks(request.request_id, computed)
        return
    certain = max(0, computed - drafts)
    for manager in coordinator.single_type_managers:
        window = isinstance(manager, _WINDOWS)
        manager.remove_skipped_blocks(request.request_id, certain if window else computed)


def _has_windows(coordinator: KVCacheCoordinator) -> bool:
    """Return whether the fix is on and serves a coordinator: one with windows, of vLLM's code."""
    managers = getattr(coordinator, "single_type_managers", ())
    if not any(isinstance(manager, _WINDOWS) for manager in managers):
        return False
    method = getattr(coordinator.remove_skipped_blocks, "__func__", None)
    vllms = method is KVCacheCoordinator.remove_skipped_blocks
    return vllms and registry.WINDOW_BLOCKS in switch.enabled()
