"""A KV connector whose loads fail as drawn, over KV that requests have shelved in its process.

A request's name says what the connector does for it:

- ``shelve``: its prompt's blocks are kept;
- ``now``: all full blocks of its tokens are loaded before its step, each of which may fail;
- ``lost``: the same, and the first of them fails;
- ``later``: the same as ``now``, loaded asynchronously;
- any other: nothing.

A block that fails has garbage in it, as one does that was half written.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

#: What was shelved: each layer's part of a block, by all tokens up to its end.
SHELF: dict[tuple[int, ...], list[torch.Tensor]] = {}
#: In the scheduler's process: blocks that were asked for and that failed, and steps with such.
COUNTS: Counter[str] = Counter()
#: How many of a hundred loads of a block fail.
FAILING = 30


class Transfer(NamedTuple):
    """Blocks of a request, each with all tokens up to its end."""

    name: str
    blocks: list[tuple[int, tuple[int, ...]]]


class Transfers(KVConnectorMetadata):  # type: ignore[misc]
    """A step's loads, and what it computes that is shelved."""

    def __init__(self, loads: list[Transfer], saves: list[Transfer]) -> None:
        self.loads = loads
        self.saves = saves


class Shelf(KVConnectorBase_V1):  # type: ignore[misc]
    """Both sides of the connector."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.size = self._vllm_config.cache_config.block_size
        self.loads: list[Transfer] = []
        self.shelved: dict[str, tuple[list[int], list[int]]] = {}
        self.layers: list[torch.Tensor] = []
        self.invalid: set[int] = set()
        self.received: set[str] = set()
        self.chance = random.Random(0)

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Say how many tokens can be loaded."""
        kind = request.request_id.partition("-")[0]
        if kind not in ("now", "lost", "later"):
            return 0, False
        new = (request.num_tokens - 1) // self.size * self.size - computed
        return (new, kind == "later") if new > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, count: int) -> None:
        """Note where the tokens go."""
        if not count:
            return
        tokens, (ids,) = list(request.all_token_ids), blocks.get_block_ids()
        end = (len(tokens) - 1) // self.size
        places = range(end - count // self.size, end)
        self.loads.append(Transfer(request.request_id, self._blocks(tokens, ids, places)))

    def build_connector_meta(self, step: Any) -> Transfers:
        """Describe a step's transfers."""
        computed = {}
        for new in step.scheduled_new_reqs:
            if new.req_id.startswith("shelve"):
                self.shelved[new.req_id] = new.prompt_token_ids, list(new.block_ids[0])
                computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            if name in self.shelved:
                self.shelved[name][1].extend(*(cached.new_block_ids[at] or ([],)))
                computed[name] = cached.num_computed_tokens[at]
        saves = []
        for name, start in computed.items():
            tokens, ids = self.shelved[name]
            end = min(start + step.num_scheduled_tokens[name], len(tokens))
            places = range(start // self.size, end // self.size)
            saves.append(Transfer(name, self._blocks(tokens, ids, places)))
        loads, self.loads = self.loads, []
        COUNTS["asked"] += sum(len(load.blocks) for load in loads)
        return Transfers(loads, saves)

    def update_connector_output(self, connector_output: Any) -> None:
        """Count the blocks that failed."""
        failed = len(connector_output.invalid_block_ids)
        COUNTS.update(failed=failed, steps=failed > 0)

    def _blocks(
        self, tokens: list[int], ids: list[int], places: range
    ) -> list[tuple[int, tuple[int, ...]]]:
        return [(ids[place], tuple(tokens[: self.size * (place + 1)])) for place in places]

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note each layer's cache, as [blocks, ...]."""
        count = self._kv_cache_config.num_blocks
        self.layers = [
            layer if layer.shape[0] == count else layer.transpose(0, 1)
            for layer in kv_caches.values()
        ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the step asks for."""
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        for name, blocks in transfers.loads:
            for place, (block, tokens) in enumerate(blocks):
                always = name.startswith("lost") and not place
                kept = None if always or self.chance.randrange(100) < FAILING else SHELF.get(tokens)
                if kept is None:
                    self.invalid.add(block)
                for number, layer in enumerate(self.layers):
                    layer[block] = 7.0 if kept is None else kept[number]
            if name.startswith("later"):
                self.received.add(name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return: loads are done when the step begins."""

    def save_kv_layer(self, *arguments: Any, **named: Any) -> None:
        """Return: all layers are shelved when the step ends."""

    def wait_for_save(self) -> None:
        """Shelve what the step has computed."""
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        for _, blocks in transfers.saves:
            for block, tokens in blocks:
                SHELF[tokens] = [layer[block].clone() for layer in self.layers]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Name the requests whose asynchronous loads have ended."""
        received, self.received = self.received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name the blocks that were not loaded."""
        invalid, self.invalid = self.invalid, set()
        return invalid


def transfer_config() -> dict[str, str]:
    """Return an engine's ``kv_transfer_config``."""
    return {
        "kv_connector": Shelf.__name__,
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
