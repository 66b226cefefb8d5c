"""Fix ``lora-slots`` in the scheduler: no step has requests of more than ``max_loras`` adapters.

0.22.0 admits a request if the running requests of this step leave room for its adapter. Running
requests that the step leaves out do not count: one whose token is in flight in a pipeline, one
whose drafts in flight may reach max_model_len, or one that awaits encoder budget. If a later step
schedules all of them, an assert kills the engine. Here a running request waits while the running
requests before it use all ``max_loras`` adapters of the step. The oldest one is never left out, and
requests are admitted as before.

A worker forgets the sampled tokens of a request that a step leaves out. Such a request continues
once its tokens in flight have arrived.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.schedule

from typing import TYPE_CHECKING
from weakref import WeakSet

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class LoraLimits:
    """State of the fix for one scheduler."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        #: Running requests that the previous step has left out.
        self._left_out: WeakSet[Request] = WeakSet()

    def crowded(self) -> bool:
        """Return whether a running request may have to wait for room for its adapter."""
        config = self._scheduler.lora_config
        if config is None or registry.LORA_SLOTS not in switch.enabled():
            return False
        return bool(self._left_out) or len(_adapters(self._scheduler.running)) > config.max_loras

    def waits(self, request: "Request", scheduled: "list[Request]") -> bool:
        """Return whether a step leaves out a running request.

        ``scheduled`` are the running requests that the step has so far.
        """
        if request in self._left_out and request.num_output_placeholders:
            return True
        own = _adapters([request])
        if own and len(own | _adapters(scheduled)) > self._scheduler.lora_config.max_loras:
            self._left_out.add(request)
            return True
        self._left_out.discard(request)
        return False


def _adapters(requests: "Iterable[Request]") -> set[int]:
    return {
        request.lora_request.lora_int_id
        for request in requests
        if request.lora_request and request.lora_request.lora_int_id > 0
    }
