"""Fix ``refused-grammars``: a grammar that fails to compile ends only its own request.

0.22.0 compiles grammars in a thread. Some grammars pass the front end's checks but fail to compile:
an empty ``json`` or ``structural_tag``, ``json_object`` set to false, a structural tag with a token
id outside the vocabulary, or a grammar validated for another backend. The scheduler's poll of the
future raises the error, and the engine dies for all clients. Here the request ends with the finish
reason "error", and the log gives the cause.
"""

# mirrors: vllm.v1.structured_output.request:StructuredOutputRequest
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._try_promote_blocked_waiting_request
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.finish_requests

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import request_times
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

#: Seconds to wait for a grammar; upstream's value.
_PATIENCE = 1e-4


class RefusedGrammars:
    """State of the fix for one scheduler."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        #: Requests to end, by id.
        self._refused: dict[str, Request] = {}

    def waits(self, request: "Request") -> bool:
        """Return whether a request keeps waiting: its grammar is compiling, or failed to compile.

        If the grammar failed, :meth:`finish` ends the request. Upstream does not poll a pending
        grammar, which might fail between this check and the poll.
        """
        structured = request.structured_output_request
        grammar = None if structured is None else structured._grammar
        if not isinstance(grammar, Future) or registry.REFUSED_GRAMMARS not in switch.enabled():
            return False
        if not subclasses.ends_in_seam(type(self._scheduler), "update_from_output"):
            return False  # the scheduler does not call finish
        wait((grammar,), _PATIENCE)
        if not grammar.done():
            return True
        error = grammar.exception()
        if error is None:
            return False
        if request.request_id not in self._refused:
            self._refused[request.request_id] = request
            logger.error(
                "Readiness overlay: ending request %s because its grammar failed to compile: "
                "%s: %s",
                *(request.request_id, type(error).__name__, str(error).strip()),
            )
        return True

    def finish(self, outputs: "dict[int, list[EngineCoreOutput]]") -> None:
        """End the refused requests that their clients have not, with outputs by client index."""
        refused, self._refused = self._refused, {}
        for name, request in refused.items():
            if self._scheduler.requests.get(name) is request and not request.is_finished():
                request_times.fail(self._scheduler, request, outputs)
