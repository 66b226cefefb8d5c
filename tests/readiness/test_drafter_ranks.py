"""The fix drafter-ranks: each data-parallel rank takes part when others draft.

Two ranks are two runners in threads, and each of the drafter's collectives is a barrier. Real
are ``sample_tokens``, which decides whether to draft, and the drafter's ``dummy_run``.
"""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import modules
from support.batches import empty
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.readiness.engine import switch
from vllm.v1.spec_decode.eagle import EagleProposer

DRAFTS = 3
LENGTH = 100


class DraftedError(Exception):
    """The step has come past its drafts."""


def rank(load: Any, barrier: threading.Barrier, length: int, padded: bool, ranks: int = 2) -> Any:
    """A runner whose longest request has so many tokens."""
    module = load(modules.RUNNER)
    runner = object.__new__(module.GPUModelRunner)
    metadata = SimpleNamespace(max_seq_len=length)
    scheduled = SimpleNamespace(total_num_scheduled_tokens=1)
    state = (scheduled, None, None, metadata, *[None] * 6)
    sampled = SimpleNamespace(sampled_token_ids=torch.zeros(1, 1))

    def past_drafts(*_: Any) -> None:
        raise DraftedError

    def propose(*_: Any) -> torch.Tensor:
        return collectives(barrier)

    vars(runner).update(
        execute_model_state=state,
        _sample=lambda *_: sampled,
        _update_states_after_model_execute=lambda *_: None,
        use_async_scheduling=False,
        input_batch=empty(load, 16, max_num_reqs=2, length=8),
        discard_request_mask=SimpleNamespace(gpu=None),
        num_spec_tokens=DRAFTS,
        effective_drafter_max_model_len=LENGTH,
        valid_sampled_token_count_event=None,
        device=torch.device("cpu"),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        speculative_config=SimpleNamespace(
            use_eagle=lambda: True,
            uses_draft_model=lambda: False,
            uses_extract_hidden_states=lambda: False,
            use_ngram_gpu=lambda: False,
            disable_padded_drafter_batch=not padded,
        ),
        drafter=drafter(barrier),
        propose_draft_token_ids=propose,
        _copy_draft_token_ids_to_cpu=lambda *_, **__: None,
        _bookkeeping_sync=lambda *_: (None,) * 7,
        finalize_kv_connector=past_drafts,
    )
    return runner


def collectives(barrier: threading.Barrier) -> torch.Tensor:
    """The collectives of proposing drafts: two agreements, and a forward pass a draft."""
    for _ in range(2 + DRAFTS):
        barrier.wait()
    return torch.zeros(1, DRAFTS)


def drafter(barrier: threading.Barrier) -> Any:
    """A drafter whose agreements with other ranks, and forward passes, are collectives."""

    def agree(count: int, use_cudagraphs: bool = True) -> Any:
        assert use_cudagraphs
        barrier.wait()
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
        model=lambda **_: barrier.wait(),
    )
    return proposer


def step(runner: Any) -> str:
    """Run a step as far as its drafts."""
    try:
        runner.sample_tokens(None)
    except DraftedError:
        return "drafted"
    except threading.BrokenBarrierError:
        return "waits for ever"
    raise AssertionError


def outcomes(
    load: Any, value: str, *lengths: int, padded: bool, patience: float = 10.0
) -> list[str]:
    """Run two ranks whose longest requests have these ``lengths``, and return their outcomes.

    A rank that waits longer than ``patience`` seconds is taken to wait forever.
    """
    barrier = threading.Barrier(2, timeout=patience)
    with (
        mock.patch.dict(os.environ, {switch.NAME: value}),
        mock.patch(
            "vllm.v1.spec_decode.llm_base_proposer.set_forward_context",
            lambda *_, **__: contextlib.nullcontext(),
        ),
        ThreadPoolExecutor() as pool,
    ):
        runners = [rank(load, barrier, length, padded) for length in lengths]
        return list(pool.map(step, runners))


FITS, TOO_LONG = LENGTH - DRAFTS, LENGTH - DRAFTS + 1


@pytest.mark.parametrize("padded", [True, False])
def test_no_rank_waits_for_one_that_does_not_draft(padded: bool) -> None:
    lengths, short = (FITS, TOO_LONG), 0.3
    stock = outcomes(modules.pristine, "", *lengths, padded=padded, patience=short)
    off = outcomes(modules.overlaid, "-drafter-ranks", *lengths, padded=padded, patience=short)
    assert stock == off == ["waits for ever", "drafted"]
    ours = outcomes(modules.overlaid, "", *lengths, padded=padded)
    assert ours == ["drafted", "drafted"]


@pytest.mark.parametrize("lengths", [(FITS, FITS), (TOO_LONG, TOO_LONG)])
def test_ranks_that_agree_go_on(lengths: tuple[int, int]) -> None:
    assert outcomes(modules.overlaid, "", *lengths, padded=True) == ["drafted", "drafted"]


def test_a_single_rank_runs_no_drafter_that_it_does_not_need() -> None:
    barrier = threading.Barrier(2, timeout=0.1)
    runner = rank(modules.overlaid, barrier, TOO_LONG, padded=True, ranks=1)
    assert step(runner) == "drafted"
