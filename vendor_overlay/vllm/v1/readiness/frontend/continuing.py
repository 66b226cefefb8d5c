"""Feature ``process-outputs``: process the tokens of requests that continue in one pass.

For each token, 0.22.0's front end calls some 20 functions: statistics, detokenizer, stop strings,
logprobs, and two objects for the client. Most of them only matter for a request's first or last
token. Here the tokens of a request that continues are detokenized, appended and counted by a few
operations, and its client's output is made when it is taken (:mod:`unread`). Upstream's loop
processes all other outputs, in the order of the message.

The output handler reads all messages that have arrived before it lets other tasks run. Clients of
requests that continue are woken behind all of them, so a request's first token does not wait until
the chunks of all other requests are written. Without an end of messages, other tasks run after
:data:`_MOST` outputs.
"""

# mirrors: vllm.v1.engine.output_processor:OutputProcessor.process_outputs
# mirrors: vllm.v1.engine.output_processor:OutputProcessor._update_stats_from_output
# mirrors: vllm.v1.metrics.stats:IterationStats.update_from_output
# mirrors: vllm.v1.engine.detokenizer:IncrementalDetokenizer.update
# mirrors: vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update
# mirrors: vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.decode_next
# mirrors: vllm.v1.engine.logprobs:LogprobsProcessor.update_from_output

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.detokenizer import (
    BaseIncrementalDetokenizer,
    FastIncrementalDetokenizer,
    IncrementalDetokenizer,
    SlowIncrementalDetokenizer,
)
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.metrics.stats import IterationStats, RequestStateStats
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import gauges, originals, subclasses, switch
from vllm.v1.readiness.frontend import unread
from vllm.v1.readiness.frontend.logprobs import DeferredLogprobs, is_flat
from vllm.v1.readiness.frontend.unread import Unread

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import (
        OutputProcessor,
        RequestOutputCollector,
        RequestState,
    )

_DETOKENIZERS = (
    IncrementalDetokenizer,
    FastIncrementalDetokenizer,
    SlowIncrementalDetokenizer,
)
#: Outputs processed without a pause; some milliseconds.
_MOST = 2048
#: Methods that are not called for each token, by the names of classes in the processor's module.
_PROCESSOR = ("_update_stats_from_output",)
_STATE = ("make_request_output", "_new_request_output", "_new_completion_output")
_COLLECTOR = ("put", "get", "get_nowait")
_STATS = ("update_from_output", "_time_since")
_DETOKENIZER = ("update", "output_token_ids", "num_output_tokens", "get_next_output_text")
_LOGPROBS = ("update_from_output", "pop_prompt_logprobs")
_OUTPUT = ("__init__", "add")


