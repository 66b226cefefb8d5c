"""Fix ``cached-prompt-logprobs``: no logprobs for prompt positions that were not computed.

A prompt position from the prefix cache (``skip_reading_prefix_cache: false``) or a KV connector has
no logits. Stock 0.22.0's runner allocates tensors for all positions of a prompt, fills in only the
computed positions, and returns all: some logprobs are stale, or token ids kill the front end. Model
Runner V2 returns only the computed positions, as if the prompt began with them, or nothing.
(https://github.com/vllm-project/vllm/issues/42019)

Here V1's runner marks all positions as not computed when it allocates the tensors. The front end
returns None for a position without logprobs, as upstream does for the first position: null in JSON,
no entry in FlatLogprobs. Without the fix, a front end returns minus infinity for a marked position.
"""

# mirrors: vllm.v1.engine.output_processor:OutputProcessor.process_outputs
# mirrors: vllm.v1.engine.logprobs:LogprobsProcessor._update_prompt_logprobs
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict
# mirrors: vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker.compute_prompt_logprobs

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from vllm.v1.outputs import LogprobsTensors
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import RequestState

#: Rank of a position without logprobs: more than any vocabulary has. The Rust front end ends at
#: ranks below 1.
_NO_RANK = 1 << 30


def mark_prompt(room: LogprobsTensors) -> None:
    """Mark all positions of a prompt as not computed, before its prefill."""
    if registry.CACHED_PROMPT_LOGPROBS in switch.enabled():
        room.logprob_token_ids.zero_()
        room.logprobs.fill_(-float("inf"))
        room.selected_token_ranks.fill_(_NO_RANK)


def place(state: "RequestState", output: "EngineCoreOutput") -> None:
    """Append prompt logprobs with None where missing, before upstream processes the output."""
    processor, prompt = state.logprobs_processor, state.prompt_token_ids
    if processor is None or processor.num_prompt_logprobs is None or prompt is None:
        return
    if registry.CACHED_PROMPT_LOGPROBS not in switch.enabled():
        return
    tensors = output.new_prompt_logprobs_tensors
    if tensors is None:
        # Any prompt logprobs would arrive no later than the first output token.
        first = state.is_prefilling and output.new_token_ids
        if first and len(processor.prompt_logprobs) == 1:  # its first entry is always None
            _skip(processor, len(prompt) - 1)
        return
    computed = [rank != _NO_RANK for rank in tensors.selected_token_ranks.tolist()]
    before = len(prompt) - 1 - len(computed)
    if before <= 0 and all(computed):
        return
    output.new_prompt_logprobs_tensors = None
    _skip(processor, before)
    with _context(processor, prompt):
        start = 0
        for present, run in groupby(computed):
            end = start + len([*run])
            if present:
                part = (tensor[start:end] for tensor in tensors[:3])
                processor._update_prompt_logprobs(LogprobsTensors(*part))
            else:
                _skip(processor, end - start)
            start = end


@contextmanager
def _context(processor: "LogprobsProcessor", prompt: list[int]) -> Iterator[None]:
    """Make upstream decode partial characters with preceding tokens of ``prompt``.

    Upstream takes these (up to four) tokens from prompt logprobs, some of which are missing here.
    """
    name = "_get_sampled_context_ids"
    vars(processor)[name] = lambda shown, most=4: prompt[max(1, len(shown) - most) : len(shown)]
    try:
        yield
    finally:
        del vars(processor)[name]


def _skip(processor: "LogprobsProcessor", positions: int) -> None:
    """Append None for a number of positions without logprobs."""
    container = processor.prompt_logprobs
    for _ in range(positions):
        container.append(None)
