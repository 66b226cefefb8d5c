"""The fix stop-tokens: ids outside the vocabulary neither end the engine nor mask a token.

The pinned class has these faults, which are asserted as well: with the fix off ours has them.
"""

from typing import Any

import pytest
import torch
from readiness.test_row_state import VOCABULARY, of_side, own_processors, plain

FIX = "stop-tokens"
HUGE = 1 << 40
STOP = 3


def masked(side: str, stop_token_ids: list[int], drafts: bool) -> Any:
    """Return the tokens that min_tokens masks, or the error that sampling ends with."""
    batch = of_side(side)(logitsprocs=own_processors())
    request = plain("a", min_tokens=4, stop_token_ids=stop_token_ids)
    batch.add_request(request)
    logits = torch.zeros(1 + drafts, VOCABULARY)
    try:
        batch.refresh_metadata()
        for processor in batch.logitsprocs.non_argmax_invariant:
            if not drafts:
                processor.apply(logits)
            elif hasattr(processor, "apply_with_spec_decode"):
                processor.apply_with_spec_decode(logits, [2])
    except (IndexError, RuntimeError) as error:
        return type(error)
    assert request.sampling_params.stop_token_ids == stop_token_ids
    rows = [set(row.isneginf().nonzero().flatten().tolist()) for row in logits]
    assert rows == rows[:1] * len(rows)
    return rows[0]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("ids", "stock", "fixed"),
    [
        ([VOCABULARY], IndexError, set()),
        ([STOP, VOCABULARY], IndexError, {STOP}),
        ([STOP, -1], {STOP, VOCABULARY - 1}, {STOP}),
        ([STOP, -VOCABULARY - 1], IndexError, {STOP}),
        ([STOP, 0, VOCABULARY - 1], {STOP, 0, VOCABULARY - 1}, {STOP, 0, VOCABULARY - 1}),
    ],
)
def test_ids_outside_the_vocabulary_mask_nothing(
    side: str, ids: list[int], stock: Any, fixed: set[int], drafts: bool
) -> None:
    assert masked(side, ids, drafts) == (fixed if side == "ours" else stock)


def test_an_id_that_is_no_32_bit_integer_masks_nothing(side: str) -> None:
    masks = masked(side, [HUGE], drafts=False)
    assert masks == set() if side == "ours" else masks is RuntimeError
