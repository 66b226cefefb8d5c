"""The fix draft-lengths: whose drafts a request near max_model_len stops.

Real are ``sample_tokens``, the input batch and vLLM's n-gram drafter.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill
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


class DraftedError(Exception):
    """The step has come past its drafts."""


def drafts(side: str, length: int, method: str = "ngram") -> list[list[int]]:
    """Run a step as far as its drafts, and return the drafts of both requests.

    Args:
        side: one of :data:`modules.SIDES`.
        length: tokens of the first request, with the one that the step has sampled.
        method: of the speculative config.
    """
    load = modules.of_side(side)
    batch = empty(load, 16, max_num_reqs=2, length=LENGTH)
    fill(batch, [Spec(REPEATED[:each], [], {}) for each in (length, SHORT)])
    config = SimpleNamespace(
        method=method,
        prompt_lookup_min=2,
        prompt_lookup_max=2,
        num_speculative_tokens=DRAFTS,
        use_eagle=lambda: False,
        uses_draft_model=lambda: False,
        uses_extract_hidden_states=lambda: False,
        use_ngram_gpu=lambda: method == "ngram_gpu",
        disable_padded_drafter_batch=True,
    )
    drafter = NgramProposer(
        SimpleNamespace(
            speculative_config=config,
            model_config=SimpleNamespace(max_model_len=LENGTH),
            scheduler_config=SimpleNamespace(max_num_seqs=2),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )
    runner = object.__new__(load(modules.RUNNER).GPUModelRunner)
    vars(runner).update(
        execute_model_state=(
            SimpleNamespace(total_num_scheduled_tokens=2),
            *(None, None, SimpleNamespace(max_seq_len=length - 1), *[None] * 6),
        ),
        _sample=lambda *_: SimpleNamespace(sampled_token_ids=torch.zeros(2, 1)),
        _update_states_after_model_execute=lambda *_: None,
        use_async_scheduling=False,
        input_batch=batch,
        discard_request_mask=SimpleNamespace(gpu=None),
        num_spec_tokens=DRAFTS,
        effective_drafter_max_model_len=LENGTH,
        device=torch.device("cpu"),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        speculative_config=config,
        drafter=drafter,
        _copy_draft_token_ids_to_cpu=lambda *_, **__: None,
        _bookkeeping_sync=lambda *_: (None, None, [[7], [7]], *[None] * 4),
        finalize_kv_connector=mock.Mock(side_effect=DraftedError),
    )
    with pytest.raises(DraftedError):
        runner.sample_tokens(None)
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
