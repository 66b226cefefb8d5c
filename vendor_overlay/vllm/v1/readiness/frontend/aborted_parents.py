"""Fix ``aborted-parents``: aborting a request with ``n`` > 1 releases all of its state.

A request with ``n`` > 1 is a parent with a child for each sequence. 0.22.0 drops a parent when its
last child finishes, or when the abort names the parent. An abort that names the request or its
children drops only these, and the parent stays in memory for ever
(https://github.com/vllm-project/vllm/issues/51629). Here the last child that is aborted drops the
parent. If others finish later, the final output has an output for each aborted child.
"""

# mirrors: vllm.v1.engine.output_processor:OutputProcessor.abort_requests
# mirrors: vllm.v1.engine.parallel_sampling:ParentRequest

from typing import TYPE_CHECKING

from vllm.v1.engine import FinishReason
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState


def leave(processor: "OutputProcessor", child: "RequestState") -> None:
    """Remove an aborted request from its parent, if any, and drop a parent without children."""
    parent = child.parent_req
    if parent is None or registry.ABORTED_PARENTS not in switch.enabled():
        return
    if child.queue is None:  # else upstream has added the child's output to its parent
        child.make_request_output([], None, FinishReason.ABORT, None)
    parent.child_requests.discard(child.request_id)
    if not parent.child_requests:
        processor.parent_requests.pop(parent.request_id, None)
