"""Fix ``mamba-blocks``: with drafts, Mamba blocks match the tokens that are computed.

With prefix caching (``mamba_cache_mode`` "align"), 0.22.0 mismatches them in two cases:

- A Mamba group allocates blocks for all tokens of a step, drafts included. If drafts are rejected
  at the end of a block, and the next step has fewer, that step needs fewer blocks than the request
  has. An assert ends the engine, and the missing blocks count as free ones of other groups. Here
  the request keeps its blocks. (https://github.com/vllm-project/vllm/issues/39271)
- With a draft model (EAGLE, MTP), a group finds one block more of a cached prefix, and drops it
  again. Mamba groups never drop it, so the prefix ends one block behind attention's blocks, and
  attention reads a block without the prompt's keys and values. Here a Mamba group finds no block
  more. (https://github.com/vllm-project/vllm/issues/43559)
"""

# mirrors: vllm.v1.core.single_type_kv_cache_manager:MambaManager.get_num_blocks_to_allocate
# mirrors: vllm.v1.core.single_type_kv_cache_manager:MambaManager.allocate_new_blocks
# mirrors: vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec


def keeps(required: int, held: int) -> bool:
    """Return whether a request keeps its ``held`` blocks, because it needs fewer."""
    return required < held and registry.MAMBA_BLOCKS in switch.enabled()


def needed(count: int) -> int:
    """Return the number of new blocks that a step needs; upstream's may be negative."""
    return 0 if count < 0 and registry.MAMBA_BLOCKS in switch.enabled() else count


def never_drops(spec: "KVCacheSpec") -> bool:
    """Return whether a group keeps the last block of a prefix that it finds."""
    return isinstance(spec, MambaSpec) and registry.MAMBA_BLOCKS in switch.enabled()
