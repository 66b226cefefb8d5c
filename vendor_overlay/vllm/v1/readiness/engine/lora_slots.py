"""Fix ``lora-slots``: a request is computed with its own LoRA adapter while others come and go.

A worker keeps adapters in ``max_loras`` slots, and maps each token to a slot. In 0.22.0

- the mapping is kept while the batch has the same adapters, although ``add_lora``, ``remove_lora``
  or ``pin_lora`` moved them to other slots. The next steps of running requests then use another
  adapter's weights (https://github.com/vllm-project/vllm/issues/47724);
- a batch's adapters are collected by name. If a name is loaded again while requests of the old
  adapter run, one of the two is not loaded, and the engine dies;
- a pinned adapter keeps its slot although the batch needs it, and the engine dies;
- an adapter that was reloaded in place over HTTP is read from disk again in every step.

Here the mapping is computed again if a slot changed, adapters are told apart by their ids, and an
adapter is unpinned, with a warning, if the batch needs its slot.
"""

# mirrors: vllm.lora.model_manager:LoRAModelManager.set_adapter_mapping
# mirrors: vllm.lora.model_manager:LRUCacheLoRAModelManager.activate_adapter
# mirrors: vllm.lora.worker_manager:LRUCacheWorkerLoRAManager._apply_adapters
# mirrors: vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter
# mirrors: vllm.lora.request:LoRARequest.__eq__

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.lora.model_manager import LoRAModelManager, LRUCacheLoRAModelManager
    from vllm.lora.request import LoRARequest

logger = init_logger(__name__)


def moved(manager: "LoRAModelManager") -> bool:
    """Return whether a slot has another adapter than at the last call.

    The manager's attribute ``readiness`` has the adapter of each slot at that call.
    """
    if registry.LORA_SLOTS not in switch.enabled():
        return False
    layout = tuple(manager.lora_index_to_id)
    if getattr(manager, subclasses.ATTRIBUTE, None) == layout:
        return False
    manager.readiness = layout
    return True


def make_room(manager: "LRUCacheLoRAModelManager", needed: "Collection[int]") -> None:
    """Unpin the least recently used adapters whose room the batch needs.

    Args:
        manager: the manager of the worker's adapters.
        needed: ids of the batch's adapters, at most as many as there are slots.
    """
    if registry.LORA_SLOTS not in switch.enabled():
        return
    for cache, room in (
        (manager._active_adapters, manager.lora_slots),
        (manager._registered_adapters, manager.capacity),
    ):
        if not cache.pinned_items:
            continue
        others = [name for name in cache.order if name in cache.pinned_items and name not in needed]
        for name in others[: max(0, len(others) + len(needed) - room)]:
            cache.pinned_items.remove(name)
            logger.warning("LoRA adapter %d is unpinned: running requests need its room.", name)


def same(one: "LoRARequest", other: "LoRARequest") -> bool:
    """Return whether two LoRA requests are equal: by name, and by id if the fix is on."""
    if one.lora_name != other.lora_name:
        return False
    return one.lora_int_id == other.lora_int_id or registry.LORA_SLOTS not in switch.enabled()


def loaded(adapter: "LoRARequest") -> None:
    """Mark an adapter as loaded, so that the requests that use it do not reload it in place."""
    if registry.LORA_SLOTS in switch.enabled():
        adapter.load_inplace = False
