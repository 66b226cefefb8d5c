"""State that the worker keeps of a request: the attribute ``readiness`` of a CachedRequestState."""

# mirrors: nothing

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.readiness.engine import subclasses

if TYPE_CHECKING:
    import torch
    from vllm.v1.readiness.sample.slots import Slot
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


@dataclass(slots=True)
class WorkerRecord:
    """State of one request."""

    #: Slots of a request that left the batch, by feature.
    kept: "dict[str, Slot]" = field(default_factory=dict)
    #: Number of tokens, and the generator's state, when the request joined the batch.
    joined: "tuple[int, torch.Tensor] | None" = None


def of(request: "CachedRequestState") -> WorkerRecord:
    """Return the record of a request, made on first use."""
    return subclasses.remembered(request, WorkerRecord)
