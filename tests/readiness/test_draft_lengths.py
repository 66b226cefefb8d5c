"""The fix draft-lengths: whose drafts a request near max_model_len stops.

Real are ``sample_tokens``, the input batch and vLLM's n-gram drafter.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from support import modules
from support.batches import Spec, empty, fill
from support.drafted_steps import draft
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

FIX = "draft-lengths"
DRAFTS = 3
LENGTH = 40
#: Tokens of which each prefix is continued by drafts.
REPEATED = [5, 7] * LENGTH
#: Length of the request beside, which has room for all drafts.
SHORT = 8
#: What stock verifies as drafts in place of none.
NONE = [0] * DRAFTS


def drafts(side: str, length: int, method: str = "ngram") -> list[list[int]]:
    """Run a step as far as its drafts, and return the drafts of both requests.

    Args:
        side: one of :data:`modules.SIDES`.
        length: tokens of the first request, with the one that the step has sampled.
        method: of the speculative config.
    """
    batch = empty(modules.of_side(side), 16, max_num_reqs=2, length=LENGTH)
    fill(batch, [Spec(REPEATED[:each], [], {}) for each in (length, SHORT)])
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 2, "num_speculative_tokens": DRAFTS}
    drafter = NgramProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(**lookup),
            model_config=SimpleNamespace(max_model_len=LENGTH),
            scheduler_config=SimpleNamespace(max_num_seqs=2),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )
    runner = draft(
        side,
        batch,
        length - 1,
        drafts=DRAFTS,
        limit=LENGTH,
        method=method,
        drafter=drafter,
        _bookkeeping_sync=lambda *_: (None, None, [[7], [7]], *[None] * 4),
    )
    proposed: Any = runner._draft_token_ids
    return proposed if isinstance(proposed, list) else proposed.tolist()


@pytest.mark.parametrize("length", range(LENGTH - 4, LENGTH + 1))
def test_each_request_has_the_drafts_that_fit(side: str, length: int) -> None:
    long, short = drafts(side, length)
    if length - 1 + DRAFTS > LENGTH and side != "ours":
        assert long == short == NONE
    else:
        assert long == REPEATED[length:LENGTH][:DRAFTS]
        assert short == REPEATED[SHORT : SHORT + DRAFTS]


def test_other_drafters_are_left_to_upstream() -> None:
    assert drafts("ours", LENGTH, "suffix") == [NONE, NONE]
