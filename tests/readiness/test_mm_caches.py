"""The fix mm-caches: the front end sends each multimodal item that the engine core does not have.

The caches of both are real, and so is the code that renders a request's items from them. The pinned
caches have the faults, which are asserted as well; with the fix off ours have them.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from vllm.config import VllmConfig
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseMultiModalProcessor
from vllm.utils.mem_constants import GiB_bytes
from vllm.v1.readiness.frontend import bad_requests, mm_caches, request_types

FIX = "mm-caches"
CACHE = "vllm/multimodal/cache.py"
#: Bytes that each cache holds, and of the items that the front end may send while a request is
#: rendered.
CAPACITY, MARGIN = 64, 8


class Spins(Exception):
    """A cache looks for its oldest item for ever."""


class Rendered(NamedTuple):
    """A request that has been rendered.

    Attributes:
        names: its items, of which one may come twice.
        data: their data as the request carries it.
        processed: the items that had to be processed.
    """

    names: list[str]
    data: list[Any]
    processed: list[str]


def size(name: str) -> int:
    """Return an item's number of bytes, which its name ends with."""
    return int(name[1:])


class Caches:
    """The caches of a front end and of its engine core.

    Attributes:
        items: the item of each name as it was last processed.
    """

    def __init__(self, side: str) -> None:
        cache = modules.of_side(side)(CACHE)
        config: Any = SimpleNamespace(mm_processor_cache_gb=CAPACITY / GiB_bytes)
        model: Any = SimpleNamespace(get_multimodal_config=lambda: config)
        self.sender = cache.MultiModalProcessorSenderCache(model)
        self.receiver = cache.MultiModalReceiverCache(model)
        self.processor: Any = SimpleNamespace(
            renderer=SimpleNamespace(mm_processor_cache=self.sender)
        )
        self.sends = side != "pinned"
        self.items: dict[str, MultiModalKwargsItem] = {}
        for each in (self.sender._cache, self.receiver._cache):
            each.popitem = partial(self._pop, each, each.popitem)

    @staticmethod
    def _pop(cache: Any, popitem: Any, **named: bool) -> Any:
        before = len(cache)
        popped = popitem(**named)
        if len(cache) == before:
            raise Spins
        return popped

    def render(self, *names: str) -> Rendered:
        """Render a request as upstream's processor does."""
        hashes = {"image": [*names]}
        cached = {"image": self.sender.is_cached([*names])}
        missing = [n for n, known in zip(names, cached["image"], strict=True) if not known]
        made = [MultiModalKwargsItem.dummy(size(name)) for name in missing]
        self.items |= zip(missing, made, strict=True)
        merged, _ = BaseMultiModalProcessor._merge_mm_kwargs(
            SimpleNamespace(),
            self.sender,
            mm_hashes=hashes,
            mm_is_cached=cached,
            mm_missing_kwargs=MultiModalKwargsItems({"image": made}),
            mm_missing_prompt_updates=defaultdict(list, image=[[] for _ in made]),
        )
        return Rendered([*names], [*merged["image"]], missing)

    def send(self, request: Rendered) -> list[bool]:
        """Send a request; return of which items it carried the data.

        Raises:
            AssertionError: the core lacks an item.
        """
        features = [
            MultiModalFeatureSpec(data, "image", name, PlaceholderRange(0, 1), mm_hash=name)
            for name, data in zip(request.names, request.data, strict=True)
        ]
        if self.sends:
            assert mm_caches.send(self.processor, features) is features
        carried = [feature.data is not None for feature in features]
        self.receiver.get_and_update_features(features)
        for name, feature in zip(request.names, features, strict=True):
            assert feature.data is not None
            assert feature.data["dummy"].data.nbytes == size(name)
        return carried

    def serve(self, *names: str) -> list[bool]:
        """Render and send a request."""
        return self.send(self.render(*names))


def test_an_item_of_a_refused_request_is_sent_with_the_next(side: str) -> None:
    caches = Caches(side)
    caches.render("a4")
    later = caches.render("a4")
    assert later.processed == []
    if side == "ours":
        assert caches.send(later) == [True]
        assert caches.serve("a4") == [False]
        return
    for request in (later, caches.render("a4")):
        with pytest.raises(AssertionError, match="Expected a cached item"):
            caches.send(request)
    caches.serve("b4")
    # The core's cache now spins when it needs room, or is cleared.
    with pytest.raises(Spins):
        caches.receiver.clear_cache()


