"""The fix empty-states: a prompt of one token does not go on from another request's state.

The pinned runner has the fault, which is asserted as well: with the fix off ours has it.
"""

from typing import Any

import pytest
from support import modules
from support.hybrid_step import BLOCKS, Row, Step
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend

FIX = "empty-states"
#: A decode, a prompt of one token, a first chunk of one, the last token of a prompt.
ROWS = [Row(3, 5), Row(1, 0), Row(4, 0), Row(3, 2)]
#: Blocks of the requests that have no state yet.
NEW = [2, 3]


def states_of(step: Step) -> list[list[bool]]:
    """By state, whether each block still holds the ones of the request before."""
    assert all(set(state.flatten().tolist()) <= {0.0, 1.0} for state in step.states)
    return [state.all(1).tolist() for state in step.states]


@pytest.mark.parametrize("backend", [GDNAttentionBackend, LinearAttentionBackend])
def test_a_request_that_begins_with_one_token_finds_an_empty_state(side: str, backend: Any) -> None:
    step = Step(modules.of_side(side), ROWS, backend=backend)
    emptied = NEW if side == "ours" else []
    assert states_of(step) == [[block not in emptied for block in range(BLOCKS)]] * 2


@pytest.mark.parametrize(
    ("rows", "backend"),
    [
        (ROWS, Mamba2AttentionBackend),  # its metadata knows such prompts
        ([Row(3, 5), Row(3, 0, 3), Row(3, 2)], GDNAttentionBackend),
    ],
)
def test_other_states_stay(rows: list[Row], backend: Any) -> None:
    step = Step(modules.overlaid, rows, backend=backend)
    assert states_of(step) == [[True] * BLOCKS] * 2
