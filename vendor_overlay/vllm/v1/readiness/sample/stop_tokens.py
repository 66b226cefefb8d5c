"""Fix ``stop-tokens``: stop tokens outside the vocabulary do not take part in ``min_tokens``.

0.22.0 does not check ``stop_token_ids`` against the vocabulary. Until a request has its
``min_tokens``, the logits of its stop tokens are masked, by index: an id that is too large ends
the engine for all clients, and a negative one masks a token from the end of the vocabulary,
which nobody named. An id outside the vocabulary is never sampled, so it needs no mask.
"""

# mirrors: vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor
# mirrors: vllm.sampling_params:SamplingParams.all_stop_token_ids

from typing import TYPE_CHECKING

from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState


class StopTokens(Feature):
    """The stop tokens of one batch's requests."""

    def add_request(self, request: "CachedRequestState") -> None:
        """Leave out the ids that are no tokens, before a logits processor reads them.

        The scheduler compares sampled tokens with another list, which stays as it is.
        """
        params = request.sampling_params
        if params is None or not params.min_tokens:
            return
        ids = params.all_stop_token_ids
        size = self.batch.vocab_size
        # Not by `in range`, which walks the range for an id that is no plain int.
        if not all(0 <= token < size for token in ids):
            params._all_stop_token_ids = {token for token in ids if 0 <= token < size}
