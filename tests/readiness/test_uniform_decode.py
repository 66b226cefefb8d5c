"""The fix uniform-decode: no prompt of a hybrid model takes the CUDA graph of decodes.

The pinned runner has the fault, which is asserted as well: with the fix off ours has it.
"""

import pytest
from support import modules
from support.hybrid_step import ATTENTION, Row, Step
from vllm.config import CUDAGraphMode

FIX = "uniform-decode"
FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE

#: Prompts, or parts of them, that have the shape of decodes, and the most drafts of a request.
PREFILLS = {
    "a prompt of one token": ([Row(3, 5), Row(1, 0)], 0),
    "a first chunk of one token": ([Row(3, 5), Row(4, 0)], 0),
    "nothing but prompts of one token": ([Row(1, 0), Row(1, 0)], 0),
    "a prompt as long as a decode": ([Row(3, 5, 4, 3), Row(4, 0, 4)], 3),
    "a chunk as long as a decode": ([Row(3, 5, 4, 3), Row(9, 5, 4)], 3),
    "nothing but such prompts": ([Row(4, 0, 4), Row(4, 0, 4)], 3),
    "tokens of a preempted request": ([Row(3, 5, 4, 3), Row(3, 5, 4)], 3),
}
#: Steps that stock computes as it should, and their modes.
OTHERS = {
    "decodes": ([Row(3, 5), Row(3, 3)], 0, FULL),
    "the last token of a prompt": ([Row(3, 5), Row(3, 2)], 0, FULL),
    "decodes with drafts": ([Row(3, 5, 4, 3), Row(3, 3, 4, 3)], 3, FULL),
    "a prompt and a decode": ([Row(3, 5), Row(3, 0, 3)], 0, NONE),
    "decodes, one without drafts": ([Row(3, 5, 4, 3), Row(3, 5)], 3, NONE),
}


@pytest.mark.parametrize("name", PREFILLS)
def test_a_prompt_is_not_computed_as_a_decode(side: str, name: str) -> None:
    step = Step(modules.of_side(side), *PREFILLS[name])
    assert step.mode == (NONE if side == "ours" else FULL)


@pytest.mark.parametrize("name", OTHERS)
def test_other_steps_keep_their_graphs(side: str, name: str) -> None:
    rows, drafts, mode = OTHERS[name]
    assert Step(modules.of_side(side), rows, drafts).mode == mode


@pytest.mark.parametrize("name", PREFILLS)
def test_a_model_without_recurrent_layers_keeps_its_graphs(name: str) -> None:
    """For attention a short part of a prompt is computed as a decode is."""
    assert Step(modules.overlaid, *PREFILLS[name], spec=ATTENTION).mode == FULL
