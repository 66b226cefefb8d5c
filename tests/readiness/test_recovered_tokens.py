"""The fix recovered-tokens: upstream's kernel, under Triton's interpreter."""

import pytest
from support import recovered

#: In one tile of the kernel, which is 8192 entries, in one exactly, and in two.
PADDED, WHOLE = (41, 8200), (8192,)


@pytest.fixture(scope="module")
def tokens() -> dict[str, dict[int, list[int]]]:
    return recovered.tokens_of(True, (*PADDED, *WHOLE), "cpu")


@pytest.mark.parametrize("size", [*PADDED, *WHOLE])
def test_a_token_that_replaces_a_draft_is_in_the_vocabulary(
    tokens: dict[str, dict[int, list[int]]], size: int
) -> None:
    pinned, off, ours = (tokens[side][size] for side in recovered.SIDES)
    assert pinned == off
    assert (pinned[1] >= size) == (size in PADDED)
    assert ours == [pinned[0], 0 if size in PADDED else pinned[1], pinned[2]]
