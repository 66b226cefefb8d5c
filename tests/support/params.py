"""Requests without a tokenizer."""

from typing import Any


def sampling_params(bad_words: list[list[int]] | None = None, **fields: Any) -> Any:
    """Make a request's SamplingParams.

    Args:
        bad_words: as token ids; a tokenizer would make them from text.
        fields: of SamplingParams.
    """
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "detokenize": False, **fields})
    params._bad_words_token_ids = bad_words
    return params
