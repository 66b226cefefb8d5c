"""Bounds of decoding requests: lengths below which upstream's per-token calls have no effect.

For each token of a request, the scheduler and the KV cache manager call several functions. Most
calls have no effect: each block is allocated, cached and hashed once, and a length limit is reached
once. :class:`Bounds` holds the lengths from which the calls may have an effect. The features
``schedule`` and ``update-outputs`` skip the calls below these lengths. A bound that is too low only
costs time, because upstream's code then runs. A bound is valid until the request is preempted or
stops.
"""

# mirrors: vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots
# mirrors: vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks
# mirrors: vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator
# mirrors: vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.cache_blocks
# mirrors: vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager
# mirrors: vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.get_num_skipped_tokens
# mirrors: vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager
# mirrors: vllm.v1.core.single_type_kv_cache_manager:MambaManager
# mirrors: vllm.v1.core.kv_cache_utils:get_request_block_hasher
# mirrors: vllm.v1.core.sched.utils:check_stop

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.readiness.engine import gauges, originals, subclasses, switch
from vllm.v1.request import Request, RequestStatus
from vllm.v1.utils import ConstantList

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler

_COORDINATORS = (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
_GROUPS = (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
#: Attributes of a scheduler that are true if bounds do not cover its decisions.
_OTHERS = ("connector", "ec_connector", "is_encoder_decoder", "enable_return_routed_experts")
#: Attributes of a request that each output repeats. They change only in upstream's code.
_CONSTANT = ("trace_headers", "stop_reason", "num_nans_in_logits")
#: Methods of a request that ``update-outputs`` does not call for each token.
REQUEST = (
    "append_output_token_ids",
    "is_finished",
    "take_events",
    "take_prefill_stats",
    "update_block_hashes",
)
#: A length that no request reaches.
_NONE = sys.maxsize


@dataclass(slots=True, eq=False)
class Bounds:
    """Bounds of one request."""

    #: ``num_computed_tokens`` from which scheduling one token may allocate, free or cache a block,
    #: or reach ``limit``. One token less under async scheduling, for requests without in-flight
    #: tokens.
    near: int = 0
    until: int = 0  #: Like ``near``, but not for a block that is only cached.
    limit: int = 0  #: ``num_computed_tokens`` from which a step may skip the request.
    #: ``num_computed_tokens``, without in-flight tokens, from which a block is cached.
    cached: int = _NONE
    hashed: int = 0  #: ``num_tokens`` from which a block is hashed.
    room: int = 0  #: ``num_tokens`` at which the request stops.
    size: int = 0  #: Number of the request's attributes, the record included.
    stops: frozenset[int | None] = frozenset()  #: Token ids that stop the request.
    most: int = 0  #: ``max_tokens`` of the request.
    logprobs: bool = False  #: Whether the request returns logprobs.
    #: Further fields of each output; empty for most requests.
    constant: dict[str, Any] = field(default_factory=dict)
    plain: bool = False  #: Whether an output has neither.
    #: ``num_preemptions`` while the bounds are valid; -1 if upstream makes the next output.
    preemptions: int = -1


#: Bounds of a request that is left to upstream.
NEVER = Bounds()


class Skipped(NamedTuple):
    """Functions of vLLM that a feature does not call for each request, by their owner.

    The first field names functions in the namespace of the scheduler's module, the last ones
    those in the namespaces of the KV cache's modules. All others are methods and properties.
    """

    functions: tuple[str, ...] = ()
    scheduler: tuple[str, ...] = ()
    manager: tuple[str, ...] = ()
    coordinator: tuple[str, ...] = ()
    group: tuple[str, ...] = ()
    pool: tuple[str, ...] = ()
    grammars: tuple[str, ...] = ()
    request: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    manager_functions: tuple[str, ...] = ()
    group_functions: tuple[str, ...] = ()


class Service:
    """Decides in each step whether one feature serves a scheduler.

    A third-party program may replace a function at any time, and may restore it. Each step compares
    the functions that the feature does not call by identity. If one is replaced, upstream serves.

    Args:
        scheduler: may lack attributes.
        word: the feature.
        skipped: the functions that it does not call.
        serves: whether the feature serves a scheduler whose KV cache the bounds cover.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        word: str,
        skipped: Skipped,
        serves: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._scheduler, self._word, self._skipped = scheduler, word, skipped
        self._serves = serves
        self._on = word in switch.enabled()
        if self._on and not subclasses.has_door(sys.modules.get(type(scheduler).__module__)):
            subclasses.leave_scheduler(type(scheduler), word, "its steps")
            self._on = False
        #: None before the first step, and while the scheduler is not known.
        self._watch: originals.Watch | None = None
        #: Whether the scheduler is known; None before the first step.
        self._known: bool | None = None
        self._replaced: list[str] = []
        self._cache: Cache | None = None

    def cache(self) -> "Cache | None":
        """Return the scheduler's KV cache; None if upstream serves this step.

        Another object than before means that all bounds are computed again.
        """
        if self._on and self._changed():
            self._reconsider()
        return self._cache

    def _changed(self) -> bool:
        if self._watch is not None:
            return self._watch.changed()
        return self._knows() is not self._known

    def _knows(self) -> bool:
        return _is_known(self._scheduler) and self._serves(self._scheduler)

    def _reconsider(self) -> None:
        """Decide again, since something has changed; count and log a fallback."""
        self._cache = self._watch = None
        self._known = self._knows()
        if not self._known:
            gauges.fall_back(self._word, gauges.OTHER_INPUT)
        else:
            functions = [*self._functions()]
            self._watch = originals.Watch([*self._objects(), *functions])
            replaced = originals.replacements(functions)
            if replaced and replaced != self._replaced:
                subclasses.leave_replaced(self._word, replaced, "request", "handles all requests")
            elif not replaced:
                self._cache = Cache(self._scheduler)
                for request in self._scheduler.requests.values():
                    if (record := vars(request).get(subclasses.ATTRIBUTE)) is not None:
                        record.bounds = NEVER
            self._replaced = replaced

    def _objects(self) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
        """Yield the namespaces of the instances that lead to the skipped functions, with names."""
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        names = ("connector", "kv_cache_manager", "max_model_len", "structured_output_manager")
        yield vars(scheduler), names
        yield vars(manager), ("block_pool", "coordinator")
        yield vars(manager.coordinator), ("block_pool", "single_type_managers")

    def _functions(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Yield the owners of the skipped functions, with their names."""
        scheduler, skipped = self._scheduler, self._skipped
        manager = scheduler.kv_cache_manager
        coordinator = manager.coordinator
        kinds = (base for base in type(scheduler).__mro__ if base.__name__ == "Scheduler")
        yield originals.namespace(next(kinds, object)), skipped.functions
        yield scheduler, skipped.scheduler
        yield manager, skipped.manager
        yield coordinator, skipped.coordinator
        for group in coordinator.single_type_managers:
            yield group, skipped.group
        yield manager.block_pool, skipped.pool
        yield scheduler.structured_output_manager, skipped.grammars
        yield Request, skipped.request
        yield RequestStatus, skipped.status
        yield ConstantList, skipped.tokens
        yield type(manager.empty_kv_cache_blocks), skipped.blocks
        yield originals.namespace(type(manager)), skipped.manager_functions
        yield originals.namespace(SingleTypeKVCacheManager), skipped.group_functions


class Cache:
    """KV cache of a scheduler, and the length limits of requests."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.manager = manager = scheduler.kv_cache_manager
        coordinator = manager.coordinator
        self.asynchronous = hasattr(scheduler, "_spec_token_placeholders")
        self.groups: tuple[SingleTypeKVCacheManager, ...] = coordinator.single_type_managers
        #: The only KV cache group, if it has full attention; else None.
        self._only = self.groups[0] if is_full_attention(scheduler) else None
        self.caching: bool = manager.enable_caching
        self._free = coordinator.block_pool.free_block_queue
        self._null = coordinator.block_pool.null_block
        self.hash_size: int = coordinator.block_pool.hash_block_size
        #: Hybrid models cache only multiples of this number of tokens.
        self._aligned: int = getattr(coordinator, "lcm_block_size", 1)
        self.lookahead: int = scheduler.num_lookahead_tokens
        self.max_model_len: int = scheduler.max_model_len

    def bounds(self, request: "Request") -> Bounds:
        """Compute the bounds of a request. Called after a step with the request is scheduled."""
        params = request.sampling_params
        if (
            params is None
            or is_unusual(request)
            or request.is_prefill_chunk
            or request.num_computed_tokens < request.num_prompt_tokens
        ):
            return NEVER
        bounds = Bounds()
        length = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        bounds.limit = length - 1
        self.update(request, bounds)
        if request.async_tokens_to_discard or params.repetition_detection is not None:
            return bounds
        if not vars(request).keys().isdisjoint(REQUEST):
            return bounds
        if request._block_hasher is None:
            bounds.hashed = _NONE
        elif not originals.is_made_by(request._block_hasher, get_request_block_hasher):
            return bounds
        elif len(request.block_hashes) == request.num_tokens // self.hash_size:
            bounds.hashed = (len(request.block_hashes) + 1) * self.hash_size
        else:  # the hasher uses another block size
            return bounds
        bounds.room, bounds.most = length, request.max_tokens
        bounds.size = len(vars(request) | {subclasses.ATTRIBUTE: None})
        bounds.stops = frozenset((params.eos_token_id, *(params.stop_token_ids or ())))
        bounds.logprobs = params.num_logprobs is not None
        constant = {name: getattr(request, name) for name in _CONSTANT}
        bounds.constant = {name: value for name, value in constant.items() if value}
        bounds.plain = not (bounds.logprobs or bounds.constant)
        if request.prefill_stats is None and not request.events:
            bounds.preemptions = request.num_preemptions
        return bounds

    def allocate(self, request: "Request", bounds: Bounds, tokens: int) -> "KVCacheBlocks | None":
        """Allocate slots for ``tokens`` more tokens of a request, and update its bounds.

        Returns the new blocks; None if too few are free. If the only KV cache group has full
        attention and enough blocks are free, nothing else in upstream's ``allocate_slots`` has an
        effect.
        """
        manager, group = self.manager, self._only
        if group is None or self._free.num_free_blocks * group.block_size < tokens + self.lookahead:
            blocks = manager.allocate_slots(request, tokens, num_lookahead_tokens=self.lookahead)
            if blocks is not None:
                self.update(request, bounds)
            return blocks
        name, size = request.request_id, group.block_size
        count = request.num_computed_tokens + tokens
        new = group.allocate_new_blocks(
            name, min(count + self.lookahead, self.max_model_len), count
        )
        until = min(bounds.limit, len(group.req_to_blocks[name]) * size - self.lookahead)
        if len(request.__dict__) != bounds.size:  # the request may have a method of its own
            bounds.preemptions = -1
        if self.caching:
            group.cache_blocks(request, min(count, len(request._all_token_ids)))
            bounds.cached = (group.num_cached_block.get(name, 0) + 1) * size
        self._approach(bounds, until)
        return KVCacheBlocks((new,)) if new else manager.empty_kv_cache_blocks

    def update(self, request: "Request", bounds: Bounds) -> None:
        """Update ``cached`` and ``near`` after blocks were allocated or cached."""
        cached, until = _NONE, bounds.limit
        name = request.request_id
        for group in self.groups:
            if self.caching:
                following = (group.num_cached_block.get(name, 0) + 1) * group.block_size
                cached = min(cached, -(-following // self._aligned) * self._aligned)
            until = min(until, self._allocates(group, request))
        bounds.cached = cached
        self._approach(bounds, until)

    def _approach(self, bounds: Bounds, until: int) -> None:
        """Set ``until``, and ``near`` to the nearer of it and ``cached``."""
        bounds.until = until
        if self.asynchronous:
            bounds.near = min(until, bounds.cached) - 1
        else:
            bounds.near = min(until, bounds.cached - 1)

    def _allocates(self, group: SingleTypeKVCacheManager, request: "Request") -> int:
        """Return ``num_computed_tokens`` from which a group allocates or frees a block."""
        blocks = group.req_to_blocks.get(request.request_id)
        if not blocks:
            return 0
        slots: int = len(blocks) * group.block_size - self.lookahead
        if type(group) is FullAttentionManager:
            return slots
        if isinstance(group, MambaManager):
            slots = self._recurrent(group, blocks, request)
        return min(slots, self._frees(group, blocks, request.num_computed_tokens))

    def _recurrent(
        self, group: MambaManager, blocks: "list[KVCacheBlock]", request: "Request"
    ) -> int:
        """Return ``num_computed_tokens`` from which a Mamba group allocates a block.

        In mode "align", the group may also free the block of the previous state.
        """
        size, drafts = group.block_size, group.num_speculative_blocks
        slots: int = (len(blocks) - drafts) * size
        if group.mamba_cache_mode != "align":
            return slots - self.lookahead
        if request.num_computed_tokens < slots - size:
            return 0  # upstream fails
        last = group.last_state_block_idx.get(request.request_id)
        if last is not None and blocks[last] is not self._null:
            slots = min(slots, (last + 1) * size + drafts + 1)
        return slots

    def _frees(
        self,
        group: SingleTypeKVCacheManager,
        blocks: "list[KVCacheBlock]",
        computed: int,
    ) -> int:
        """Return ``num_computed_tokens`` from which a group frees a block that it has passed."""
        size: int = group.block_size
        drafts: int = group.num_speculative_blocks if isinstance(group, MambaManager) else 0
        skipped = group.get_num_skipped_tokens(computed - drafts)
        number: int = min(max(0, skipped) // size, len(blocks))
        if number and blocks[number - 1] is not self._null:
            return 0
        following: int = (number + 1) * size
        if isinstance(group, MambaManager):
            return following + drafts + 1
        if isinstance(group, SlidingWindowManager):
            return following + int(group.sliding_window) - 1
        chunk: int = group.attention_chunk_size
        return -(-following // chunk) * chunk


def is_full_attention(scheduler: "Scheduler") -> bool:
    """Return whether the only KV cache group of a scheduler has full attention."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [*map(type, groups)] == [FullAttentionManager]


def is_unusual(request: "Request") -> bool:
    """Return whether a request is left to upstream in each step."""
    return bool(
        type(request) is not Request
        or request.mm_features
        or request.pooling_params is not None
        or request.structured_output_request is not None
    )


def _is_known(scheduler: "Scheduler") -> bool:
    """Return whether the bounds cover a scheduler: vLLM's own classes, and no connector.

    A third-party scheduler may lack attributes.
    """
    manager: Any = getattr(scheduler, "kv_cache_manager", None)
    return (
        not any(getattr(scheduler, name, True) for name in _OTHERS)
        and hasattr(scheduler, "structured_output_manager")
        and type(getattr(manager, "coordinator", None)) in _COORDINATORS
        and all(type(group) in _GROUPS for group in manager.coordinator.single_type_managers)
    )
