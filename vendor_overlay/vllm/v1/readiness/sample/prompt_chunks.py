"""Fix ``prompt-chunks``: bound the memory that prompt logprobs take on the device.

For ``prompt_logprobs``, 0.22.0 computes the logits and then the float32 logprobs of all positions
of a prefill chunk. With 8,192 positions and 152,000 tokens, that is 2.3 GiB in bfloat16 and another
4.6 GiB. vLLM's memory profiling does not run this, and the engine dies of it
(https://github.com/vllm-project/vllm/issues/52054).

Here logprobs are computed for some positions at a time, and copied to the host. Each of these ops
treats every position alone, so the values keep their bits. Chunks have a multiple of 8 positions,
so that their rows are aligned in memory as in the whole, whatever the vocabulary. The logits are
still computed at once, because the bits of a matrix product depend on its number of rows.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.sample import prompt_logits

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Most float32 values of a chunk: 256 MiB of logprobs.
_VALUES = 1 << 26
#: Positions by whose multiples a chunk begins: the largest vector load has 8 values.
_ALIGNED = 8
#: Vocabulary below which upstream serves. On CUDA, torch.topk selects its algorithm, and with it
#: the order of ties, by the number of rows for fewer columns than 20,000.
_LEAST_VOCABULARY = 20_000


def fill(
    runner: "GPUModelRunner",
    request: "CachedRequestState",
    hidden: "torch.Tensor",
    prompt: "torch.Tensor",
) -> bool:
    """Compute a prefill chunk's prompt logprobs into the request's room.

    Args:
        runner: of the model.
        request: whose prompt it is.
        hidden: [positions, hidden size], of the positions from ``num_computed_tokens`` on.
        prompt: [prompt length], token ids on the device.

    Returns:
        False to fall back to upstream: with the fix off, if one chunk holds all positions, or for a
        small vocabulary.
    """
    if registry.PROMPT_CHUNKS not in switch.enabled():
        return False
    count, vocabulary = len(hidden), runner.input_batch.vocab_size
    rows = max(_ALIGNED, _VALUES // vocabulary // _ALIGNED * _ALIGNED)
    room = request.in_progress_prompt_logprobs_cpu
    if count <= rows or vocabulary < _LEAST_VOCABULARY or room is None:
        return False
    logits = runner.model.compute_logits(hidden)
    start = request.num_computed_tokens
    targets = prompt[start + 1 : start + 1 + count]
    width = room.logprobs.shape[1] - 1
    for first in range(0, count, rows):
        last = min(first + rows, count)
        part = logits[first:last]
        scores = prompt_logits.scores(runner.sampler, part)
        if scores is None:
            scores = runner.sampler.compute_logprobs(part)
        found = runner.sampler.gather_logprobs(scores, width, targets[first:last])
        places = slice(start + first, start + last)
        room.logprob_token_ids[places].copy_(found.logprob_token_ids, non_blocking=True)
        room.logprobs[places].copy_(found.logprobs, non_blocking=True)
        room.selected_token_ranks[places].copy_(found.selected_token_ranks, non_blocking=True)
    return True
