"""Comparisons after each step of a lockstep run, all with equality."""

from typing import TYPE_CHECKING

import torch

from support.lockstep.copies import POISON

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from support.lockstep.run import LockstepRun
    from support.lockstep.runner import RunnerUnderTest


def same_step(one: "RunnerUnderTest", other: "RunnerUnderTest") -> None:
    """Require the same logits and logprobs to the bit, and the same lists for processors."""
    assert len(one.logits) == len(other.logits)
    for mine, theirs in zip(one.logits, other.logits, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
    mine, theirs = (runner.sampled.logprobs_tensors for runner in (one, other))
    assert (mine is None) == (theirs is None)
    for part, like in zip((mine or ())[:3], (theirs or ())[:3], strict=True):
        assert torch.equal(part.view(torch.int32), like.view(torch.int32))
    if one.spy is not None and other.spy is not None:
        assert one.spy.seen == other.spy.seen


def compare_histories(run: "LockstepRun") -> None:
    """Require our history to be a prefix of the scheduler's, in lists and token_ids_cpu."""
    batch = run.ours.batch
    for row, known, tail in run.outputs():
        assert -1 not in known
        assert POISON not in known
        req_id = batch.req_ids[row]
        truth = run.truth(req_id)
        faithful = run.faithful and req_id not in run.strays
        assert not faithful or known == truth[: len(known)], (req_id, known, truth)
        assert tail <= len(batch.readiness.history.in_flight) * (1 + run.drafts)
        # Where the runner trims drafts, a placeholder may overwrite the rest after a cut.
        assert (run.trimmed and req_id in run.strays) or run.held(row, len(known)) == known
        start = batch.num_prompt_tokens[row]
        # Where the runner trims drafts, upstream may mark a place too early.
        written = len(known) + bool(tail and not run.trimmed)
        assert batch.is_token_ids[row, start : start + written].all()


def compare_twins(run: "LockstepRun") -> None:
    """Require that consumers see the same whether copies arrive early or late."""
    for twin in run.twins:
        same_step(run.ours, twin)
        mine, theirs = run.ours.batch, twin.batch
        if run.drafts:
            continue  # no consumer is given the lists, and a cut may settle them early
        assert mine.req_output_token_ids == theirs.req_output_token_ids
        ends = mine.num_tokens_no_spec[: mine.num_reqs]
        assert (ends == theirs.num_tokens_no_spec[: mine.num_reqs]).all()
        for row, end in enumerate(ends):
            assert (mine.token_ids_cpu[row, :end] == theirs.token_ids_cpu[row, :end]).all()


def prompt_is_lost(stock: "RunnerUnderTest", ours: "RunnerUnderTest") -> bool:
    """Return whether stock holds placeholders in place of a prompt's tokens, and ours does not.

    Where a runner trims drafts, stock corrects an output's length once as the scheduler says and
    once more by the rejected drafts. If the output was cut, it then ends within the prompt.
    """

    def lost(runner: "RunnerUnderTest", req_id: str) -> bool:
        row = runner.batch.req_id_to_index.get(req_id)
        if row is None:
            return False
        return -1 in runner.batch.token_ids_cpu[row, : runner.batch.num_prompt_tokens[row]]

    return any(lost(stock, r) and not lost(ours, r) for r in stock.batch.req_ids)


def embeds_placeholder(stock: "RunnerUnderTest", scheduled: "SchedulerOutput") -> bool:
    """Return whether a step of stock's computes from a token that it does not have.

    A request's newest token may be a placeholder: it is on the device. Stock may count a request's
    computed tokens below zero, as it subtracts rejected drafts after a cut. Of a session that was
    continued with tokens in flight, the scheduler counts tokens that stock's row lacks.
    """
    batch, drafts = stock.batch, scheduled.scheduled_spec_decode_tokens
    for row, req_id in enumerate(batch.req_ids):
        first = max(0, batch.num_computed_tokens_cpu[row])
        count = scheduled.num_scheduled_tokens[req_id] - len(drafts.get(req_id, ()))
        newest = first + count - 1
        if newest >= batch.num_tokens_no_spec[row] or -1 in batch.token_ids_cpu[row, first:newest]:
            return True
    return False
