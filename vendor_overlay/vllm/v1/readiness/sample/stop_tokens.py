"""Fix ``stop-tokens``: ``min_tokens`` ignores stop tokens outside the vocabulary.

0.22.0 does not check ``stop_token_ids`` against the vocabulary. Until a request reaches its
``min_tokens``, its stop tokens are masked by index: an id that is too large fails the engine, and a
negative id masks a token counted from the end of the vocabulary. An id outside the vocabulary is
never sampled and needs no mask.
"""

# mirrors: vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor
# mirrors: vllm.sampling_params:SamplingParams.all_stop_token_ids

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


def drop_foreign(request: "CachedRequestState", size: int) -> None:
    """Drop ids outside the vocabulary; the list that the scheduler reads is unchanged."""
    params = request.sampling_params
    if params is None or not params.min_tokens:
        return
    ids = params.all_stop_token_ids
    # Not `token in range(size)`, which is slow for an id that is not a plain int.
    if not all(0 <= token < size for token in ids):
        params._all_stop_token_ids = {token for token in ids if 0 <= token < size}
