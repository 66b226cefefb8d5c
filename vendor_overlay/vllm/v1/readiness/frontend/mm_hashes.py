"""Fix ``cache-keys``, multimodal items: different items have different hashes and identifiers.

A hash finds the processed item in the front end's cache, and an identifier its encoder outputs and
its KV. In 0.22.0

- the bytes of names and values are hashed without their lengths and types, so that
  ``{"a": "b"}`` and ``{"a": None, "b": None}`` as ``mm_processor_kwargs`` have one hash;
- with ``enable_tower_connector_lora``, an identifier is the adapter's name, a colon and the hash. A
  reloaded name finds the encoder outputs of the old adapter, and a client's ``uuid`` with a colon
  can name the item of an adapter.

Here lengths and types are hashed, and identifiers have the id and path of the adapter.

Not covered: a ``uuid`` names an item by definition; clients that choose the same one share the
item. Encoder outputs of an adapter that is reloaded in place. An image that was read from a URL or
base64 is hashed by its file: with two backgrounds (``rgba_background_color`` of a request's
``media_io_kwargs``), it has one hash.
"""

# mirrors: vllm.multimodal.hasher:MultiModalHasher.hash_kwargs
# mirrors: vllm.multimodal.hasher:MultiModalHasher.iter_item_to_bytes
# mirrors: vllm.v1.engine.input_processor:InputProcessor._get_mm_identifier

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.v1.engine.input_processor import InputProcessor


def chunks(
    hasher: "type[MultiModalHasher]", key: str, value: object
) -> Iterable[bytes | memoryview]:
    """Return the bytes to hash for a named value; upstream's with the fix off."""
    if registry.CACHE_KEYS not in switch.enabled():
        upstream: Iterable[bytes | memoryview] = hasher.iter_item_to_bytes(key, value)
        return upstream
    return _named(hasher, key, value)


def _named(
    hasher: "type[MultiModalHasher]", key: object, value: object
) -> Iterator[bytes | memoryview]:
    """Yield bytes from which name and value can be told: types and lengths precede contents."""
    yield from _sized(str(key).encode())
    yield from _sized(type(value).__name__.encode())
    if isinstance(value, dict):
        yield from _length(len(value))
        for name, inner in value.items():
            yield from _named(hasher, name, inner)
    elif isinstance(value, (list, tuple)):
        yield from _length(len(value))
        for inner in value:
            yield from _named(hasher, "", inner)
    elif value is not None:
        parts = [*hasher.serialize_item(value)]
        yield from _length(len(parts))
        for part in parts:
            yield from _sized(part)


def _sized(part: bytes | memoryview) -> Iterator[bytes | memoryview]:
    yield from _length(memoryview(part).nbytes)
    yield part


def _length(length: int) -> Iterator[bytes]:
    yield length.to_bytes(8, "little")


def identifier(processor: "InputProcessor", mm_hash: str, adapter: "LoRARequest | None") -> str:
    """Return the identifier of an item, by which its encoder outputs and its KV are cached.

    It is upstream's with the fix off, and if adapters do not change encoder outputs.
    """
    config = processor.lora_config
    if (
        config is None
        or not config.enable_tower_connector_lora
        or registry.CACHE_KEYS not in switch.enabled()
    ):
        upstream: str = processor._get_mm_identifier(mm_hash, adapter)
        return upstream
    if adapter is None:
        return f"base:{mm_hash}"
    name, path = adapter.lora_name, adapter.lora_path
    return f"{adapter.lora_int_id}:{len(name)}:{len(path)}:{name}:{path}:{mm_hash}"
