"""Fix ``cache-keys``: requests share a KV cache block only if its KV is computed from equal inputs.

The prefix cache finds a block by the hash of its tokens and its extra keys. In 0.22.0, blocks with
different KV can have the same keys:

- an adapter is keyed by its name. If the name is unloaded and loaded again, or reloaded in place,
  its requests hit the blocks of the old weights (https://github.com/vllm-project/vllm/issues/42125);
- a ``cache_salt`` and an adapter's name are both plain strings. A base request whose salt is the
  name hits the adapter's first block (https://github.com/vllm-project/vllm/issues/44701);
- of two multimodal items that overlap (the audio track of a video), only the first is keyed. Of the
  items that join a streaming session in one turn, only the last is keyed;
- a prompt that mixes tokens and embeddings is keyed by both, and not by which position is which.

Here an adapter is keyed by its name, path, id and number of loads, each item that overlaps the
block is keyed, and so is the mask of a mixed prompt. Blocks of other requests keep upstream's keys.
KV events report upstream's keys for all blocks, but with ``enable_tower_connector_lora`` the
identifiers of :mod:`~vllm.v1.readiness.frontend.mm_hashes`.

Not covered: an adapter's files that change between a load and a later reload after eviction, or
while several requests with ``load_inplace`` wait. A KV store that outlives or is shared by engines
misses an adapter's blocks unless they agree on its id, path and number of loads.
"""

# mirrors: vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys
# mirrors: vllm.v1.core.kv_cache_utils:_gen_mm_extra_hash_keys
# mirrors: vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys
# mirrors: vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter

from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any

from vllm.v1.readiness import registry
from vllm.v1.readiness.core import records
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

#: Number of times that an adapter's weights may have been replaced, by ``lora_int_id``.
_loads: Counter[int] = Counter()
#: Requests are hashed, and loads counted, by two threads of the engine core.
_lock = Lock()


class Items:
    """Positions of a request's multimodal items, which are sorted by their first position.

    Attributes:
        starts: first position of each item.
        ends: largest end of each item and the items before it.
    """

    def __init__(self, request: "Request") -> None:
        places = [feature.mm_position for feature in request.mm_features]
        self.starts = [place.offset for place in places]
        self.ends = [*accumulate((place.offset + place.length for place in places), max)]


def distinct(
    request: "Request", start: int, end: int, keys: tuple[Any, ...] | None
) -> tuple[Any, ...] | None:
    """Return the extra keys for the hash of the block of positions ``start`` to ``end``.

    ``keys`` are upstream's. They are returned if the fix is off, or if the request has neither an
    adapter nor multimodal items nor prompt embeddings.
    """
    adapter, items, embeds = request.lora_request, request.mm_features, request.prompt_embeds
    if adapter is None and not items and embeds is None:
        return keys
    if registry.CACHE_KEYS not in switch.enabled():
        return keys
    found: list[Any] = []
    if adapter is not None:
        found.append(_adapter_key(request, adapter))
    if items:
        found += _item_keys(request, start, end)
    if start == 0 and request.cache_salt:
        found.append(request.cache_salt)
    if embeds is not None:
        assert keys  # upstream's last key is the digest of the embeddings
        mask = request.prompt_is_token_ids
        found.append(keys[-1] if mask is None else keys[-1] + bytes(mask[start:end]))
    return tuple(found) or None


def _adapter_key(request: "Request", adapter: "LoRARequest") -> tuple[Any, ...]:
    return adapter.lora_name, adapter.lora_int_id, adapter.lora_path, _load(request, adapter)


def _load(request: "Request", adapter: "LoRARequest") -> int:
    """Return the number of loads in a request's keys; at the first call, count the request's."""
    record = records.of(request)
    if record.loads is None:
        replaced(adapter)  # the worker loads it for this request
        record.loads = _loads[adapter.lora_int_id]
    return record.loads


def _item_keys(request: "Request", start: int, end: int) -> list[tuple[str, int]]:
    """Return identifier and relative position of each item that overlaps the block."""
    record = records.of(request)
    known = record.items
    if known is None or len(known.starts) != len(request.mm_features):
        known = record.items = Items(request)
    first, last = bisect_right(known.ends, start), bisect_left(known.starts, end)
    return [
        (feature.identifier, feature.mm_position.offset - start)
        for feature in request.mm_features[first:last]
        if feature.mm_position.offset + feature.mm_position.length > start
    ]


def replaced(adapter: "LoRARequest | int") -> None:
    """Count a load of an adapter whose weights may differ from the last load's.

    ``adapter`` is the request that loads it, or the id of an adapter that is removed.
    """
    if isinstance(adapter, int) or adapter.load_inplace:
        with _lock:
            _loads[adapter if isinstance(adapter, int) else adapter.lora_int_id] += 1


def renew(request: "Request") -> None:
    """Hash a request's blocks again if its adapter was replaced since they were hashed.

    Called before the prefix cache is searched, while the request has no block. Blocks that it
    fills later keep the number of loads of this call, whose weights its first tokens have.
    """
    adapter = request.lora_request
    if adapter is None or registry.CACHE_KEYS not in switch.enabled():
        return
    if _load(request, adapter) != (number := _loads[adapter.lora_int_id]):
        records.of(request).loads = number
        request.block_hashes.clear()
        request.update_block_hashes()
