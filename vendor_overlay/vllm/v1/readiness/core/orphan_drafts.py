"""The fix ``orphan-drafts``: no step has drafts that nobody proposed.

Under asynchronous scheduling the scheduler gives each request of a step placeholders (-1) for
the drafts that the worker will propose in that step. The worker keeps them for its next step
only. Stock 0.22.0 also schedules the placeholders of a request that was left out of that next
step: because drafts in flight might have filled the model's length, or because others took the
budget. The worker has no drafts to replace them by, and -1 reaches the embedding as a token,
which ends the engine with an error of the device.

Here a request that is left out of a step loses its placeholders, and goes on without drafts
for one step.
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
    """Take the placeholders from running requests that are left out of a step.

    Args:
        scheduler: has drafts or not.
        step: has just been scheduled.
    """
    scheduled = step.num_scheduled_tokens
    if len(scheduled) == len(scheduler.running) or not scheduler.num_spec_tokens:
        return
    if registry.ORPHAN_DRAFTS not in switch.enabled():
        return
    for request in scheduler.running:
        if request.request_id not in scheduled:
            request.spec_token_ids = []
