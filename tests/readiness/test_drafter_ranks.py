"""The fix drafter-ranks: each data-parallel rank takes part when others draft.

Ranks go on if they make the same collectives. Real are ``sample_tokens``, which decides whether
to draft, and the drafter's ``dummy_run``. The pinned runner has the fault, which is asserted as
well: with the fix off ours has it.
"""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import modules
from support.batches import empty
from support.drafted_steps import draft
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.eagle import EagleProposer

FIX = "drafter-ranks"
DRAFTS = 3
LENGTH = 100
FITS, TOO_LONG = LENGTH - DRAFTS, LENGTH - DRAFTS + 1
#: The collectives of proposing drafts: two agreements with other ranks, and a forward pass a draft.
PROPOSAL = ["agreement", "pass", "agreement", "pass", "pass"]


def collectives(side: str, length: int, padded: bool = True, ranks: int = 2) -> list[str]:
    """Run a step as far as its drafts, and return the collectives of its drafter.

    Args:
        side: one of :data:`modules.SIDES`.
        length: of the rank's longest request.
        padded: whether the drafter's batch is.
        ranks: number of data-parallel ranks.
    """
    batch = empty(modules.of_side(side), 16, max_num_reqs=2, length=8)
    made: list[str] = []

    def propose(*_: Any) -> torch.Tensor:
        made.extend(PROPOSAL)
        return torch.zeros(1, DRAFTS)

    context = "vllm.v1.spec_decode.llm_base_proposer.set_forward_context"
    with mock.patch(context, lambda *_, **__: contextlib.nullcontext()):
        draft(
            side,
            batch,
            length,
            drafts=DRAFTS,
            limit=LENGTH,
            method="eagle",
            padded=padded,
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
            drafter=drafter(made),
            propose_draft_token_ids=propose,
        )
    return made


def drafter(made: list[str]) -> Any:
    """A drafter that notes its agreements with other ranks, and its forward passes."""

    def agree(count: int, use_cudagraphs: bool = True) -> Any:
        assert use_cudagraphs
        made.append("agreement")
        return CUDAGraphMode.NONE, count, None

    proposer = object.__new__(EagleProposer)
    vars(proposer).update(
        num_speculative_tokens=DRAFTS,
        parallel_drafting=False,
        supports_mm_inputs=False,
        pass_hidden_states_to_model=False,
        vllm_config=None,
        input_ids=torch.zeros(4, dtype=torch.int64),
        _draft_attn_layer_names=set(),
        _get_positions=torch.zeros,
        _determine_batch_execution_and_padding=agree,
        model=lambda **_: made.append("pass"),
    )
    return proposer


@pytest.mark.parametrize("padded", [True, False])
def test_a_rank_that_does_not_draft_makes_the_collectives_of_one_that_does(
    side: str, padded: bool
) -> None:
    assert collectives(side, FITS, padded) == PROPOSAL
    assert collectives(side, TOO_LONG, padded) == (PROPOSAL if side == "ours" else [])


def test_a_single_rank_runs_no_drafter_that_it_does_not_need() -> None:
    assert collectives("ours", TOO_LONG, ranks=1) == []
