"""Fix ``block-ids``: drop the ids of new KV cache blocks where they are never read.

The KV cache managers record the id of each allocated block, for the worker to zero. Only models
with Mamba layers read these lists. For all others stock 0.22.0 never clears them: the engine leaks
eight bytes per block. The garbage collector has frozen the lists, so memory profilers miss the
leak. (https://github.com/vllm-project/vllm/issues/44175)
"""

# mirrors: vllm.v1.core.kv_cache_manager:KVCacheManager.take_new_block_ids
# mirrors: vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.take_new_block_ids

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

#: The manager's attribute for :func:`_drops`.
_DROPS = "readiness_drops_block_ids"


def drop_unread(manager: "KVCacheManager") -> None:
    """Drop the ids of the previous step if the worker does not zero new blocks."""
    if subclasses.remembered(manager, _DROPS, lambda: _drops(manager)):
        manager.take_new_block_ids()


def _drops(manager: "KVCacheManager") -> bool:
    """Whether the fix is on and the ids are never read."""
    return (
        not manager.kv_cache_config.needs_kv_cache_zeroing
        and registry.BLOCK_IDS in switch.enabled()
    )
