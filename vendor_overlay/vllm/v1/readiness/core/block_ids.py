"""Fix ``block-ids``: drop the ids of new KV cache blocks for models that never read them.

The KV cache managers append the id of each allocated block to a list, from which the worker learns
the blocks to zero. The scheduler drains these lists only for models with Mamba layers. For all
other models the lists of 0.22.0 grow by eight bytes per block allocation, without limit. Memory
profilers that call ``gc.get_objects`` miss the leak, because ``gc.freeze`` hides the lists.
(https://github.com/vllm-project/vllm/issues/44175)
"""

# mirrors: vllm.v1.core.kv_cache_manager:KVCacheManager.take_new_block_ids
# mirrors: vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.take_new_block_ids

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


def drop_unread(manager: "KVCacheManager") -> None:
    """Drop the new block ids of the previous step, unless the worker zeroes new blocks."""
    if manager.kv_cache_config.needs_kv_cache_zeroing:
        return
    if registry.BLOCK_IDS in switch.enabled():
        manager.take_new_block_ids()
