"""Ends of requests by other fixes, with the events for the latencies of ``request-times``."""

# mirrors: vllm.v1.metrics.stats:IterationStats.update_from_events

from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreEvent
    from vllm.v1.request import Request


def last_events(request: "Request") -> "list[EngineCoreEvent] | None":
    """Return the events of a request that a fix ends, perhaps before it is scheduled.

    With ``request-times`` off it counts as scheduled now, else its latencies would be the host's
    uptime.
    """
    if request.events and registry.REQUEST_TIMES not in switch.enabled():
        request.record_event(EngineCoreEventType.SCHEDULED)
    events: list[EngineCoreEvent] | None = request.take_events()
    return events


def fail(
    scheduler: "Scheduler", request: "Request", outputs: dict[int, list[EngineCoreOutput]]
) -> None:
    """End a request with an error, and add its last output to ``outputs`` by client index."""
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
    output = EngineCoreOutput(
        trace_headers=request.trace_headers,
        events=last_events(request),
        request_id=request.request_id,
        finish_reason=request.get_finished_reason(),
        new_token_ids=[],
    )
    outputs.setdefault(request.client_index, []).append(output)
