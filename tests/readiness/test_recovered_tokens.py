"""The fix recovered-tokens: upstream's kernel, under Triton's interpreter."""

import os
import subprocess
import sys

import pytest
from support import recovered
from support.sites import REPO
from vllm.v1.readiness.engine import switch

#: In one tile of the kernel, which is 8192 entries, in one exactly, and in two.
PADDED, WHOLE = (41, 8200), (8192,)


@pytest.fixture(scope="module")
def tokens() -> dict[str, dict[int, list[int]]]:
    return recovered.tokens_of(True, (*PADDED, *WHOLE), "cpu")


@pytest.mark.parametrize("size", PADDED)
def test_a_token_that_replaces_a_draft_is_in_the_vocabulary(
    tokens: dict[str, dict[int, list[int]]], size: int
) -> None:
    pinned, off, ours = (tokens[side][size] for side in recovered.SIDES)
    assert pinned == off
    assert pinned[1] >= size
    assert ours == [pinned[0], 0, pinned[2]]


@pytest.mark.parametrize("size", WHOLE)
def test_a_token_that_was_in_the_vocabulary_stays(
    tokens: dict[str, dict[int, list[int]]], size: int
) -> None:
    pinned, off, ours = (tokens[side][size] for side in recovered.SIDES)
    assert pinned == off == ours
    assert max(pinned) < size


def test_a_misspelt_switch_is_left_to_startup() -> None:
    """The kernel's module is imported before the model runner checks the variables."""
    program = "import vllm.v1 as v1, sys; v1.__path__.append(sys.argv[1]); "
    program += "import vllm.v1.readiness.sample.recovered_tokens"
    folder = str(REPO / "vendor_overlay" / "vllm" / "v1")
    subprocess.run(
        [sys.executable, "-c", program, folder],
        env={**os.environ, switch.NAME: "of"},
        check=True,
    )
