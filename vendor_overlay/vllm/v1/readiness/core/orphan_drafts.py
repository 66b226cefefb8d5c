"""Fix ``orphan-drafts``: discard placeholders of drafts that the worker no longer has.

Under async scheduling, each scheduled request gets placeholders (-1) for the drafts that the worker
will propose. The worker keeps drafts only for the next step. That step may skip the request,
because in-flight drafts may already reach max_model_len or because the token budget is exhausted.
0.22.0 then schedules the placeholders in a later step: -1 reaches the embedding, and the engine
dies with a device error. Here a skipped request loses its placeholders, and its next step has no
drafts.
"""

# mirrors: vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.schedule
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.output import SchedulerOutput


def forget(scheduler: "AsyncScheduler", step: "SchedulerOutput") -> None:
    """Clear the draft placeholders of the running requests that ``step`` skips."""
    scheduled = step.num_scheduled_tokens
    if len(scheduled) == len(scheduler.running) or not scheduler.num_spec_tokens:
        return
    if registry.ORPHAN_DRAFTS not in switch.enabled():
        return
    for request in scheduler.running:
        if request.request_id not in scheduled:
            request.spec_token_ids = []
