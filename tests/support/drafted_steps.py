"""A runner's step from its sampled tokens to its drafts.

Real are ``sample_tokens``, which decides whether to draft, and what a test hands over.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from support import modules


class DraftedError(Exception):
    """The step has come past its drafts."""


def draft(
    side: str,
    batch: Any,
    length: int,
    *,
    drafts: int,
    limit: int,
    method: str,
    padded: bool = False,
    **fields: Any,
) -> Any:
    """Run a step as far as its drafts.

    Args:
        side: one of :data:`modules.SIDES`.
        batch: the input batch.
        length: of the batch's longest request, without the token that the step samples.
        drafts: draft tokens of a request and step.
        limit: ``max_model_len`` of the drafter.
        method: of the speculative config.
        padded: whether the drafter's batch is, if the drafter is a model.
        fields: further attributes of the runner.

    Returns:
        The runner.
    """
    runner = object.__new__(modules.of_side(side)(modules.RUNNER).GPUModelRunner)
    vars(runner).update(
        execute_model_state=(
            SimpleNamespace(total_num_scheduled_tokens=1),
            *(None, None, SimpleNamespace(max_seq_len=length), *[None] * 6),
        ),
        _sample=lambda *_: SimpleNamespace(sampled_token_ids=torch.zeros(1, 1)),
        _update_states_after_model_execute=lambda *_: None,
        use_async_scheduling=False,
        input_batch=batch,
        discard_request_mask=SimpleNamespace(gpu=None),
        num_spec_tokens=drafts,
        effective_drafter_max_model_len=limit,
        valid_sampled_token_count_event=None,
        device=torch.device("cpu"),
        parallel_config=SimpleNamespace(data_parallel_size=1),
        speculative_config=SimpleNamespace(
            method=method,
            use_eagle=lambda: method == "eagle",
            uses_draft_model=lambda: False,
            uses_extract_hidden_states=lambda: False,
            use_ngram_gpu=lambda: False,
            disable_padded_drafter_batch=not padded,
        ),
        _copy_draft_token_ids_to_cpu=lambda *_, **__: None,
        _bookkeeping_sync=lambda *_: (None,) * 7,
        finalize_kv_connector=mock.Mock(side_effect=DraftedError),
    )
    vars(runner).update(fields)
    with pytest.raises(DraftedError):
        runner.sample_tokens(None)
    return runner