class Continuation:
    """A request whose further tokens this module processes: its state's attribute ``readiness``.

    Attributes:
        state: of the request.
        decode: returns a token's text; None if upstream's ``update`` detokenizes.
        detokenizer, stats, collector: of the request. ``collector`` is None if a token has no
            output.
        update_logprobs: takes an output's logprobs; None without logprobs.
        interval: tokens between two outputs.
        spaces: namespaces of the instances.
        size: number of their attributes, which an override changes.
    """

    __slots__ = (
        "collector",
        "decode",
        "detokenizer",
        "interval",
        "size",
        "spaces",
        "state",
        "stats",
        "update_logprobs",
    )

    def __init__(self, state: "RequestState") -> None:
        self.state = state
        self.detokenizer = detokenizer = state.detokenizer
        self.stats: RequestStateStats | None = state.stats
        kind = type(detokenizer)
        self.decode: Callable[[int], str | None] | None = None
        if kind is FastIncrementalDetokenizer:
            plain = detokenizer.spaces_between_special_tokens
            self.decode = detokenizer._protected_step if plain else detokenizer.decode_next
        final = state.output_kind == RequestOutputKind.FINAL_ONLY
        self.interval: int = 1 if final else state.stream_interval
        #: With an interval, a token that is served has no output.
        silent = final or self.interval > 1
        self.collector: RequestOutputCollector | None = None if silent else state.queue
        processor = state.logprobs_processor
        self.update_logprobs: Callable[[EngineCoreOutput], None] | None = None
        if processor.num_logprobs is not None:
            self.update_logprobs = processor.update_from_output
        instances = (state, detokenizer, processor, self.collector)
        self.spaces = [vars(instance) for instance in instances if instance is not None]
        self.size = sum(map(len, self.spaces))

    def serves(self, output: "EngineCoreOutput") -> bool:
        """Return whether an output only has tokens and logprobs, and the request continues."""
        return (
            sum(map(len, self.spaces)) == self.size
            and output.finish_reason is None
            and bool(output.new_token_ids)
            and output.events is None
            and output.new_prompt_logprobs_tensors is None
            and output.pooling_output is None
            and output.kv_transfer_params is None
            and output.routed_experts is None
            and not output.num_nans_in_logits
            and (self.interval == 1 or not self._is_due(len(output.new_token_ids)))
        )

    def _is_due(self, count: int) -> bool:
        """Return whether an output is due behind ``count`` more tokens."""
        sent: int = self.state.sent_tokens_offset
        length: int = self.detokenizer.num_output_tokens() + count
        return sent == 0 or length - sent >= self.interval

    def take(self, output: "EngineCoreOutput") -> bool:
        """Append an output's tokens and logprobs; return whether a client is to be woken."""
        tokens = output.new_token_ids
        decode, detokenizer = self.decode, self.detokenizer
        if decode is None:
            detokenizer.update(tokens, False)
        else:
            for token in tokens:
                detokenizer.token_ids.append(token)
                piece = decode(token)
                if piece:
                    # With a single reference, CPython appends in place.
                    text = detokenizer.output_text
                    detokenizer.output_text = ""
                    text += piece
                    detokenizer.output_text = text
        if self.update_logprobs is not None:
            self.update_logprobs(output)
        collector = self.collector
        if collector is None:
            return False
        waiting = collector.output
        if waiting is None:
            collector.output = Unread(self.state, tokens)
            return True
        if type(waiting) is Unread:
            waiting.tokens += tokens
        elif isinstance(waiting, RequestOutput):
            collector.output = Unread(self.state, tokens, waiting)
        return False


class Wakes:
    """Wakes the clients of one output processor, behind all messages that have arrived."""

    def __init__(self) -> None:
        #: Outputs processed since other tasks have run.
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Collectors whose clients are still to be woken.
        self._woken: list[RequestOutputCollector] = []

    def wake(self, collectors: "list[RequestOutputCollector]", count: int) -> None:
        """Wake the clients of collectors once the event loop runs other tasks.

        ``count`` is the number of outputs of the message.
        """
        self._woken += collectors
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._wake_all()
            return
        if not self._count or loop is not self._loop:
            self._loop = loop
            loop.call_soon(self._wake_all)
        self._count += count

    def _wake_all(self) -> None:
        woken, self._woken, self._count = self._woken, [], 0
        for collector in woken:
            if collector.output is not None:  # its client may have taken it
                collector.ready.set()

    def are_due(self) -> bool:
        """Return whether other tasks should run before the next message."""
        return self._count > _MOST


