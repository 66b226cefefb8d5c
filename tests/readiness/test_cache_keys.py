"""The fix cache-keys: blocks have one hash only if their KV is computed from equal inputs.

Each case asserts upstream's fault, too; with the fix off ours has it.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import modules
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.readiness.core import cache_keys
from vllm.v1.request import Request

FIX = "cache-keys"
UTILS = "vllm/v1/core/kv_cache_utils.py"
HASHER = "vllm/multimodal/hasher.py"
BLOCK = 4
PROMPT = [5] * 14


@pytest.fixture(autouse=True)
def one_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chains of hashes begin alike in both modules, and no adapter be loaded yet."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(cache_keys, "_loads", type(cache_keys._loads)())


def request(side: str, hashing: Any = sha256, **fields: Any) -> Request:
    """Make a request whose blocks a side hashes."""
    load = modules.of_side(side)
    utils = load(UTILS)
    for each in (utils, modules.pristine(UTILS)):
        each.init_none_hash(hashing)
    hasher = utils.get_request_block_hasher(BLOCK, hashing)
    prompt = fields.pop("prompt", PROMPT)
    return Request("r", prompt, SamplingParams(max_tokens=8), None, block_hasher=hasher, **fields)


def hashes(side: str, hashing: Any = sha256, **fields: Any) -> list[bytes]:
    """Return the hashes of a prompt's blocks."""
    return [*request(side, hashing, **fields).block_hashes]


def adapter(name: str = "a", number: int = 1, path: str = "p", **fields: Any) -> LoRARequest:
    """Name an adapter."""
    return LoRARequest(name, number, path, **fields)


def item(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """Place a multimodal item."""
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=name, mm_position=place, mm_hash=name
    )


def mixed(mask: list[bool]) -> dict[str, Any]:
    """Return the fields of a prompt whose masked positions are tokens; embeddings are zeros."""
    return {"prompt_embeds": torch.zeros(len(PROMPT), 3), "prompt_is_token_ids": mask}


#: Two requests whose first blocks have one hash on stock, by name.
SHARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a name with another id": ({"lora_request": adapter()}, {"lora_request": adapter(number=2)}),
    "a name with another path": ({"lora_request": adapter()}, {"lora_request": adapter(path="q")}),
    "a salt": ({"lora_request": adapter()}, {"cache_salt": "a"}),
    "a salt and an adapter": (
        {"lora_request": adapter(), "cache_salt": "b"},
        {"lora_request": adapter("b", 2), "cache_salt": "a"},
    ),
    "items that overlap": (
        {"mm_features": [item("video", 0, 12), item("audio", 0, 12)]},
        {"mm_features": [item("video", 0, 12), item("other", 0, 12)]},
    ),
    "a mask": (mixed([True] * 14), mixed([True, False] * 7)),
}


@pytest.mark.parametrize("hashing", [sha256, sha256_cbor])
@pytest.mark.parametrize("name", SHARED)
def test_different_requests_share_no_block(name: str, hashing: Any, side: str) -> None:
    one, other = SHARED[name]
    first, second = hashes(side, hashing, **one), hashes(side, hashing, **other)
    assert len(first) == len(second) == 3
    if side == "ours" or name == "a salt and an adapter":
        assert set(first).isdisjoint(second)
    else:
        assert first[0] == second[0]


KEPT: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt": {"cache_salt": "a"},
    "items": {"mm_features": [item("one", 1, 2), item("two", 3, 6), item("three", 10, 2)]},
    "items and salt": {"mm_features": [item("one", 2, 9)], "cache_salt": "a"},
    "embeddings": {"prompt_embeds": torch.ones(len(PROMPT), 3)},
}


@pytest.mark.parametrize("name", KEPT)
def test_other_requests_have_upstreams_hashes(name: str, side: str) -> None:
    """Also as their outputs fill blocks."""
    ours, upstreams = (request(whose, **KEPT[name]) for whose in (side, "pinned"))
    for token in range(8):
        for one in (ours, upstreams):
            one.append_output_token_ids(token)
    assert len(ours.block_hashes) == 5
    assert ours.block_hashes == upstreams.block_hashes


def test_requests_of_one_adapter_share_blocks(side: str) -> None:
    for fields in ({}, {"cache_salt": "b"}, {"mm_features": [item("one", 1, 2)]}):
        assert hashes(side, lora_request=adapter(), **fields) == hashes(
            side, lora_request=adapter(), **fields
        )


