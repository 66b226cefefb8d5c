"""The metadata of Mamba 2's layers on a GPU that is busy: the same tensors, and no wait."""

import pytest
import torch
from gpu.waits import waited
from support import modules
from support.hybrid_step import Row
from support.inputs import differences
from support.mamba2 import DECODE, DRAFTED, DRAFTS, LATER, WHOLE, metadata

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "drafts"),
    [([WHOLE], 0), ([DECODE, WHOLE], 0), ([DECODE, LATER, WHOLE], 0), ([DRAFTED, LATER], DRAFTS)],
)
def test_a_step_with_a_prompt_does_not_wait(rows: list[Row], drafts: int) -> None:
    stock, ours = (
        metadata(load, rows, drafts, place=torch.Tensor.cuda)
        for load in (modules.pristine, modules.overlaid)
    )
    assert differences(vars(stock()), vars(ours())) == []
    assert waited(stock) > 0.03, "the release's builder does not wait: the feature can go"
    assert waited(ours) < 0.01
