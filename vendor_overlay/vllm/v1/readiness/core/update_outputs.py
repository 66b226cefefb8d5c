"""Feature ``update-outputs``: skip the per-token checks of requests that continue by one token.

For each request of a step, 0.22.0 checks stop conditions, hashes and caches blocks, and builds an
output from some 30 attributes. With 128 requests this takes about 0.4 ms. Here a request that
continues by one token within its bounds (:mod:`bounds`) is updated by a few operations. Upstream's
loop updates all other requests, in the same order.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output
# mirrors: vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output
# mirrors: vllm.v1.request:Request.append_output_token_ids

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import bounds, records
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

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

    def serve(
        self,
        step: "SchedulerOutput",
        result: "ModelRunnerOutput",
        outputs: dict[int, list[EngineCoreOutput]],
    ) -> Iterable[tuple[str, int]]:
        """Append a token to each request that continues, and its output to ``outputs`` by client.

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
        #: Ids of requests with results that only upstream processes.
        special = {
            *step.scheduled_spec_decode_tokens,
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
            length = len(known) + 1
            if (
                limits.preemptions != request.num_preemptions
                or length >= limits.room
                or limits.most != request.max_tokens
                or len(tokens) != 1
                or (token := tokens[0]) in limits.stops
                or request.status is not running
                or name in special
            ):
                yield name, count
                made = cache.bounds(request) if request.status is running else never
                records.of(request).bounds = made
                continue
            known.append(token)
            request._output_token_ids.append(token)
            if length >= limits.hashed:
                request.update_block_hashes()
                limits.hashed += hash_size
            if asynchronous:
                request.num_output_placeholders = placeholders = request.num_output_placeholders - 1
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
                    new_logprobs = logprobs.slice_request(rows[name], 1)
                append(EngineCoreOutput(name, tokens, new_logprobs, **limits.constant))