@pytest.mark.parametrize("names", [*itertools.permutations("xyz", 2)])
def test_a_turn_that_adds_items_to_a_session_is_keyed_by_all(
    side: str, names: tuple[str, str]
) -> None:
    """The first block of the turn has the first of two items, which differs."""
    found = []
    for name in names:
        session = request(side, prompt=[5] * BLOCK)
        session.mm_features.extend([item(name, BLOCK, 4), item("last", 2 * BLOCK, 4)])
        session._all_token_ids.extend([7] * 8)
        session.update_block_hashes()
        found.append(session.block_hashes)
    assert len(found[0]) == 3
    assert found[0][0] == found[1][0]
    assert (found[0][1] == found[1][1]) == (side != "ours")


IN_PLACE = adapter(load_inplace=True)


@pytest.mark.parametrize(
    ("load", "changes"),
    [
        *((IN_PLACE, True), (IN_PLACE.lora_int_id, True)),
        *((adapter(), False), (adapter(number=2, load_inplace=True), False)),
    ],
)
def test_an_adapter_that_was_replaced_shares_no_block(side: str, load: Any, changes: bool) -> None:
    old = hashes(side, lora_request=adapter())
    cache_keys.replaced(load)
    new = hashes(side, lora_request=adapter())
    assert (old[0] != new[0]) == (changes and side == "ours")


def test_a_waiting_request_is_hashed_again(side: str) -> None:
    waiting = request(side, lora_request=adapter())
    old = [*waiting.block_hashes]
    cache_keys.renew(waiting)
    assert waiting.block_hashes == old
    cache_keys.replaced(adapter(load_inplace=True))
    cache_keys.renew(waiting)
    assert waiting.block_hashes == hashes(side, lora_request=adapter())
    assert (waiting.block_hashes == old) == (side != "ours")


def test_a_request_keeps_the_load_that_it_began_with(side: str) -> None:
    """It fills its first block after its adapter was reloaded in place."""
    running = request(side, lora_request=adapter(), prompt=[5] * (BLOCK - 1))
    cache_keys.renew(running)
    cache_keys.replaced(adapter(load_inplace=True))
    running.append_output_token_ids(5)
    new = hashes(side, lora_request=adapter())
    assert (running.block_hashes[0] == new[0]) == (side != "ours")


def test_a_request_that_loads_is_counted_once(side: str) -> None:
    first, second = (request(side, lora_request=adapter(load_inplace=True)) for _ in range(2))
    assert (first.block_hashes == second.block_hashes) == (side != "ours")
    for _ in range(2):
        for each in (first, second):
            cache_keys.renew(each)
    assert first.block_hashes == second.block_hashes
    assert first.block_hashes == hashes(side, lora_request=adapter())


#: Values of a request's mm_processor_kwargs that have one hash on stock.
ALIKE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"a": "b"}, {"a": None, "b": None}),
    ({"a": "b", "c": "d"}, {"a": "bcd"}),
    ({"a": ["x"]}, {"a": {"0": "x"}}),
    ({"a": 1.0}, {"a": 0x3FF0000000000000}),
    ({"a": {"b": 1}}, {"a.b": 1}),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_different_values_have_different_hashes(
    side: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    load = modules.of_side(side)
    hasher = load(HASHER).MultiModalHasher
    image = torch.arange(12).reshape(3, 4)
    first = hasher.hash_kwargs(model_id="m", image=image, **one)
    assert first == hasher.hash_kwargs(model_id="m", image=image.clone(), **one)
    assert (first == hasher.hash_kwargs(model_id="m", image=image, **other)) == (side != "ours")
    assert first != hasher.hash_kwargs(model_id="m", image=image.T, **one)


@pytest.mark.parametrize("tower", [True, False])
def test_items_are_identified_by_the_adapter_of_the_encoder(side: str, tower: bool) -> None:
    load = modules.of_side(side)
    kind = load("vllm/v1/engine/input_processor.py").InputProcessor
    processor = object.__new__(kind)
    processor.lora_config = SimpleNamespace(enable_tower_connector_lora=tower)

    def named(mm_hash: str, lora: LoRARequest | None) -> str:
        if side == "pinned":
            return str(processor._get_mm_identifier(mm_hash, lora))
        from vllm.v1.readiness.frontend import mm_hashes

        return mm_hashes.identifier(processor, mm_hash, lora)

    pairs = [
        (named("h", adapter()), named("h", adapter(number=2))),
        (named("h", adapter()), named("h", adapter(path="q"))),
        (named("h", adapter()), named("a:h", None)),
        (named("b:h", adapter()), named("h", adapter("a:b"))),
    ]
    if not tower:
        assert [one == other for one, other in pairs] == [True, True, False, False]
        assert named("h", adapter()) == named("h", None) == "h"
    elif side == "ours":
        assert not any(one == other for one, other in pairs)
    else:
        assert all(one == other for one, other in pairs)
