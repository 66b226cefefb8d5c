"""Fix ``preemption``: account for the in-flight tokens of a preempted request.

Under async scheduling, a request may be preempted while some of its tokens are in flight. 0.22.0
miscounts these tokens in two cases:

- ``reset_prefix_cache(reset_running_requests=True)`` drops one output per in-flight token. With
  drafts an output holds several tokens, so outputs sampled after the reset are dropped too, and
  rejected drafts are subtracted from the counts of the resumed request. An assert kills the engine,
  or the request never ends. Another assert fails if a dropped output has prompt logprobs.
- With more than two in-flight steps (three or more pipeline stages), a request preempted for lack
  of blocks may resume before all of its tokens have arrived. It then computes from wrong tokens.

Here the scheduler tracks its in-flight steps. A reset drops only output of these steps. A request
preempted for lack of blocks resumes once its in-flight tokens have been delivered.

In a pipeline with synchronous scheduling, 0.22.0 resumes a preempted request while a step with it
is in flight: both sample the same position, so a token is delivered twice. Here no request is
admitted until that step has arrived.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.schedule
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._preempt_request
# mirrors: vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output

from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import in_flight
from vllm.v1.readiness.engine import subclasses, switch
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.scheduler import Scheduler as Base
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
else:
    Base = object


#: Attribute of the scheduler: whether it is a synchronous pipeline that the fix serves.
_PIPELINE = "readiness_synchronous_pipeline"


class StepsInFlight(Base):  # type: ignore[misc]
    """Base class of AsyncScheduler that tracks the in-flight steps; precedes Scheduler in the MRO.

    If the fix is off or a derived class overrides a method, all methods only call upstream's.
    """

    _pause_state: PauseState
    #: Stays False if a derived class skips this class's constructor.
    _mends_preemption = False

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._mends_preemption = registry.PREEMPTION in switch.enabled() and _all_ours(self)
        #: Requests that had tokens in flight when they were preempted.
        self._preempted: list[Request] = []

    def schedule(self) -> "SchedulerOutput":
        """Schedule a step; admit no waiting request while a preempted request awaits tokens."""
        step: SchedulerOutput
        if not self._mends_preemption:
            step = super().schedule()
            return step
        state = self._pause_state
        if self._preempted and self._awaits_tokens() and state == PauseState.UNPAUSED:
            self._pause_state = PauseState.PAUSED_NEW
        try:
            step = super().schedule()
        finally:
            self._pause_state = state
        in_flight.of(self).schedule(step)
        return step

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        """Remove dropped results from a step's output, and update the requests."""
        if self._mends_preemption:
            in_flight.of(self).arrive(scheduler_output, model_runner_output)
        outputs: dict[int, EngineCoreOutputs]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        return outputs

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *more: bool, **named: bool
    ) -> bool:
        """Reset the prefix cache, and drop the in-flight output of the preempted requests."""
        running = []
        if self._mends_preemption and reset_running_requests:
            running = [item for item in self.running if item.num_output_placeholders]
        try:
            done: bool = super().reset_prefix_cache(reset_running_requests, *more, **named)
            return done
        finally:
            for request in running:
                request.async_tokens_to_discard = 0
                in_flight.of(self).drop(request.request_id)

    def _preempt_request(self, request: "Request", timestamp: float) -> None:
        super()._preempt_request(request, timestamp)
        if self._mends_preemption and request.num_output_placeholders:
            self._preempted.append(request)

    def _awaits_tokens(self) -> bool:
        """Return whether a preempted request has in-flight tokens that will be delivered."""
        awaited = []
        for request in self._preempted:
            if request.status != RequestStatus.PREEMPTED or not request.num_output_placeholders:
                continue
            if in_flight.of(self).awaits(request.request_id):
                awaited.append(request)
            else:
                request.num_output_placeholders = 0
        self._preempted = awaited
        return bool(awaited)


def scheduled(scheduler: "Scheduler", step: "SchedulerOutput") -> None:
    """Add a scheduled step of a synchronous pipeline to the in-flight steps."""
    if _is_synchronous_pipeline(scheduler):
        in_flight.of(scheduler).schedule(step)


def arrive(scheduler: "Scheduler", step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
    """Remove a step of a synchronous pipeline from the in-flight steps."""
    if _is_synchronous_pipeline(scheduler):
        in_flight.of(scheduler).arrive(step, output)


def awaits_steps(scheduler: "Scheduler") -> bool:
    """Return whether a preempted request of a synchronous pipeline is in a step in flight."""
    if not _is_synchronous_pipeline(scheduler):
        return False
    flying = in_flight.of(scheduler)
    requests = scheduler.requests
    return any(
        name in requests
        and requests[name].status == RequestStatus.PREEMPTED
        and flying.awaits(name)
        for step in flying.steps
        for name in step.num_scheduled_tokens
    )


def _is_synchronous_pipeline(scheduler: "Scheduler") -> bool:
    """Return whether the fix serves a scheduler that has steps in flight without placeholders."""
    return subclasses.remembered(scheduler, _PIPELINE, lambda: _serves_pipeline(scheduler))


def _serves_pipeline(scheduler: "Scheduler") -> bool:
    if registry.PREEMPTION not in switch.enabled() or isinstance(scheduler, StepsInFlight):
        return False
    if not getattr(scheduler, "use_pp", False):  # absent without vLLM's constructor
        return False
    kind = type(scheduler)
    if all(subclasses.ends_in_seam(kind, name) for name in ("schedule", "update_from_output")):
        return True
    subclasses.leave_scheduler(kind, registry.PREEMPTION, "preemption")
    return False


def _all_ours(scheduler: StepsInFlight) -> bool:
    kind = type(scheduler)
    names = ("schedule", "update_from_output", "reset_prefix_cache", "_preempt_request")
    if all(getattr(kind, name) is getattr(StepsInFlight, name) for name in names):
        return True
    subclasses.leave_scheduler(kind, registry.PREEMPTION, "preemption")
    return False
