"""Lockstep of schedulers: two sides of the patched scheduler, driven by the same traffic.

One side runs upstream's code, because the features ``schedule`` and ``update-outputs`` are off.
The other side has them on. After every step, both must have made the same decisions and must be
in the same state. Steps that both sides have handed out are kept, and compared again later.
"""

import copy
import dataclasses
import io
import pickle
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from demo.model import write
from vllm.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.readiness.engine import switch
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from support import modules

VOCABULARY = 37
EOS, STOP, REFUSED = 0, 1, 2
#: Block size in tokens of most KV cache groups.
BLOCK = 4
FEATURES = "schedule", "update-outputs"
#: Attributes of a request that are no state of upstream's, or are compared elsewhere.
_OWN = {
    "readiness",
    "_block_hasher",
    "output_token_ids",
    "all_token_ids",
    "structured_output_request",
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Options of both sides' scheduler.

    Attributes:
        asynchronous: schedule ahead of the outputs.
        in_flight: maximum number of steps in flight.
        groups: name of the KV cache groups in :data:`GROUPS`.
        blocks: size of the KV cache in blocks.
        seqs: max_num_seqs.
        budget: token budget of a step.
        length: max_model_len.
        drafts: drafts per step; 0 for none.
        threshold: long_prefill_token_threshold.
        words: value of VLLM_READINESS, to which one side adds that both features are off.
    """

    asynchronous: bool = True
    in_flight: int = 2
    caching: bool = True
    policy: str = "fcfs"
    groups: str = "full"
    blocks: int = 40
    seqs: int = 6
    budget: int = 24
    length: int = 64
    drafts: int = 0
    lookahead: bool = False
    threshold: int = 0
    chunked: bool = True
    log_stats: bool = True
    clients: bool = False
    events: bool = False
    loras: bool = False
    second_runner: bool = False
    pipeline: bool = False
    words: str = ""


def _attention(kind: Any = FullAttentionSpec, size: int = BLOCK, **named: int) -> Any:
    return kind(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32, **named)


def _mamba(mode: str, size: int = BLOCK) -> Any:
    return MambaSpec(
        block_size=size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )


#: KV cache groups by name.
GROUPS: Mapping[str, Callable[[], list[Any]]] = {
    "full": lambda: [_attention()],
    "sliding": lambda: [_attention(SlidingWindowSpec, sliding_window=6)],
    "chunked": lambda: [_attention(ChunkedLocalAttentionSpec, attention_chunk_size=8)],
    "full and sliding": lambda: [_attention(), _attention(SlidingWindowSpec, sliding_window=7)],
    "large and small blocks": lambda: [
        _attention(size=8),
        _attention(SlidingWindowSpec, sliding_window=5),
    ],
    "full and chunked": lambda: [
        _attention(),
        _attention(ChunkedLocalAttentionSpec, attention_chunk_size=6),
    ],
    "hybrid": lambda: [_attention(), _mamba("none", 64)],
    "hybrid, all": lambda: [_attention(), _mamba("all")],
    "hybrid, aligned": lambda: [_attention(), _mamba("align")],
}


@cache
def classes() -> tuple[Any, Any]:
    """Load the patched Scheduler and AsyncScheduler, over the patched KV cache manager."""
    load = modules.overlaid.__wrapped__
    scheduler = load("vllm/v1/core/sched/scheduler.py")
    scheduler.KVCacheManager = load("vllm/v1/core/kv_cache_manager.py").KVCacheManager
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm.v1.core.sched.scheduler", scheduler)
        derived = load(modules.SCHEDULER)
    return scheduler.Scheduler, derived.AsyncScheduler


def reasoning_config(markers: tuple[list[int], list[int]] | None) -> Any:
    """Return a reasoning config with these start and end markers; None without markers."""
    if markers is None:
        return None
    start, end = markers
    return SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)


def speculative_config(drafts: int, trimmed: bool) -> Any:
    """Return the config of a drafter that may trim its drafts; None for no drafts."""
    if not drafts:
        return None
    method = "ngram_gpu" if trimmed else "ngram"
    return SpeculativeConfig(method=method, num_speculative_tokens=drafts, prompt_lookup_max=2)


@cache
def _model() -> ModelConfig:
    init_none_hash(sha256)
    path = write(Path(tempfile.mkdtemp(prefix="model-")), vocab_size=VOCABULARY)
    return ModelConfig(model=str(path), skip_tokenizer_init=True, seed=0)


def make(setup: Setup, kind: Any = None, speculative: Any = None) -> Any:
    """Make a scheduler.

    Args:
        setup: its options.
        kind: its class; None for the patched one.
        speculative: the config of its drafter; None for one of the setup's drafts.
    """
    cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=setup.caching)
    cache_config.num_gpu_blocks = setup.blocks
    if "aligned" in setup.groups:
        cache_config.mamba_cache_mode = "align"
    config = VllmConfig(
        model_config=copy.copy(_model()),
        cache_config=cache_config,
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.seqs,
            max_num_batched_tokens=setup.budget if setup.chunked else setup.length,
            max_model_len=setup.length,
            enable_chunked_prefill=setup.chunked,
            long_prefill_token_threshold=setup.threshold,
            policy=setup.policy,
            is_encoder_decoder=False,
        ),
        speculative_config=speculative or speculative_config(setup.drafts, setup.asynchronous),
    )
    config.cache_config.enable_prefix_caching = setup.caching
    config.model_config.max_model_len = setup.length
    config.scheduler_config.async_scheduling = setup.asynchronous
    groups = [
        KVCacheGroupSpec([f"layer {number}"], spec)
        for number, spec in enumerate(GROUPS[setup.groups]())
    ]
    sizes = {group.kv_cache_spec.block_size for group in groups}
    scheduler = (kind or classes()[setup.asynchronous])(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(setup.blocks, [], groups),
        block_size=max(sizes),
        hash_block_size=min(sizes),
        log_stats=setup.log_stats,
        include_finished_set=setup.clients,
        structured_output_manager=StructuredOutputManager(config),
    )
    if setup.lookahead:  # as with a drafter that has KV of its own
        scheduler.num_lookahead_tokens = setup.drafts
    if setup.loras:
        scheduler.lora_config = SimpleNamespace(max_loras=2)
    scheduler.use_v2_model_runner = setup.second_runner
    scheduler.use_pp = setup.pipeline
    scheduler.published = []
    scheduler.kv_event_publisher = SimpleNamespace(publish=scheduler.published.append)
    scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = setup.events
    return scheduler


def make_scheduler(
    asynchronous: bool,
    speculative: Any,
    num_blocks: int,
    max_num_seqs: int,
    max_tokens_a_step: int,
    max_model_len: int,
    kind: type[Scheduler] | None = None,
) -> Any:
    """Make a scheduler without a prefix cache; ``kind`` is its class, upstream's by default."""
    setup = Setup(
        asynchronous=asynchronous,
        caching=False,
        blocks=num_blocks,
        seqs=max_num_seqs,
        budget=max_tokens_a_step,
        length=max_model_len,
    )
    return make(setup, kind or (AsyncScheduler if asynchronous else Scheduler), speculative)


def of_side(side: str, setup: Setup) -> Any:
    """Make the scheduler of one of :data:`modules.SIDES`."""
    kinds = (Scheduler, AsyncScheduler) if side == "pinned" else classes()
    return make(setup, kinds[setup.asynchronous])


_SIMPLE = {int, float, bool, str, bytes, type(None)}


class Grammar:
    """A grammar that rejects one token."""

    def accept_tokens(self, _: str, tokens: Sequence[int]) -> bool:
        """Return whether the token ids exclude the rejected one."""
        return REFUSED not in tokens

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the rejected one."""
        return tokens[: tokens.index(REFUSED)] if REFUSED in tokens else tokens


def plain(item: Any) -> Any:
    """Reduce an object to values that compare by content and order."""
    if type(item) in _SIMPLE:
        return item
    if type(item) is list and item and type(item[0]) in _SIMPLE:
        return item.copy()
    if dataclasses.is_dataclass(item):
        fields = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        return type(item).__name__, plain(fields)
    if isinstance(item, Mapping):
        return [(key, plain(value)) for key, value in item.items()]
    if isinstance(item, (set, frozenset)):
        return sorted(item, key=str)
    if isinstance(item, tuple):
        return tuple(plain(each) for each in item)
    if isinstance(item, (list, deque)):
        return [plain(each) for each in item]
    if isinstance(item, (np.ndarray, torch.Tensor)):
        return item.tolist()
    return repr(item)


def packed(item: Any) -> bytes:
    """Pickle without a memo: items that differ only in what they share have equal bytes."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.fast = True
    pickler.dump(item)
    return stream.getvalue()


def alike(theirs: Any, ours: Any) -> bool:
    """Return whether two items have the same content in the same order; equal bytes prove it."""
    return packed(theirs) == packed(ours) or plain(theirs) == plain(ours)


def state(scheduler: Any) -> dict[str, Any]:
    """The state of a scheduler, of its requests and of its KV cache."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    return {
        "requests": {name: _request(request) for name, request in scheduler.requests.items()},
        "running": [request.request_id for request in scheduler.running],
        "waiting": [request.request_id for request in scheduler.waiting],
        "skipped": [request.request_id for request in scheduler.skipped_waiting],
        "before": scheduler.prev_step_scheduled_req_ids,
        "finished": scheduler.finished_req_ids,
        "clients": plain(scheduler.finished_req_ids_dict),
        "streaming": scheduler.num_waiting_for_streaming_input,
        "stats": plain(manager.prefix_cache_stats),
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "blocks": [*map(attrgetter("ref_cnt", "_block_hash"), pool.blocks)],
        "cached": {
            key: list(value) if isinstance(value, dict) else value.block_id
            for key, value in pool.cached_block_hash_to_block._cache.items()
        },
        "published": scheduler.published,
        "groups": [_group(each) for each in manager.coordinator.single_type_managers],
    }


def _request(request: Any) -> dict[str, Any]:
    fields = vars(request).copy()
    for name in _OWN:
        fields.pop(name, None)
    return {**fields, "types": [*map(type, fields.values())]}


def _group(group: Any) -> dict[str, Any]:
    return {
        "blocks": {
            name: [block.block_id for block in blocks]
            for name, blocks in group.req_to_blocks.items()
        },
        "cached": dict(group.num_cached_block),
        "new": list(group.new_block_ids),
        "last": dict(getattr(group, "last_state_block_idx", {})),
        "allocated": getattr(group, "_allocated_block_reqs", set()),
        "this step": getattr(group, "cached_blocks_this_step", set()),
    }


class EngineDeadError(Exception):
    """Both sides have failed in the same way."""


class Lockstep:
    """Two schedulers under the same traffic.

    Args:
        setup: options of both.
        seed: of the tokens and of the order of rows in the runner.

    Attributes:
        sides: upstream's, and ours.
        steps: number of steps scheduled.
        preempted: ids of the requests that each step has preempted.
    """

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.setup = setup
        self.chance = Random(seed)
        off = ",".join(f"-{word}" for word in FEATURES)
        self._values = [",".join(filter(None, (setup.words, off))), setup.words]
        self.sides: list[Any] = [None, None]
        for side, _ in enumerate(self.each()):
            self.sides[side] = make(setup)
        self.steps = 0
        self.preempted: list[set[str]] = []
        self.queue: deque[tuple[list[Any], list[ModelRunnerOutput]]] = deque()
        self.kept: deque[list[Any]] = deque()
        self.clock = 0.0
        self.count = 0
        self._families: dict[str, int] = {}
        self._encoder = MsgpackEncoder()
        size = min(spec.block_size for spec in GROUPS[setup.groups]())
        self._hasher = get_request_block_hasher(size, sha256) if setup.caching else None

    def each(self) -> Iterator[Any]:
        """Yield each side, with the words that are on for it in the environment."""
        with pytest.MonkeyPatch.context() as patch:
            for side, value in zip(self.sides, self._values, strict=True):
                patch.setenv(switch.NAME, value)
                yield side

    @contextmanager
    def clocked(self) -> Iterator[None]:
        """Replace the clock by one that moves with the steps."""
        with (
            mock.patch("time.monotonic", lambda: self.clock),
            mock.patch("time.time", lambda: self.clock),
        ):
            yield

    def add(
        self,
        prompt: int,
        most: int,
        family: int | None = None,
        name: str | None = None,
        lora: int = 0,
        grammar: bool = False,
        priority: int = 0,
        client: int = 0,
        resumable: bool = False,
        eos: bool = False,
        **params: Any,
    ) -> str:
        """Add a request of a prompt length and a most number of tokens.

        Requests of one ``family`` have the same tokens. With ``name`` it is the next turn of a
        session.
        """
        self.count += 1
        family = self.count if family is None else family
        chosen = name or f"r{self.count}"
        self._families[chosen] = family

        def act(side: Any) -> None:
            sampling = SamplingParams(max_tokens=most, ignore_eos=not eos, **copy.deepcopy(params))
            if eos:
                sampling._eos_token_id = EOS
            if grammar:
                sampling.structured_outputs = StructuredOutputsParams(regex="a")
            request = Request(
                chosen,
                [3 + (family + place) % 20 for place in range(prompt)],
                sampling,
                None,
                client_index=client,
                arrival_time=float(self.count),
                lora_request=LoRARequest(f"lora {lora}", lora, "/none") if lora else None,
                priority=priority,
                block_hasher=self._hasher,
                resumable=resumable,
                trace_headers={"a": "b"} if self.count % 5 == 0 else None,
            )
            if grammar:
                request.structured_output_request._grammar = Grammar()
            side.add_request(request)

        self.both(act)
        return chosen

    def both(self, act: Callable[..., Any], *each: Sequence[Any]) -> list[Any]:
        """Let both sides act; ``each`` holds an argument for either.

        Raises:
            EngineDeadError: both failed.
            AssertionError: one failed, or they failed in different ways.
        """
        results: list[Any] = []
        failures: list[Any] = []
        for side, *arguments in zip(self.each(), *each, strict=True):
            try:
                results.append(act(side, *arguments))
                failures.append(None)
            except (AssertionError, KeyError, IndexError, RuntimeError, ValueError) as failure:
                failures.append(type(failure))
        assert failures[0] == failures[1]
        if failures[0] is not None:
            raise EngineDeadError
        return results

    def abort(self, name: str) -> None:
        """Abort a request if it has not ended."""
        status = RequestStatus.FINISHED_ABORTED
        self._same(self.both(lambda side: side.finish_requests(name, status)))

    def reset(self, running: bool) -> None:
        """Reset the prefix cache."""
        self._same(self.both(lambda side: side.reset_prefix_cache(running)))

    def pause(self, pause: PauseState) -> None:
        """Set the pause state."""
        for side in self.each():
            side.set_pause_state(pause)

    def step(self) -> None:
        """Schedule a step, and process the output that is due.

        Raises:
            AssertionError: the sides differ, or an object that was handed out has changed.
        """
        self.clock += 1
        self.steps += 1
        if self.sides[0].has_requests():
            scheduled = self.both(lambda side: side.schedule())
            self._same(scheduled)
            self.preempted.append(scheduled[0].preempted_req_ids)
            output = self._run(scheduled[0])
            self.queue.append((scheduled, [output, copy.deepcopy(output)]))
            if (
                scheduled[0].total_num_scheduled_tokens
                and len(self.queue) < self.setup.in_flight
                and self.chance.random() < 0.9
            ):
                return
        self.process()

    def process(self) -> None:
        """Process the output of the oldest step in flight."""
        if not self.queue:
            return
        self.clock += 0.5
        scheduled, outputs = self.queue.popleft()
        made = self.both(
            lambda side, *arguments: side.update_from_output(*arguments), scheduled, outputs
        )
        self._same(made, encoded=True)
        self._same(outputs)
        if self.setup.drafts and not self.setup.asynchronous:
            self._draft()

    def finish(self, most: int = 400) -> None:
        """Run until no request is left."""
        for _ in range(most):
            if not (self.queue or self.sides[0].requests):
                break
            self.step()
        for both in self.kept:
            assert alike(*both)

    def _draft(self) -> None:
        names = [request.request_id for request in self.sides[0].running]
        drafts = [
            self.chance.choices(range(3, VOCABULARY), k=self.chance.randint(0, self.setup.drafts))
            for _ in names
        ]
        self.both(
            lambda side: side.update_draft_token_ids(
                DraftTokenIds(list(names), copy.deepcopy(drafts))
            )
        )

    def _same(self, both: list[Any], encoded: bool = False) -> None:
        assert alike(*both)
        if encoded:
            theirs, ours = (
                {client: [*map(bytes, self._encoder.encode(item))] for client, item in each.items()}
                for each in both
            )
            assert theirs == ours
        else:
            self.kept.append(both)
            if len(self.kept) > 8:
                assert alike(*self.kept.popleft())
        theirs, ours = map(state, self.sides)
        # Objects that compare by identity differ here, and only their plain values tell.
        assert theirs == ours or plain(theirs) == plain(ours)

    def _run(self, step: Any) -> ModelRunnerOutput:
        names = [*step.num_scheduled_tokens]
        self.chance.shuffle(names)
        requests = [self.sides[0].requests[name] for name in names]
        sampled = [self._sample(request, step) for request in requests]
        asks = [request.sampling_params for request in requests]
        prompts = {
            name: self._prompt_logprobs(request)
            for name, request, tokens in zip(names, requests, sampled, strict=True)
            if tokens
            and request.sampling_params.prompt_logprobs is not None
            and request.num_output_tokens + request.num_output_placeholders <= 1
        }
        logprobs = None
        if any(params.logprobs is not None for params in asks):
            ends = np.cumsum([0, *map(len, sampled)])
            rows = np.arange(ends[-1])
            logprobs = LogprobsLists(
                np.stack([rows, rows + 1], 1),
                np.stack([-rows, -rows - 0.5], 1),
                rows,
                [*map(int, ends)] if self.setup.drafts or not all(sampled) else None,
            )
        nans = {name: 2 for name in names if self.chance.random() < 0.02}
        return ModelRunnerOutput(
            names,
            {name: row for row, name in enumerate(names)},
            sampled,
            logprobs=logprobs,
            prompt_logprobs_dict=prompts,
            num_nans_in_logits=nans if self.chance.random() < 0.5 else None,
        )

    def _prompt_logprobs(self, request: Any) -> Any:
        count = request.num_prompt_tokens
        return LogprobsTensors(torch.zeros(count, 1), torch.zeros(count, 1), torch.zeros(count))

    def _sample(self, request: Any, step: Any) -> list[int]:
        if request.is_prefill_chunk:
            return []
        drafts = len(step.scheduled_spec_decode_tokens.get(request.request_id, ()))
        accepted = self.chance.randint(0, drafts)
        family, place = self._families[request.request_id], request.num_computed_tokens
        return [
            Random(97 * family + place + number).randrange(VOCABULARY)
            for number in range(1 + accepted)
        ]
