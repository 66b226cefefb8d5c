"""Fix ``window-blocks``: no block is given away that a request's attention window may need again.

Layers with a sliding window, or with chunked local attention, give back the blocks that lie
before the window. Under asynchronous scheduling 0.22.0 does so as if every draft in flight had
been accepted. If they are rejected, the request goes back, and its window begins in a block that
may be another request's by then: it attends to the other's keys and values.
(https://github.com/vllm-project/vllm/pull/47728)

Here those layers count the drafts in flight as rejected. Mamba layers do so in 0.22.0.
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
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from vllm.v1.request import Request


_WINDOWS = (SlidingWindowManager, ChunkedLocalAttentionManager)
#: The coordinator's attribute for :func:`_mends`.
_MENDS = "readiness_mends_windows"


def remove_skipped_blocks(
    coordinator: KVCacheCoordinator, request: "Request", computed: int
) -> None:
    """Give back the blocks that a request's attention windows have left behind.

    Args:
        coordinator: of the KV cache.
        request: a request that is being scheduled.
        computed: its tokens that are computed if all drafts in flight are accepted.
    """
    # Of a step's placeholders, one is for the token that it surely samples.
    drafts = request.num_output_placeholders - 1
    if drafts <= 0 or not subclasses.remembered(coordinator, _MENDS, lambda: _mends(coordinator)):
        coordinator.remove_skipped_blocks(request.request_id, computed)
        return
    certain = max(0, computed - drafts)
    for manager in coordinator.single_type_managers:
        window = isinstance(manager, _WINDOWS)
        manager.remove_skipped_blocks(request.request_id, certain if window else computed)


def _mends(coordinator: KVCacheCoordinator) -> bool:
    """Whether the fix is on, and there are windows, which upstream's method gives blocks of."""
    return (
        type(coordinator).remove_skipped_blocks is KVCacheCoordinator.remove_skipped_blocks
        and any(isinstance(each, _WINDOWS) for each in coordinator.single_type_managers)
        and registry.WINDOW_BLOCKS in switch.enabled()
    )
