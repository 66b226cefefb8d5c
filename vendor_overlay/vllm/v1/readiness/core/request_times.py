"""Events of requests that other fixes end, for the latencies of the fix ``request-times``."""

# mirrors: vllm.v1.metrics.stats:IterationStats.update_from_events

from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreEventType
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
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