def test_each_item_is_processed_and_sent_once(side: str) -> None:
    """Requests that are rendered together, as a batch that is generated offline, carry it once."""
    caches = Caches(side)
    batch = [caches.render("a4", "b4"), caches.render("b4", "a4"), caches.render("c4", "c4")]
    assert [request.processed for request in batch] == [["a4", "b4"], [], ["c4", "c4"]]
    assert [*map(caches.send, batch)] == [[True, True], [False, False], [True, False]]
    assert caches.serve("b4") == [False]


def test_the_core_has_evicted_what_was_rendered_last(side: str) -> None:
    """The front end's cache evicts in the order of rendering, the core's in that of sending."""
    caches = Caches(side)
    caches.serve("a8")
    caches.serve("b50")
    waits, overtakes = caches.render("a8"), caches.render("c7")
    caches.send(overtakes)
    if side == "ours":
        assert caches.send(waits) == [True]
        return
    for request in (waits, caches.render("a8")):
        with pytest.raises(AssertionError, match="Expected a cached item"):
            caches.send(request)


def test_items_of_one_request_do_not_fit_together(side: str) -> None:
    caches = Caches(side)
    if side == "ours":
        assert caches.serve("a40", "b40") == [True, True]
        assert caches.serve("b40") == [False]
        return
    with pytest.raises(Spins):
        caches.render("a40", "b40")


def test_items_of_refused_requests_take_no_more_memory_than_the_cache() -> None:
    caches = Caches("ours")
    for number in range(20):
        caches.render(f"{chr(ord('a') + number)}8")
    kept = caches.sender.readiness.unsent
    assert sum(map(size, kept)) == CAPACITY


def test_another_item_of_a_uuid_replaces_the_one_that_the_core_may_have() -> None:
    """The prompt has the new item's placeholders."""
    caches = Caches("ours")
    caches.serve("a4")
    caches.serve("b54")  # the core has both, and the record has no room for the first
    request = caches.render("a4")
    assert request.processed == ["a4"]
    (caches.items["a4"],) = request.data
    assert caches.send(request) == [True]
    (feature,) = caches.receiver.get_and_update_features(
        [MultiModalFeatureSpec(None, "image", "a4", PlaceholderRange(0, 1), mm_hash="a4")]
    )
    assert feature.data is caches.items["a4"]


def test_clearing_forgets_what_was_sent_and_rendered(side: str) -> None:
    caches = Caches(side)
    caches.serve("a4")
    caches.render("b4")
    caches.sender.clear_cache()
    caches.receiver.clear_cache()
    if side == "ours":
        assert not caches.sender.readiness.unsent
    assert caches.serve("a4", "b4") == [True, True]


def test_an_item_is_sent_again_if_its_request_cannot_be_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine core is not sent a request that it could not read."""
    caches = Caches("ours")
    features = [MultiModalFeatureSpec(None, "image", "a4", PlaceholderRange(0, 1), mm_hash="a4")]
    (features[0].data,) = caches.render("a4").data
    assert mm_caches.send(caches.processor, features) is features
    caches.processor.vllm_config = VllmConfig()
    monkeypatch.setattr(request_types, "is_in_process", lambda _: False)
    request: Any = SimpleNamespace(pooling_params=None, prompt_token_ids=["no token"])
    monkeypatch.setattr(request_types, "convert", lambda _: None)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        bad_requests.check_message(caches.processor, request)
    assert caches.serve("a4") == [True]


NAMES = st.sampled_from(["a1", "b2", "c3", "d8", "e16", "f24", "g40"])
REQUESTS = st.lists(NAMES, min_size=1, max_size=3).filter(
    lambda names: sum(map(size, {*names})) <= CAPACITY - MARGIN
)


@given(data=st.data())
@draws(300)
def test_the_core_has_each_item_whatever_is_refused_and_in_any_order(data: st.DataObject) -> None:
    """A request may fail only if more than the margin was sent while it was rendered."""
    caches = Caches("ours")
    waiting: list[tuple[Rendered, int]] = []
    sent = 0
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["render", "send", "refuse", "serve"]))
        if action == "render":
            waiting.append((caches.render(*data.draw(REQUESTS)), sent))
            continue
        if action == "serve":
            request, before = caches.render(*data.draw(REQUESTS)), sent
        elif not waiting:
            continue
        else:
            request, before = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        if action == "refuse":
            continue
        try:
            carried = caches.send(request)
        except AssertionError:
            assert sent - before > MARGIN
            carried = caches.serve(*request.names)
        pairs = zip(request.names, carried, strict=True)
        sent += sum(size(name) for name, has_data in pairs if has_data)
