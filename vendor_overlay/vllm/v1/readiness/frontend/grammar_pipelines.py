"""Fix ``closed-grammars``, pipelines: a bitmask is filled after all earlier tokens have arrived.

Under async scheduling, the engine core schedules a step while tokens of earlier steps are in
flight. If a request with a grammar has any, 0.22.0 waits for the oldest step before it fills the
new step's bitmasks. With three or more pipeline stages a younger step may hold another token of the
request. The bitmask then lacks a token, so the sampled one breaks the grammar, and the request ends
with an error. Here no step is scheduled while a step other than the oldest holds a request with a
grammar. Batches without grammars keep all stages busy. An iteration that only receives a step
counts as one without a model step: the core's loop sleeps for 1 ms, and a data-parallel rank runs a
dummy batch.
(https://github.com/vllm-project/vllm/issues/45014)
"""

# mirrors: vllm.v1.engine.core:EngineCore.step_with_batch_queue

from itertools import islice
from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


def drains(core: "EngineCore") -> bool:
    """Return whether the engine core must receive its oldest step before it schedules another."""
    queue = core.batch_queue
    if queue is None or len(queue) < 2 or not core.async_scheduling:
        return False
    younger = islice(queue, len(queue) - 1)
    if not any(step.has_structured_output_requests for _, step, _ in younger):
        return False
    return registry.CLOSED_GRAMMARS in switch.enabled()
