"""Fix ``cached-prompt-logprobs``: positions of a prompt that were not computed have no logprobs.

A position from the prefix cache (``skip_reading_prefix_cache: false``) or from a KV connector
has no logits. 0.22.0's runner allocates memory for all positions of a prompt and fills those
that it computes; a client is given the whole: another request's logprobs, or token ids for which
the front end ends. Model Runner V2 gives the computed positions alone, as if they were the
prompt's first, or nothing. (https://github.com/vllm-project/vllm/issues/42019)

Here V1's runner marks each position, and what it computes replaces the mark. The front end gives
None for a position without logprobs, as upstream does for the first: null in JSON, and no entry
in FlatLogprobs. A front end without the fix shows a logprob of minus infinity.
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
from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.logprobs import PromptLogprobs
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.engine.output_processor import RequestState

#: The rank of a position without logprobs. Ranks begin with 1; a target of NaN has 0.
_NO_RANK = -1


class CachedPromptLogprobs(Feature):
    """The runner's part of the fix."""

    def mark_prompt(self, room: LogprobsTensors) -> None:
        """Mark all positions of a prompt as not computed."""
        room.logprob_token_ids.zero_()
        room.logprobs.fill_(-float("inf"))
        room.selected_token_ranks.fill_(_NO_RANK)


def place(state: "RequestState", output: "EngineCoreOutput") -> None:
    """Give a request None for each position of its prompt without logprobs.

    Args:
        state: the request's, before it takes the output.
        output: keeps the logprobs of a prompt for upstream if no position is without them.
    """
    processor, prompt = state.logprobs_processor, state.prompt_token_ids
    if processor is None or processor.num_prompt_logprobs is None or prompt is None:
        return
    if registry.CACHED_PROMPT_LOGPROBS not in switch.enabled():
        return
    tensors = output.new_prompt_logprobs_tensors
    if tensors is None:
        # With the first token come the logprobs of the prompt, if any position has some.
        first = state.is_prefilling and output.new_token_ids
        if first and len(_container(processor)) == 1:
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
        for there, run in groupby(computed):
            end = start + len([*run])
            if there:
                part = (tensor[start:end] for tensor in tensors[:3])
                processor._update_prompt_logprobs(LogprobsTensors(*part))
            else:
                _skip(processor, end - start)
            start = end


@contextmanager
def _context(processor: "LogprobsProcessor", prompt: list[int]) -> Iterator[None]:
    """Decode parts of characters by the prompt's tokens, also where these have no logprobs.

    As upstream does, by up to four tokens, and never by the prompt's first.
    """
    name = "_get_sampled_context_ids"
    vars(processor)[name] = lambda shown, most=4: prompt[max(1, len(shown) - most) : len(shown)]
    try:
        yield
    finally:
        del vars(processor)[name]


def _skip(processor: "LogprobsProcessor", positions: int) -> None:
    """Append positions without logprobs."""
    container = _container(processor)
    for _ in range(positions):
        container.append(None)


def _container(processor: "LogprobsProcessor") -> "PromptLogprobs":
    """Return the logprobs of a prompt that asks for them; at first its first position's, None."""
    container = processor.prompt_logprobs
    assert container is not None
    return container