class Continuing:
    """Processes the outputs of one output processor's requests that continue.

    A third-party program may replace a function at any time, and may restore it. Each message
    compares the functions that are not called by identity. If one is replaced, upstream serves.
    """

    def __init__(self, processor: "OutputProcessor", wakes: Wakes) -> None:
        self._processor, self._wakes = processor, wakes
        self._watch: originals.Watch | None = None
        self._replaced: list[str] = []

    @cached_property
    def _classes(self) -> dict[str, Any]:
        """Namespace of the processor's module; empty to fall back to upstream."""
        if registry.PROCESS_OUTPUTS not in switch.enabled():
            return {}
        classes = originals.namespace(type(self._processor))
        if classes.get("OutputProcessor") is type(self._processor):
            return classes
        gauges.fall_back(registry.PROCESS_OUTPUTS, gauges.OTHER_CLASS)
        return {}

    def _serves(self) -> bool:
        """Return whether functions that this module does not call are vLLM's own."""
        if not self._classes:
            return False
        if self._watch is None or self._watch.changed():
            self._reconsider()
        return not self._replaced

    def _reconsider(self) -> None:
        functions = [*self._functions()]
        self._watch = originals.Watch(functions)
        replaced = originals.replacements(functions)
        if replaced and replaced != self._replaced:
            word = registry.PROCESS_OUTPUTS
            subclasses.leave_replaced(word, replaced, "token", "processes all outputs")
        self._replaced = replaced
        for state in self._processor.request_states.values():
            vars(state).pop(subclasses.ATTRIBUTE, None)
            unread.make_output(state.queue)

    def _functions(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        yield self._processor, _PROCESSOR
        yield self._classes["RequestState"], _STATE
        yield self._classes["RequestOutputCollector"], _COLLECTOR
        yield IterationStats, _STATS
        for kind in (*_DETOKENIZERS, BaseIncrementalDetokenizer):
            yield kind, _DETOKENIZER
        yield FastIncrementalDetokenizer, ("decode_next", "_protected_step")
        yield SlowIncrementalDetokenizer, ("decode_next",)
        yield LogprobsProcessor, _LOGPROBS
        yield RequestOutput, _OUTPUT

    def _continuation(self, state: "RequestState") -> Continuation | None:
        """Return the continuation of a request that has had an output; None if upstream's."""
        detokenizer, processor, collector = state.detokenizer, state.logprobs_processor, state.queue
        final = state.output_kind == RequestOutputKind.FINAL_ONLY
        if (
            type(state) is not self._classes["RequestState"]
            or type(detokenizer) not in _DETOKENIZERS
            or type(processor) not in (LogprobsProcessor, DeferredLogprobs)
            or (state.stats is not None and type(state.stats) is not RequestStateStats)
            or state.is_prefilling
            or state.input_chunk_queue is not None
            or state.streaming_input
            or getattr(detokenizer, "stop", None)
            or state.routed_experts_chunks
        ):
            return None
        if not final and (
            type(collector) is not self._classes["RequestOutputCollector"]
            or state.parent_req is not None
            or state.prompt_token_ids is None
            or is_flat(processor)  # to merge two drops a token that is twice in a position
        ):
            return None
        if any(map(_has_override, (state, detokenizer, processor, collector))):
            return None
        state.readiness = None  # counted by its size
        return Continuation(state)

    def serve(
        self,
        outputs: "list[EngineCoreOutput]",
        timestamp: float | None,
        stats: IterationStats | None,
    ) -> "Iterable[EngineCoreOutput]":
        """Process the outputs of requests that continue; return the others, for upstream's loop.

        Outputs are processed in the message's order while that loop advances the iterator.
        """
        if not self._serves():
            return outputs
        if stats is not None and not (
            type(stats) is IterationStats and timestamp is not None and self._processor.log_stats
        ):
            return outputs
        return self._process(outputs, timestamp, stats)

    def _process(
        self,
        outputs: "list[EngineCoreOutput]",
        timestamp: float | None,
        stats: IterationStats | None,
    ) -> "Iterator[EngineCoreOutput]":
        states = self._processor.request_states
        continuation: Continuation | None
        woken: list[RequestOutputCollector] = []
        try:
            for output in outputs:
                state = states.get(output.request_id)
                if state is None:
                    continue
                try:  # a Continuation, or None: cheaper than a call of getattr
                    continuation = state.readiness
                    upstreams = continuation is None
                except AttributeError:
                    continuation, upstreams = None, False
                if continuation is None or not continuation.serves(output):
                    unread.make_output(state.queue)
                    yield output
                    if not upstreams and output.finish_reason is None:
                        state.readiness = self._continuation(state)
                    continue
                if stats is not None:
                    count = len(output.new_token_ids)
                    stats.num_generation_tokens += count
                    times: Any = continuation.stats
                    times.num_generation_tokens += count
                    stats.inter_token_latencies_iter.append(timestamp - times.last_token_ts)
                    times.last_token_ts = timestamp
                if continuation.take(output):
                    woken.append(continuation.collector)
        finally:
            self._wakes.wake(woken, len(outputs))


def _has_override(instance: object) -> bool:
    """Return whether an instance has a function of its own."""
    names = getattr(instance, "__dict__", ())
    return any(callable(getattr(type(instance), name, None)) for name in names)
