"""Fix ``stalled-requests``: each request is served or refused, and stalls no other request.

0.22.0 keeps the last position below max_model_len free for a sampled token, in each prefill chunk
after the first. A pooling request samples none: a prompt of max_model_len tokens keeps its last
token, its row and its blocks for ever, and the engine spins. ``max_num_seqs`` such requests stall
all others (https://github.com/vllm-project/vllm/issues/55427). Here a pooling request may use each
position. Other requests that cannot be served are refused:

- a turn that extends a streaming session to max_model_len or beyond, which stalls or ends the
  engine, ends with the finish reason "length"; the session continues without the turn;
- a prompt of max_model_len tokens that has bypassed the front end's check ends with "error";
- if a step schedules nothing although no step is in flight and all KV blocks are available, no
  later step can differ. The request that blocks the others ends with "error", unless it is a
  streaming session.

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

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, StreamingUpdate

logger = init_logger(__name__)

#: Attribute of the scheduler that holds its :class:`_Stalls`.
_ATTRIBUTE = "readiness_stalls"
#: Scheduler methods that have a seam.
_METHODS = ("schedule", "update_from_output")


class _Stalls:
    """State of the fix for one scheduler.

    Attributes:
        on: whether the fix is on, and the scheduler has all seams.
        newest: the newest step with tokens, until it arrives.
        stalled: the request that blocks all others, if any.
        refused: outputs of refused requests and turns, each with its client index.
    """

    def __init__(self, kind: "type[Scheduler]") -> None:
        self.on = registry.STALLED_REQUESTS in switch.enabled() and all(
            subclasses.ends_in_seam(kind, method) for method in _METHODS
        )
        self.newest: SchedulerOutput | None = None
        self.stalled: Request | None = None
        self.refused: list[tuple[int, EngineCoreOutput]] = []


def _of(scheduler: "Scheduler") -> _Stalls:
    return subclasses.remembered(scheduler, _ATTRIBUTE, lambda: _Stalls(type(scheduler)))


def most_tokens(scheduler: "Scheduler", request: "Request", most: int) -> int:
    """Return the maximum number of tokens of a request's next chunk.

    ``most`` is upstream's maximum, which leaves a position for a sampled token.
    """
    if request.pooling_params is None or registry.STALLED_REQUESTS not in switch.enabled():
        return most
    return most + 1


def positions_lost(
    scheduler: "Scheduler", preempted: "Request", index: int, scheduled: "list[Request]"
) -> int:
    """Return by how much ``index`` into the running requests exceeds its request's new position.

    Called before a request is preempted by priority and removed. If the request is in
    ``scheduled``, upstream itself lowers the index.
    """
    if registry.STALLED_REQUESTS not in switch.enabled() or preempted in scheduled:
        return 0
    return int(scheduler.running.index(preempted) < index)


def refuses(scheduler: "Scheduler", request: "Request") -> bool:
    """Refuse a new request, or a turn of an idle session, that does not fit; True if refused."""
    if not _of(scheduler).on:
        return False
    session = scheduler.requests.get(request.request_id)
    if session is None:
        if request.pooling_params is not None or request.num_tokens < scheduler.max_model_len:
            return False
        _refuse(scheduler, request, FinishReason.ERROR)
        if scheduler.finished_req_ids_dict is not None:  # clients track requests by engine
            scheduler.finished_req_ids_dict[request.client_index].add(request.request_id)
        return True
    if session.status != RequestStatus.WAITING_FOR_STREAMING_REQ or not request.resumable:
        return False
    return _refuses_turn(scheduler, session, len(request.prompt_token_ids or ()))


def refuses_turn(scheduler: "Scheduler", session: "Request", update: "StreamingUpdate") -> bool:
    """Refuse a queued turn that does not fit; True if refused."""
    return _of(scheduler).on and _refuses_turn(
        scheduler, session, len(update.prompt_token_ids or ())
    )


def _refuses_turn(scheduler: "Scheduler", session: "Request", count: int) -> bool:
    """Refuse a turn of ``count`` tokens that does not fit; True if refused."""
    kept = session.num_tokens - bool(session.num_output_tokens)  # without the last sampled token
    if kept + count < scheduler.max_model_len:
        return False
    _refuse(scheduler, session, FinishReason.LENGTH)
    return True


def _refuse(scheduler: "Scheduler", request: "Request", reason: FinishReason) -> None:
    """Queue the final output of a refused request or turn, for the next step that arrives."""
    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=reason,
        trace_headers=request.trace_headers,
    )
    _of(scheduler).refused.append((request.client_index, output))
    # Counts as an unfinished request, so that the engine makes a step.
    scheduler.num_waiting_for_streaming_input -= 1


def scheduled(scheduler: "Scheduler", step: "SchedulerOutput") -> None:
    """Look for a request that blocks all others, if a step has no tokens."""
    stalls = _of(scheduler)
    if step.total_num_scheduled_tokens:
        stalls.newest = step
        return
    stalls.stalled = None
    if (
        stalls.on
        and stalls.newest is None
        and not step.preempted_req_ids
        and scheduler._pause_state == PauseState.UNPAUSED
    ):
        stalls.stalled = _stalled(scheduler)


def _stalled(scheduler: "Scheduler") -> "Request | None":
    """Return the request that blocks all others while no step is in flight; None if none does.

    A waiting session keeps its blocks until it ends, and the blocked request may fit then. A
    session itself is left to its client, whose input the engine cannot end.
    """
    if any(each.num_computed_tokens for each in (*scheduler.waiting, *scheduler.skipped_waiting)):
        return None
    request: Request | None = None
    if scheduler.running:
        request = scheduler.running[-1]
    elif scheduler.connector is None and (
        queue := scheduler._select_waiting_queue_for_scheduling()
    ):
        request = queue.peek_request()
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return None  # becomes ready later
    if request is None or request.pooling_params is not None or request.resumable:
        return None
    return request


def finish(
    scheduler: "Scheduler", step: "SchedulerOutput", outputs: dict[int, list[EngineCoreOutput]]
) -> None:
    """Add the outputs of refused and stalled requests to ``outputs`` by client index.

    Called when ``step`` arrives.
    """
    stalls = _of(scheduler)
    if stalls.newest is step:
        stalls.newest = None
    if stalls.refused:
        scheduler.num_waiting_for_streaming_input += len(stalls.refused)
        for client, output in stalls.refused:
            outputs.setdefault(client, []).append(output)
        stalls.refused = []
    request, stalls.stalled = stalls.stalled, None
    if request is None or stalls.newest is not None or request.is_finished():
        return
    logger.error(
        "Readiness overlay: ending request %s because it can never be scheduled "
        "(%d of %d tokens computed).",
        *(request.request_id, request.num_computed_tokens, request.num_tokens),
    )
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    outputs.setdefault(request.client_index, []).append(
        EngineCoreOutput(
            trace_headers=request.trace_headers,
            events=request.take_events(),
            request_id=request.request_id,
            finish_reason=request.get_finished_reason(),
            new_token_ids=[],
        )
    )
