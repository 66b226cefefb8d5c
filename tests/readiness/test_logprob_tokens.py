"""The fix logprob-tokens: each request in a batch has the logprobs that it asked for.

The pinned samplers have the faults, which are asserted as well: with the fix off ours have them.
"""

from typing import Any

import pytest
import torch
from support import modules
from support.sampling import MODES, Case, run, under_test

FIX = "logprob-tokens"
VOCABULARY = 11
NAMED: dict[str, Any] = {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": [3, 9]}
#: As the engine's own API allows.
NAMED_ALONE: dict[str, Any] = {"temperature": 0.0, "logprob_token_ids": [3, 9, 4, 0, 7]}
HONEST: dict[str, Any] = {"temperature": 0.0, "logprobs": 4}


def case_of(requests: list[dict[str, Any]], drafts: list[list[int]] | None, mode: str) -> Case:
    """Make a case with logits of which none tie."""
    rows = len(requests) + sum(map(len, drafts or []))
    generator = torch.Generator().manual_seed(rows)
    return Case(requests, torch.randn((rows, VOCABULARY), generator=generator), mode, drafts)


def asked(result: Any, case: Case, row: int) -> list[dict[int, float]]:
    """What a request is shown: of each of its positions, token to logprob."""
    tensors, request = result.logprobs_tensors, case.requests[row]
    wanted = request.get("logprobs") or len(request["logprob_token_ids"])
    positions = 1 + max(map(len, case.drafts)) if case.drafts else 1
    sampled = result.sampled_token_ids[row].tolist()
    shown = []
    for place in range(sum(token >= 0 for token in sampled)):
        at = row * positions + place
        ids = tensors.logprob_token_ids[at, : 1 + wanted].tolist()
        assert ids[0] == sampled[place]
        shown.append(dict(zip(ids, tensors.logprobs[at].tolist(), strict=False)))
    return shown


def alone(case: Case, row: int) -> Case:
    """The case with one of its requests."""
    counts = [1 + len(drafts) for drafts in case.drafts or [[]] * len(case.requests)]
    first = sum(counts[:row])
    drafts = None if case.drafts is None else [case.drafts[row]]
    return Case([case.requests[row]], case.logits[first : first + counts[row]], case.mode, drafts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("named", [NAMED, NAMED_ALONE])
def test_others_keep_their_logprobs(side: str, named: dict[str, Any], mode: str) -> None:
    case = case_of([HONEST, named, HONEST], None, mode)
    result = run(under_test(modules.of_side(side), case)).result
    for row in range(3):
        own = run(under_test(modules.pristine, alone(case, row))).result
        right = asked(result, case, row) == asked(own, alone(case, row), 0)
        assert right == (side == "ours" or row == 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("named", [NAMED, NAMED_ALONE])
def test_drafts_beside_named_tokens_do_not_end_the_engine(
    side: str, named: dict[str, Any], mode: str
) -> None:
    case = case_of([HONEST, named, HONEST, named], [[1, 2], [], [5], [7, 0]], mode)
    case.logits[0, 1] = case.logits[6, 7] = case.logits[7, 0] = 9.0  # drafts that are accepted
    case.logits[1, 9] = case.logits[4, 9] = 9.0  # and others that are not
    ran = run(under_test(modules.of_side(side), case))
    if side != "ours":
        assert ran.error is RuntimeError
        return
    assert ran.error is None
    assert (ran.result.sampled_token_ids >= 0).sum(1).tolist() == [2, 1, 1, 3]
    for row in (0, 2):
        own = run(under_test(modules.pristine, alone(case, row))).result
        assert asked(ran.result, case, row) == asked(own, alone(case, row), 0)
    logits = {1: case.logits[3:4], 3: case.logits[6:9]}
    for row, rows in logits.items():
        values = rows if mode.endswith("logits") else rows.log_softmax(-1)
        for shown, expected in zip(asked(ran.result, case, row), values, strict=True):
            for token in named["logprob_token_ids"]:
                assert shown[token] == pytest.approx(float(expected[token]), rel=1e-5)
