"""The fix recovered-tokens on a GPU: upstream's kernel, compiled."""

import pytest
from support import recovered

pytestmark = pytest.mark.gpu

VOCABULARIES = (41, 1009, 8192, 32000, 50257, 128256, 151936)


def test_a_token_that_replaces_a_draft_is_in_the_vocabulary() -> None:
    tokens = recovered.tokens_of(False, VOCABULARIES, "cuda")
    assert tokens["off"] == tokens["pinned"]
    outside = 0
    for size in VOCABULARIES:
        stock, ours = tokens["pinned"][size], tokens["ours"][size]
        assert ours == [token if token < size else 0 for token in stock]
        outside += max(stock) >= size
    assert outside, "stock gave no token outside of the vocabulary"
