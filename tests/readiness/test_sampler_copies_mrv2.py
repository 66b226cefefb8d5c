"""Model Runner V2's sampler under Triton's interpreter, beside upstream's.

A GPU's reductions are tested in tests/gpu.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import mrv2
from support.examples import draws
from support.mrv2 import Case, Sides, add, compare, under_test

VOCABULARY = 1030  # two of the blocks that upstream samples in
B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

NOTHING: dict[str, Any] = {}
#: Parameters of a request that change its logits.
ASKS: list[dict[str, Any]] = [
    {"bad_words_token_ids": [[7], [9, 2, 5]]},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"allowed_token_ids": [0, 5, 11, 1029]},
    {"min_tokens": 8, "stop_token_ids": [3, 8, 12]},
    {"logit_bias": {2: 4.0, 17: -100.0}},
    {"temperature": 0.7},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.1},
]


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    with mrv2.interpreted() as modules:
        yield modules


def logits_of(rows: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Logits with many ties, and infinite ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn((rows, VOCABULARY), generator=generator) * 6).round() / 2
    logits[seed % rows, seed % VOCABULARY] = -torch.inf
    return logits.to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any mix; every second without anything that changes logits."""
    temperatures: list[float] = draw(st.sampled_from([[0.0], [1.0], [0.0, 1.0]]))
    logprobs: list[int | None] = draw(st.sampled_from([[None], [None, 0, 3]]))
    one = draw(st.sampled_from(ASKS))
    asks = draw(st.sampled_from([[], [one], ASKS]))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        request: dict[str, Any] = {"temperature": draw(st.sampled_from(temperatures))}
        request["logprobs"] = draw(st.sampled_from(logprobs))
        if draw(st.integers(0, 5)) == 0:
            request["logprob_token_ids"] = [1, 40]
        requests.append(request | draw(st.sampled_from([NOTHING, *asks])))
    drafts = None
    if draw(st.integers(0, 2)) == 0:
        tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=mrv2.DRAFTS)
        drafts = [draw(tokens) for _ in requests]
        drafts[0] = drafts[0] or [5]
        for request in requests:
            request.pop("logprob_token_ids", None)
    rows = len(requests) + sum(map(len, drafts or ()))
    logits = logits_of(rows, draw(st.sampled_from([B16, F16, F32])), draw(st.integers(0, 10**6)))
    mode = draw(st.sampled_from(["raw_logprobs", "processed_logprobs"]))
    return Case(requests, logits, mode, drafts, fp64=draw(st.integers(0, 4)) == 0)


@given(case=cases())
@draws(8)
def test_samples_have_upstreams_bits(sides: Sides, case: Case) -> None:
    """Tokens, logprobs and ranks."""
    compare(sides, case)


def handling(sides: Sides, case: Case) -> str:
    """Return how our sampler handles the logits of a case."""
    ours = under_test(sides, sides.ours, case)
    batch, logits = ours.batch, ours.logits
    result = ours.sampler.apply_sampling_params(
        logits,
        batch.expanded_idx_mapping,
        batch.idx_mapping_np,
        batch.positions,
        batch.input_ids,
        batch.expanded_local_pos,
    )
    assert result.dtype == F32 or result is logits
    if result is logits:
        return "as it is" if torch.equal(logits, case.logits) else "in place"
    assert torch.equal(logits, case.logits)
    assert result.data_ptr() != logits.data_ptr()
    return "copied"


def a_case(dtype: torch.dtype, *asks: dict[str, Any], drafts: bool = False, **named: Any) -> Case:
    ids = [[1] for _ in asks] if drafts else None
    return Case(asks, logits_of(len(asks) * (1 + drafts), dtype), drafts=ids, **named)


