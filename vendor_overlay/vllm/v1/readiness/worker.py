"""The door of V1's worker: what the patched files of its runner and its batch call.

``of(batch)`` is the batch's :class:`LiveBatch`, which has the step. The modules keep no state.
"""

# mirrors: nothing

from typing import TYPE_CHECKING, Any

from vllm.v1.readiness.engine import subclasses
from vllm.v1.readiness.frontend import cached_prompt_logprobs
from vllm.v1.readiness.inputs import (
    draft_lengths,
    drafter_ranks,
    empty_states,
    prompt_embeds,
    restarts,
    rope_positions,
    undrafted_rows,
    uniform_decode,
)
from vllm.v1.readiness.inputs.pinned_inputs import keep as keep_inputs
from vllm.v1.readiness.live import LiveBatch
from vllm.v1.readiness.outputs.model_outputs import Outputs, wait
from vllm.v1.readiness.sample import allowed_tokens, prompt_chunks, prompt_logits
from vllm.v1.readiness.watch.startup import start

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import InputBatch

__all__ = [
    "Outputs",
    "allowed_tokens",
    "attach",
    "cached_prompt_logprobs",
    "detached_state",
    "draft_lengths",
    "drafter_ranks",
    "empty_states",
    "keep_inputs",
    "of",
    "prompt_chunks",
    "prompt_embeds",
    "prompt_logits",
    "restarts",
    "rope_positions",
    "start",
    "undrafted_rows",
    "uniform_decode",
    "wait",
]


def attach(batch: "InputBatch", num_spec_tokens: int) -> None:
    """Attach a live batch to an InputBatch. Called in the InputBatch's constructor."""
    setattr(batch, subclasses.ATTRIBUTE, LiveBatch(batch, num_spec_tokens))


def detached_state(batch: "InputBatch") -> dict[str, Any]:
    """Return an InputBatch's state for ``__getstate__``, with the overlay disabled."""
    state: dict[str, Any] = vars(batch)
    if isinstance(live := state.get(subclasses.ATTRIBUTE), LiveBatch):
        live.settle_older()
        state = {**state, subclasses.ATTRIBUTE: LiveBatch.off()}
    return state


def of(batch: "InputBatch") -> LiveBatch:
    """Return the live batch of an InputBatch; one with everything off if its class skips attach."""
    return subclasses.attached(batch, LiveBatch, lambda: LiveBatch.off(batch))
