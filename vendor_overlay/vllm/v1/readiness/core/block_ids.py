"""Fix ``block-ids``: no list of block ids grows for as long as the engine runs.

The managers of a KV cache note the id of each block that they hand out, for the worker to zero.
Only models with Mamba layers need that, and for all others 0.22.0 never takes the ids away: the
engine's memory grows by eight bytes a block. The objects are frozen and counted by no profiler,
so this looks like fragmentation. (https://github.com/vllm-project/vllm/issues/44175)
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
    """Drop the ids of the step before, if nobody reads them."""
    if subclasses.remembered(manager, _DROPS, lambda: _drops(manager)):
        manager.take_new_block_ids()


def _drops(manager: "KVCacheManager") -> bool:
    """Whether the fix is on, and nobody reads the ids."""
    if manager.kv_cache_config.needs_kv_cache_zeroing:
        return False
    return registry.BLOCK_IDS in switch.enabled()