GREEDY, RANDOM = {"temperature": 0.0}, {"temperature": 1.0}
PROCESSED: dict[str, Any] = {"mode": "processed_logprobs"}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (a_case(B16, GREEDY), "as it is"),
        (a_case(F16, GREEDY, RANDOM), "as it is"),
        (a_case(F32, RANDOM), "as it is"),
        (a_case(B16, GREEDY, RANDOM | {"logprobs": 5}), "as it is"),
        (a_case(B16, GREEDY | {"logprobs": 5}, **PROCESSED), "copied"),
        (a_case(B16, GREEDY | {"logprob_token_ids": [4]}, **PROCESSED), "copied"),
        (a_case(F32, GREEDY | {"logprobs": 5}, **PROCESSED), "as it is"),
        (a_case(B16, GREEDY, **PROCESSED), "as it is"),
        *((a_case(B16, RANDOM | ask, GREEDY), "copied") for ask in ASKS),
        *((a_case(F32, RANDOM | ask, GREEDY), "in place") for ask in ASKS),
        (a_case(F32, RANDOM | {"min_p": 0.5}, GREEDY | {"logprobs": 0}), "copied"),
        (a_case(F32, RANDOM | {"min_p": 0.5, "logprobs": 0}, **PROCESSED), "in place"),
        # Drafts: sums over blocks are taken for random rows.
        (a_case(B16, GREEDY, drafts=True), "as it is"),
        (a_case(B16, GREEDY, RANDOM, drafts=True), "copied"),
        (a_case(F32, GREEDY, RANDOM, drafts=True), "as it is"),
        (a_case(F32, RANDOM | {"top_k": 3}, drafts=True), "in place"),
    ],
)
def test_logits_are_copied_only_where_they_must_be(sides: Sides, case: Case, expected: str) -> None:
    assert handling(sides, case) == expected


def test_logits_of_another_layout_are_copied(sides: Sides) -> None:
    """A slice of a padded vocabulary is sampled from as it is; it is no copy of upstream's."""
    case = a_case(F32, RANDOM, RANDOM)
    wide = torch.zeros(2, VOCABULARY + 58)
    case.logits = wide[:, :VOCABULARY].copy_(case.logits)
    assert handling(sides, case) == "as it is"
    compare(sides, case)
    case.requests = [RANDOM | {"logprobs": 0}] * 2
    case.mode = "processed_logprobs"
    assert handling(sides, case) == "copied"
    columns = torch.zeros(VOCABULARY, 2).t()
    for ask in (NOTHING, {"top_k": 3}):
        ours = under_test(sides, sides.ours, a_case(F32, RANDOM, RANDOM | ask))
        decided = ours.sampler.readiness.decide(columns, ours.batch.idx_mapping_np)
        assert decided is sides.copies.Handling.COPY


def test_a_plan_is_kept_until_a_request_joins(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = under_test(sides, sides.ours, a_case(B16, GREEDY, GREEDY), room=4)
    copies, at = ours.sampler.readiness, ours.batch.idx_mapping_np
    as_is, copy = sides.copies.Handling.AS_IS, sides.copies.Handling.COPY
    plan = mock.Mock(wraps=copies._make_plan)
    monkeypatch.setattr(copies, "_make_plan", plan)
    for _ in range(5):
        assert copies.decide(ours.logits, at.copy()) is as_is
    assert plan.call_count == 1
    add(ours.sampler, int(at[1]), {"temperature": 0.5})
    assert copies.decide(ours.logits, at) is copy
    assert plan.call_count == 2
    assert copies.decide(ours.logits[:1], at[:1].copy()) is as_is
    assert copies.decide(ours.logits, at[::-1].copy()) is copy
    assert plan.call_count == 4
    assert copies.decide(ours.logits, at) is copy
    at[:] = at[0]  # the caller's array is not kept
    assert copies.decide(ours.logits, at) is as_is


@pytest.mark.parametrize("drafts", [False, True])
def test_an_unknown_request_takes_upstreams_path(sides: Sides, drafts: bool) -> None:
    """The profile run's; there the kernels are compiled for logits as they are."""
    ours = under_test(sides, sides.ours, a_case(B16, GREEDY, drafts=drafts), room=4)
    two, unknown = logits_of(2, B16), np.array([0, 3], dtype=np.int32)
    names = ("gumbel_sample", "rejection_sample")
    kernels = {name: mock.Mock(wraps=getattr(sides.copies, name)) for name in names}
    with mock.patch.multiple(sides.copies, **kernels):
        assert ours.sampler.readiness.decide(two, unknown) is sides.copies.Handling.COPY
    assert [kernel.call_count for kernel in kernels.values()] == [1, drafts]
    assert ours.sampler.readiness.decide(two.float(), unknown) is sides.copies.Handling.COPY


def test_switched_off_every_copy_is_made(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_READINESS", "-sampler-copies")
    assert handling(sides, a_case(B16, GREEDY)) == "copied"
    assert handling(sides, a_case(F32, RANDOM | {"top_k": 3})) == "copied"
