"""Fix ``stalled-requests``: each request is served or refused, and stalls no other request.

0.22.0 keeps the last position below max_model_len free for a sampled token, in each prefill chunk
after the first. A pooling request samples none: a prompt of max_model_len tokens keeps its last
token, its row and its blocks for ever, and the engine spins. ``max_num_seqs`` such requests stall
all others (https://github.com/vllm-project/vllm/issues/55427). Here a pooling request may use each
position. Other requests that cannot be served are refused:

- a turn that extends a streaming session to max_model_len or beyond, which stalls or ends the
  engine, ends with the finish reason "length"; the session continues without the turn;
- a prompt of max_model_len tokens that has bypassed the front end's check ends with "error";
- if no step is in flight and none can be scheduled, the request that the others wait for ends with
  "error" if it can never be computed: it has more tokens than the whole KV cache, or chunks that
  the configuration limits to less than a block of a model with aligned Mamba states. A request that
  is held back by anything else (a pause, a plugin, a scheduler class, blocks of others) waits.

With the priority policy, a preempted request that precedes the request being scheduled, and is not
scheduled itself, makes 0.22.0 skip the next request (https://github.com/vllm-project/vllm/issues/49097).
Here no request is skipped.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.schedule
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.add_request
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.get_num_unfinished_requests
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.finish_requests

from functools import cached_property
from inspect import getmembers, isfunction
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import request_times
from vllm.v1.readiness.engine import originals, subclasses, switch
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreEvent
    from vllm.v1.request import Request, StreamingUpdate

logger = init_logger(__name__)

#: Scheduler methods that have a seam.
_METHODS = ("schedule", "update_from_output")


class StalledRequests:
    """State of the fix for one scheduler."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        #: Maximum of tokens in a chunk of a prompt as configured at first use; 0 for none.
        self._threshold = 0
        #: The newest step with tokens, until it arrives.
        self._newest: SchedulerOutput | None = None
        #: The request that blocks all others, if any.
        self._stalled: Request | None = None
        #: Outputs of refused requests and turns, each with its client index.
        self._refused: list[tuple[int, EngineCoreOutput]] = []

    @cached_property
    def _on(self) -> bool:
        """True if the fix is on, and the scheduler has all seams; decided at first use."""
        config = getattr(self._scheduler, "scheduler_config", None)  # absent in a derived class
        self._threshold = getattr(config, "long_prefill_token_threshold", 0)
        return registry.STALLED_REQUESTS in switch.enabled() and all(
            subclasses.ends_in_seam(type(self._scheduler), method) for method in _METHODS
        )

    def most_tokens(self, request: "Request", most: int) -> int:
        """Return the maximum number of tokens of a request's next chunk.

        ``most`` is upstream's maximum, which leaves a position for a sampled token.
        """
        if request.pooling_params is None or registry.STALLED_REQUESTS not in switch.enabled():
            return most
        return most + 1

    def positions_lost(self, preempted: "Request", index: int, scheduled: "list[Request]") -> int:
        """Return by how much ``index`` into the running requests exceeds its new position.

        Called before a request is preempted by priority and removed. If the request is in
        ``scheduled``, upstream itself lowers the index.
        """
        if registry.STALLED_REQUESTS not in switch.enabled() or preempted in scheduled:
            return 0
        return int(self._scheduler.running.index(preempted) < index)

    def refuses(self, request: "Request") -> bool:
        """Refuse a new request, or an idle session's turn, that does not fit; True if refused."""
        if not self._on:
            return False
        scheduler = self._scheduler
        session = scheduler.requests.get(request.request_id)
        if session is None:
            if request.pooling_params is not None or request.num_tokens < scheduler.max_model_len:
                return False
            if scheduler.log_stats:
                request.record_event(EngineCoreEventType.QUEUED)
            self._refuse(request, FinishReason.ERROR, request_times.last_events(request))
            if scheduler.finished_req_ids_dict is not None:  # clients track requests by engine
                scheduler.finished_req_ids_dict[request.client_index].add(request.request_id)
            return True
        if session.status != RequestStatus.WAITING_FOR_STREAMING_REQ or not request.resumable:
            return False
        return self._refuses_turn(session, len(request.prompt_token_ids or ()))

    def refuses_turn(self, session: "Request", update: "StreamingUpdate") -> bool:
        """Refuse a queued turn that does not fit; True if refused."""
        return self._on and self._refuses_turn(session, len(update.prompt_token_ids or ()))

    def _refuses_turn(self, session: "Request", count: int) -> bool:
        """Refuse a turn of ``count`` tokens that does not fit; True if refused."""
        # Without the last sampled token.
        kept = session.num_tokens - bool(session.num_output_tokens)
        if kept + count < self._scheduler.max_model_len:
            return False
        self._refuse(session, FinishReason.LENGTH)
        return True

    def _refuse(
        self,
        request: "Request",
        reason: FinishReason,
        events: "list[EngineCoreEvent] | None" = None,
    ) -> None:
        """Queue the final output of a refused request or turn, for the next step that arrives."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=reason,
            events=events,
            trace_headers=request.trace_headers,
        )
        self._refused.append((request.client_index, output))
        # Counts as an unfinished request, so that the engine makes a step.
        self._scheduler.num_waiting_for_streaming_input -= 1

    def scheduled(self, step: "SchedulerOutput") -> None:
        """Look for a request that blocks all others, if a step has no tokens."""
        if step.total_num_scheduled_tokens:
            self._newest = step
            return
        self._stalled = None
        if (
            self._on
            and self._newest is None
            and not step.preempted_req_ids
            and self._scheduler._pause_state == PauseState.UNPAUSED
        ):
            self._stalled = self._find_stalled()

    def _find_stalled(self) -> "Request | None":
        """Return the request at the head of the queue if it can never be computed; else None.

        A connector's tokens, a session's next turn and third-party code may change its needs.
        """
        scheduler = self._scheduler
        queue = scheduler._select_waiting_queue_for_scheduling()
        if scheduler.running or scheduler.connector is not None or not queue:
            return None
        request = queue.peek_request()
        # A status that blocks a request can end; a request with computed tokens holds blocks.
        waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if not waits or request.num_computed_tokens or request.pooling_params or request.resumable:
            return None
        fits = self._fits(request) or not _all_vllms(scheduler)
        return None if fits else request

    def _fits(self, request: "Request") -> bool:
        """Return whether a request without computed tokens could be computed if it were alone."""
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        # Other groups of layers, which need further blocks, may free them behind a window.
        needed = sum(
            cdiv(request.num_tokens, group.block_size)
            for group in manager.coordinator.single_type_managers
            if type(group) is FullAttentionManager
        )
        if needed > manager.block_pool.num_gpu_blocks - 1:  # one is the null block
            return False
        config = scheduler.scheduler_config
        reordered = manager.enable_caching and scheduler.policy == SchedulingPolicy.PRIORITY
        if (
            not scheduler.need_mamba_block_aligned_split
            or config.long_prefill_token_threshold != self._threshold
            or reordered  # a later request may precede this one, and leave its prefix in the cache
        ):
            return True
        chunk = max(config.max_num_batched_tokens, scheduler.max_num_scheduled_tokens)
        chunk = min(chunk, config.long_prefill_token_threshold or chunk, request.num_tokens)
        cached = 0
        if manager.enable_caching and not request.skip_reading_prefix_cache:
            _, cached = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, request.num_tokens - 1
            )
        chunk = min(chunk, request.num_tokens - cached)
        return bool(scheduler._mamba_block_aligned_split(request, chunk, cached))

    def finish(self, step: "SchedulerOutput", outputs: dict[int, list[EngineCoreOutput]]) -> None:
        """Add the outputs of refused and stalled requests to ``outputs`` by client index.

        Called when ``step`` arrives.
        """
        scheduler = self._scheduler
        if self._newest is step:
            self._newest = None
        if self._refused:
            scheduler.num_waiting_for_streaming_input += len(self._refused)
            for client, output in self._refused:
                outputs.setdefault(client, []).append(output)
            self._refused = []
        request, self._stalled = self._stalled, None
        if request is None or self._newest is not None or request.is_finished():
            return
        logger.error(
            "Readiness overlay: ending request %s, because its %d tokens can never be computed "
            "with this KV cache and this configuration.",
            *(request.request_id, request.num_tokens),
        )
        request_times.fail(scheduler, request, outputs)


def _all_vllms(scheduler: "Scheduler") -> bool:
    """Return whether no class or function that decides what is scheduled is another's."""
    manager = scheduler.kv_cache_manager
    owners = scheduler, manager, manager.coordinator, manager.block_pool
    return all(
        type(owner).__module__.startswith("vllm.")
        and originals.all_vllms(owner, dict(getmembers(type(owner), isfunction)))
        for owner in owners
    )
