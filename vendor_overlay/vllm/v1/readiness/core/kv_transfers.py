"""Fix ``kv-transfers``: a request's end, its KV blocks and its KV transfers agree with one another.

A KV connector moves a request's KV to or from other engines while steps run. 0.22.0 handles two
orders of events wrongly:

- A transfer is reported as finished for a request that has been freed, or that neither loads nor
  has finished: an assert kills the engine (https://github.com/vllm-project/vllm/issues/43226). A
  request that both loads and sends when it is freed loses its blocks at the first report.
- A request is preempted while the step that ends it is in flight: the connector gets no blocks to
  hand over, and the reply is delivered (https://github.com/vllm-project/vllm/issues/48141).

Here a report without a matching transfer is ignored, and blocks are freed after the last report. A
request that hands over its blocks (``do_remote_decode``) and would end without any drops the output
and recomputes the step. No load is ever deferred, so requests are admitted as by upstream.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.schedule
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._preempt_request
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._free_request
# mirrors: vllm.v1.request:Request.append_output_token_ids
# mirrors: vllm.v1.core.sched.utils:check_stop

from functools import cached_property
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler as Upstream
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.readiness.core.in_flight import InFlight
    from vllm.v1.request import Request

logger = init_logger(__name__)

#: Scheduler methods that have a seam.
_METHODS = (
    "schedule",
    "update_from_output",
    "_preempt_request",
    "_free_request",
    "_update_from_kv_xfer_finished",
)
#: Kinds of report.
_RECEIVED, _SENT = "received", "sent"


class KVTransfers:
    """State of the fix for one scheduler, whose steps in flight are ``in_flight``."""

    def __init__(self, scheduler: "Scheduler", in_flight: "InFlight") -> None:
        self._scheduler, self._in_flight = scheduler, in_flight
        #: Preempted requests that hand over their blocks and have in-flight output.
        self._preempted: list[Request] = []
        #: Ids of requests whose load was reported.
        self._received: set[str] = set()
        #: By freed request whose blocks are still transferred, the reports that it awaits. Each
        #: entry holds the kinds of report that satisfy it.
        self._awaited: dict[str, list[set[str]]] = {}

    @property
    def _serves(self) -> bool:
        return self._scheduler.connector is not None and self._on

    @cached_property
    def _on(self) -> bool:
        return registry.KV_TRANSFERS in switch.enabled() and subclasses.scheduler_has_seams(
            type(self._scheduler), _METHODS, registry.KV_TRANSFERS, "reports of KV transfers"
        )

    def scheduled(self, step: "SchedulerOutput") -> None:
        """Add a scheduled step to the in-flight steps, if the fix is on."""
        if self._serves:
            self._in_flight.schedule(step)

    def preempt(self, request: "Request") -> None:
        """Remember a preempted request, whose in-flight output may end it without blocks."""
        # Without this parameter a connector takes no blocks when the request ends.
        hands_over = (request.kv_transfer_params or {}).get("do_remote_decode")
        if hands_over and self._serves:
            self._preempted.append(request)

    def arrive(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """Drop the outputs of a step that end preempted requests. Called before it is processed."""
        if not self._serves:
            return
        steps = self._in_flight
        steps.arrive(step, output)
        if not self._preempted:
            return
        for request in self._preempted:
            name = request.request_id
            if name in step.num_scheduled_tokens and self._ends(request, output):
                steps.take_out(name, output)
                steps.drop(name)
                request.num_output_placeholders = 0
                request.async_tokens_to_discard = 0
        self._preempted = [
            request
            for request in self._preempted
            if request.status == RequestStatus.PREEMPTED and steps.awaits(request.request_id)
        ]

    def _ends(self, request: "Request", output: "ModelRunnerOutput") -> bool:
        """Return whether an output ends a preempted request, whose blocks are gone."""
        row = output.req_id_to_index.get(request.request_id)
        if row is None or request.status != RequestStatus.PREEMPTED or request.resumable:
            return False
        if request.async_tokens_to_discard:
            return False  # upstream drops the output
        if request.pooling_params is not None:
            return bool(output.pooler_output) and output.pooler_output[row] is not None
        tokens = output.sampled_token_ids[row] if output.sampled_token_ids else []
        state = request.status, request.stop_reason
        before, hashes = len(request._output_token_ids), len(request.block_hashes)
        try:
            # Only upstream's code knows all stop conditions, so append the tokens and remove them.
            _, stops = Upstream._update_request_with_output(self._scheduler, request, [*tokens])
            return bool(stops)
        finally:
            count = len(request._output_token_ids) - before
            if count:
                del request._output_token_ids[-count:], request._all_token_ids[-count:]
            del request.block_hashes[hashes:]
            request.status, request.stop_reason = state

    def free(self, request: "Request", loads: bool, sends: bool) -> None:
        """Note the transfers whose reports a freed request awaits before it frees its blocks."""
        if not self._serves:
            return
        name = request.request_id
        # A connector may report the end of a request that never loaded by either kind of report.
        sent = {_SENT} if loads or name in self._received else {_SENT, _RECEIVED}
        self._received.discard(name)
        if reports := [{_RECEIVED}] * loads + [sent] * sends:
            self._awaited[name] = reports

    def finish(self, output: "KVConnectorOutput") -> bool:
        """Process the reports of finished transfers; False to fall back to upstream."""
        if not self._serves:
            return False
        for name in output.finished_recving or ():
            request = self._scheduler.requests.get(name)
            if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._scheduler.finished_recving_kv_req_ids.add(name)
                self._received.add(name)
            else:
                self._report(name, _RECEIVED)
        for name in output.finished_sending or ():
            self._report(name, _SENT)
        return True

    def _report(self, name: str, kind: str) -> None:
        """Free the blocks of a freed request after its last report; ignore other reports."""
        reports = self._awaited.get(name, [])
        report = next((report for report in reports if kind in report), None)
        if report is None:
            logger.debug("Request %s awaits no report of kind %s.", name, kind)
            return
        reports.remove(report)
        if not reports:
            del self._awaited[name]
            self._scheduler._free_blocks(self._scheduler.requests[name])
