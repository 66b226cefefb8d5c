"""Fix ``mm-caches``: the front end knows which multimodal items the engine core has.

With one API server, the front end sends the data of a processed item to the engine core once. Both
keep a cache of the same capacity that evicts the least recently used item, and the front end omits
the data of an item that is in its own cache. In 0.22.0

- the front end caches an item as it renders a request. If the request is then refused (for its
  ``logprobs``, say) or its client leaves, the core never gets the item. Each later request with the
  item, of any client, ends with the finish reason "error", until the item is evicted
  (https://github.com/vllm-project/vllm/issues/46354);
- requests may be sent in another order than they were rendered, and the core may have evicted an
  item that the front end still has (https://github.com/vllm-project/vllm/issues/31404, 43423);
- both caches note that an item is used before they store it. If it is then not stored, as above, or
  room for it must be made among the items of its own request, the search for the oldest item finds
  it for ever. The front end or the engine core hangs.

Here the front end keeps an item until a request with it is sent, and records what was sent in the
order in which the core gets it. The record has less capacity than the core's cache, so the core has
every item that is on record, also if some requests are sent while another is rendered.

Not covered: ``mm_processor_cache_type="shm"``.
"""

# mirrors: vllm.multimodal.cache:MultiModalProcessorSenderCache.get_and_update_item
# mirrors: vllm.multimodal.cache:MultiModalProcessorSenderCache.is_cached_item
# mirrors: vllm.multimodal.cache:MultiModalReceiverCache.get_and_update_item
# mirrors: vllm.multimodal.cache:BaseMultiModalReceiverCache.get_and_update_features
# mirrors: vllm.utils.cache:LRUCache.touch

from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from vllm.multimodal.cache import MultiModalProcessorSenderCache
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
    from vllm.utils.cache import LRUCache
    from vllm.v1.engine.input_processor import InputProcessor

#: The record's capacity as a share of the core's. The rest is for requests that are sent between
#: the rendering and the sending of another.
_SHARE = 7 / 8


class _Items:
    """The items of one front end, which threads render requests for.

    Attributes:
        unsent: items that the core does not have, by hash.
        sent: sizes in bytes of items that the core has, by hash, in the order of their last use.
        lock: held while ``sent`` changes.
    """

    def __init__(self, capacity: float) -> None:
        self.unsent: dict[str, MultiModalKwargsItem] = {}
        self.sent: OrderedDict[str, int] = OrderedDict()
        self.lock = Lock()
        self._left = self._room = capacity * _SHARE

    def use(self, name: str) -> bool:
        """Return whether an item is on record, which becomes the one last used."""
        if name not in self.sent:
            return False
        self.sent.move_to_end(name)
        return True

    def record(self, name: str, size: int) -> None:
        """Record that the core stores an item, and evicts others for it."""
        self.unsent.pop(name, None)
        if size > self._room:  # whatever is on record may be evicted
            self.forget()
            return
        self.sent[name] = size
        self._left -= size
        while self._left < 0:
            self._left += self.sent.popitem(last=False)[1]

    def forget(self) -> None:
        """Forget what was sent."""
        self.sent.clear()
        self._left = self._room


def _of(cache: "MultiModalProcessorSenderCache") -> _Items | None:
    if registry.MM_CACHES not in switch.enabled():
        return None
    return subclasses.remembered(cache, lambda: _Items(cache._cache.capacity))


def _of_processor(processor: "InputProcessor") -> _Items | None:
    """Return the items of a front end that has rendered one, and sends data once."""
    cache = processor.renderer.mm_processor_cache
    items: _Items | None = getattr(cache, subclasses.ATTRIBUTE, None)  # absent with the fix off
    return items


def touch(cache: "LRUCache[str, Any]", name: str) -> None:
    """Note that the item is used; if the cache does not have it yet, storing it will."""
    if name in cache or registry.MM_CACHES not in switch.enabled():
        cache.touch(name)


def has(cache: "MultiModalProcessorSenderCache", name: str) -> bool:
    """Return whether a request need not process an item, of which the cache has the metadata.

    Metadata of an item that has to be processed again are dropped: with a client's ``uuid``, it may
    be another item.
    """
    items = _of(cache)
    if items is None or name in items.unsent or name in items.sent:
        return True
    cache._cache.pop(name, None)
    return False


def found(cache: "MultiModalProcessorSenderCache", name: str) -> "MultiModalKwargsItem | None":
    """Return an item, of which the cache has the metadata, if the core does not have it."""
    items = _of(cache)
    return None if items is None else items.unsent.get(name)


def received(
    cache: "LRUCache[str, MultiModalKwargsItem]", name: str, item: "MultiModalKwargsItem | None"
) -> "MultiModalKwargsItem | None":
    """Return the core's cached item; None if it was sent again and must be stored."""
    if item is not None and registry.MM_CACHES in switch.enabled():
        return None
    return cache.get(name)


def store(cache: "MultiModalProcessorSenderCache", name: str, item: "MultiModalKwargsItem") -> None:
    """Keep a new item until it is sent or evicted."""
    items = _of(cache)
    if items is None:
        return
    for evicted in [each for each in items.unsent if each not in cache._cache]:
        del items.unsent[evicted]
    if name not in items.sent:
        items.unsent[name] = item


def send(
    processor: "InputProcessor", features: "list[MultiModalFeatureSpec] | None"
) -> "list[MultiModalFeatureSpec] | None":
    """Omit the data that the core has, and return the features, which are about to be sent.

    The features are modified in place. If they are not sent, call :func:`forget`.
    """
    from vllm.multimodal.cache import MultiModalCache

    items = _of_processor(processor) if features else None
    if items is None or features is None:
        return features
    names = [feature.mm_hash or feature.identifier for feature in features]
    with items.lock:
        for name in names:  # as the core does, before it stores any
            items.use(name)
        for name, feature in zip(names, features, strict=True):
            if items.use(name):
                feature.data = None
            elif feature.data is not None:
                items.record(name, MultiModalCache.get_item_size(feature.data))
            else:
                # It has left the record since the request was rendered. If the core has evicted
                # it, the core stores none of the items that follow.
                items.forget()
                break
    return features


def forget(processor: "InputProcessor") -> None:
    """Forget what was sent: a request was refused after :func:`send`."""
    items = _of_processor(processor)
    if items is not None:
        with items.lock:
            items.forget()


def clear(cache: "MultiModalProcessorSenderCache") -> None:
    """Forget all items, as the core does."""
    items = _of(cache)
    if items is not None:
        with items.lock:
            items.unsent.clear()
            items.forget()
