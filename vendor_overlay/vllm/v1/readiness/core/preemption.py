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

from functools import cached_property
from typing import TYPE_CHECKING

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import step as steps
from vllm.v1.readiness.engine import subclasses, switch
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.sched.scheduler import Scheduler as Base
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.readiness.core.in_flight import InFlight
    from vllm.v1.request import Request
else:
    Base = object

#: What vLLM's own code does if the fix is left out, for the log.
_WORK = "preemption"


class Preemption:
    """State of the fix for one scheduler, whose steps in flight are ``in_flight``.

    Attributes:
        on: whether the fix serves an asynchronous scheduler. Set by the constructor of
            :class:`StepsInFlight`, which a derived class may skip.
        preempted: requests that had tokens in flight when they were preempted.
    """

    def __init__(self, scheduler: "Scheduler", in_flight: "InFlight") -> None:
        self._scheduler, self._in_flight = scheduler, in_flight
        self.on = False
        self.preempted: list[Request] = []

    @cached_property
    def _is_pipeline(self) -> bool:
        """True if the fix serves a scheduler with steps in flight that have no placeholders."""
        if registry.PREEMPTION not in switch.enabled() or isinstance(
            self._scheduler, StepsInFlight
        ):
            return False
        if not getattr(self._scheduler, "use_pp", False):  # absent without vLLM's constructor
            return False
        return subclasses.scheduler_has_seams(
            type(self._scheduler), ("schedule", "update_from_output"), registry.PREEMPTION, _WORK
        )

    def awaits_tokens(self) -> bool:
        """Return whether a preempted request has in-flight tokens that will be delivered."""
        awaited = []
        for request in self.preempted:
            if request.status != RequestStatus.PREEMPTED or not request.num_output_placeholders:
                continue
            if self._in_flight.awaits(request.request_id):
                awaited.append(request)
            else:
                request.num_output_placeholders = 0
        self.preempted = awaited
        return bool(awaited)

    def awaits_steps(self) -> bool:
        """Return whether a preempted request of a synchronous pipeline is in a step in flight."""
        if not self._is_pipeline:
            return False
        requests = self._scheduler.requests
        return any(
            name in requests
            and requests[name].status == RequestStatus.PREEMPTED
            and self._in_flight.awaits(name)
            for step in self._in_flight.steps
            for name in step.num_scheduled_tokens
        )

    def scheduled(self, step: "SchedulerOutput") -> None:
        """Add a scheduled step of a synchronous pipeline to the in-flight steps."""
        if self._is_pipeline:
            self._in_flight.schedule(step)

    def arrive(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """Remove a step of a synchronous pipeline from the in-flight steps."""
        if self._is_pipeline:
            self._in_flight.arrive(step, output)


class StepsInFlight(Base):  # type: ignore[misc]
    """Base class of AsyncScheduler that tracks the in-flight steps; precedes Scheduler in the MRO.

    If the fix is off or a derived class overrides a method, all methods only call upstream's.
    """

    _pause_state: PauseState

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        steps.of(self).preemption.on = registry.PREEMPTION in switch.enabled() and _all_ours(self)

    def schedule(self) -> "SchedulerOutput":
        """Schedule a step; admit no waiting request while a preempted request awaits tokens."""
        scheduled: SchedulerOutput
        own = steps.of(self)
        if not own.preemption.on:
            scheduled = super().schedule()
            return scheduled
        state = self._pause_state
        if own.preemption.awaits_tokens() and state == PauseState.UNPAUSED:
            self._pause_state = PauseState.PAUSED_NEW
        try:
            scheduled = super().schedule()
        finally:
            self._pause_state = state
        own.in_flight.schedule(scheduled)
        return scheduled

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        """Remove dropped results from a step's output, and update the requests."""
        own = steps.of(self)
        if own.preemption.on:
            own.in_flight.arrive(scheduler_output, model_runner_output)
        outputs: dict[int, EngineCoreOutputs]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        return outputs

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, *more: bool, **named: bool
    ) -> bool:
        """Reset the prefix cache, and drop the in-flight output of the preempted requests."""
        own, running = steps.of(self), []
        if own.preemption.on and reset_running_requests:
            running = [item for item in self.running if item.num_output_placeholders]
        try:
            done: bool = super().reset_prefix_cache(reset_running_requests, *more, **named)
            return done
        finally:
            for request in running:
                request.async_tokens_to_discard = 0
                own.in_flight.drop(request.request_id)

    def _preempt_request(self, request: "Request", timestamp: float) -> None:
        super()._preempt_request(request, timestamp)
        preemption = steps.of(self).preemption
        if preemption.on and request.num_output_placeholders:
            preemption.preempted.append(request)


def _all_ours(scheduler: StepsInFlight) -> bool:
    kind = type(scheduler)
    names = ("schedule", "update_from_output", "reset_prefix_cache", "_preempt_request")
    if all(getattr(kind, name) is getattr(StepsInFlight, name) for name in names):
        return True
    subclasses.leave_scheduler(kind, registry.PREEMPTION, _WORK)
    return False
