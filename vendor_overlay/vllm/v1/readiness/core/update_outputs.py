"""Feature ``update-outputs``: skip the per-token checks of requests that continue.

For each request of a step, 0.22.0 checks stop conditions, hashes and caches blocks, and builds an
output from some 30 attributes. With 128 requests this takes about 0.4 ms, and more with drafts.
Here a request that continues within its bounds (:mod:`bounds`), by one token or by the drafts that
it accepts, is updated by a few operations. Upstream's loop updates all other requests, in the same
order.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output
# mirrors: vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output
# mirrors: vllm.v1.request:Request.append_output_token_ids

from collections.abc import Iterable, Iterator
from itertools import starmap
from operator import add
from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import bounds, records
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

_SKIPPED = bounds.Skipped(
    functions=("check_stop", "EngineCoreOutput"),
    scheduler=("_update_request_with_output",),
    manager=("cache_blocks",),
    coordinator=("cache_blocks",),
    group=("cache_blocks",),
    grammars=("should_advance",),
    request=(
        *bounds.REQUEST,
        "has_encoder_inputs",
        "num_encoder_inputs",
        "num_tokens",
        "num_output_tokens",
        "use_structured_output",
    ),
    status=("is_finished",),
    tokens=("__getitem__",),
)


class UpdateOutputs:
    """The feature for one scheduler."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._service = bounds.Service(scheduler, registry.UPDATE_OUTPUTS, _SKIPPED)
        #: Of the step's drafts that were served; None without any.
        self._stats: SpecDecodingStats | None = None

    def serve(
        self,
        step: "SchedulerOutput",
        result: "ModelRunnerOutput",
        outputs: dict[int, list[EngineCoreOutput]],
    ) -> Iterable[tuple[str, int]]:
        """Append tokens to each request that continues, and its output to ``outputs`` by client.

        Returns the id and number of scheduled tokens of each other request, for upstream's loop.
        Requests are updated in the step's order while that loop advances the iterator.
        """
        counts: dict[str, int] = step.num_scheduled_tokens
        cache = self._service.cache()
        if (
            cache is None
            or not result.sampled_token_ids
            or result.pooler_output
            or result.kv_connector_output is not None
            or result.routed_experts is not None
            or min(counts.values(), default=1) <= 0  # upstream fails
        ):
            return counts.items()
        return self._update(step, result, outputs, cache)

    def _update(
        self,
        step: "SchedulerOutput",
        result: "ModelRunnerOutput",
        outputs: dict[int, list[EngineCoreOutput]],
        cache: bounds.Cache,
    ) -> Iterator[tuple[str, int]]:
        scheduler = self._scheduler
        requests, manager = scheduler.requests, scheduler.kv_cache_manager
        asynchronous, hash_size, never = cache.asynchronous, cache.hash_size, bounds.NEVER
        sampled, rows, logprobs = result.sampled_token_ids, result.req_id_to_index, result.logprobs
        drafts, invalid = step.scheduled_spec_decode_tokens, step.num_invalid_spec_tokens
        #: Ids of requests with results that only upstream processes.
        special = {
            *result.prompt_logprobs_dict,
            *(result.num_nans_in_logits or ()),
        }
        running = RequestStatus.RUNNING
        limits: bounds.Bounds
        client = None
        for name, count in step.num_scheduled_tokens.items():
            request = requests.get(name)
            if request is None:
                continue
            try:  # the record of records.of: cheaper than a call
                limits = request.readiness.bounds
            except AttributeError:
                limits = never
            tokens = sampled[rows[name]]
            known = request._all_token_ids
            length = len(known) + len(tokens)
            if (
                limits.preemptions != request.num_preemptions
                or length >= limits.room
                or limits.most != request.max_tokens
                or not tokens
                or not limits.stops.isdisjoint(tokens)
                or request.status is not running
                or name in special
            ):
                yield name, count
                made = cache.bounds(request) if request.status is running else never
                records.of(request).bounds = made
                continue
            if drafts and (scheduled := drafts.get(name)):
                self._reject(request, len(scheduled), len(tokens) - 1, invalid)
            known.extend(tokens)
            request._output_token_ids.extend(tokens)
            while length >= limits.hashed:
                request.update_block_hashes()
                limits.hashed += hash_size
            if asynchronous:
                placeholders = request.num_output_placeholders - len(tokens)
                request.num_output_placeholders = placeholders
                assert placeholders >= 0
                if (computed := request.num_computed_tokens - placeholders) >= limits.cached:
                    manager.cache_blocks(request, computed)
                    cache.update(request, limits)
            if request.client_index != client:
                client = request.client_index
                append = outputs[client].append
            if limits.plain:
                append(EngineCoreOutput(name, tokens))
            else:
                new_logprobs = None
                if limits.logprobs and logprobs:
                    new_logprobs = logprobs.slice_request(rows[name], len(tokens))
                append(EngineCoreOutput(name, tokens, new_logprobs, **limits.constant))

    def _reject(
        self, request: "Request", drafted: int, accepted: int, invalid: dict[str, int] | None
    ) -> None:
        """Subtract the rejected drafts of a request from its counts, and count its drafts."""
        request.num_computed_tokens -= drafted - accepted
        if request.num_output_placeholders > 0:
            request.num_output_placeholders -= drafted - accepted
        self._stats = self._scheduler.make_spec_decoding_stats(
            self._stats,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_invalid_spec_tokens=invalid,
            request_id=request.request_id,
        )

    def draft_stats(self, others: "SpecDecodingStats | None") -> "SpecDecodingStats | None":
        """Return the statistics of a step's drafts; ``others``: those of upstream's loop."""
        stats, self._stats = self._stats, None
        if stats is None or others is None:
            return stats or others
        stats.num_drafts += others.num_drafts
        stats.num_draft_tokens += others.num_draft_tokens
        stats.num_accepted_tokens += others.num_accepted_tokens
        places = zip(
            stats.num_accepted_tokens_per_pos, others.num_accepted_tokens_per_pos, strict=True
        )
        stats.num_accepted_tokens_per_pos = [*starmap(add, places)]
        return stats
