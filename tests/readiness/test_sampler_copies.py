"""V1's samplers without needless copies, beside upstream's."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from support import modules
from support.batches import Spec, state
from support.examples import draws
from support.sampling import MODES, Case, compare, passes, run, under_test
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.sample import sampler_copies

VOCABULARY = 41
ROWS = 3

NOTHING: dict[str, Any] = {}
#: Parameters of a request that change logits.
ASKS: list[dict[str, Any]] = [
    {"bad_words_token_ids": [[7], [5, 9]]},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"frequency_penalty": -0.5},
    {"allowed_token_ids": [0, 5, 11, 40]},
    {"min_tokens": 8, "stop_token_ids": [3, 8, 12]},
    {"min_tokens": 1, "stop_token_ids": [3, 8, 12]},
    {"logit_bias": {2: 4.0, 17: -100.0}},
]
#: Parameters that change logits of a random request only.
SHAPES: list[dict[str, Any]] = [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}]
EDGES = [0.0, -0.0, torch.inf, -torch.inf, torch.nan]


@pytest.fixture(autouse=True)
def without_other_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the fix that gives requests other logprobs than stock."""
    monkeypatch.setenv(switch.NAME, "-logprob-tokens")


def logits_of(rows: int, dtype: torch.dtype, seed: int, edge: float | None) -> torch.Tensor:
    """Logits with many ties, and one value that is none of the usual ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn((rows, VOCABULARY), generator=generator) * 6).round() / 2
    if edge is not None:
        logits[seed % rows, seed % VOCABULARY] = edge
    return logits.to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any mix; every second without anything that touches the logits."""
    temperatures: list[float] = draw(st.sampled_from([[0.0], [1.0], [0.0, 1.0], [0.0, 1.0, 0.7]]))
    logprobs: list[int | None] = draw(st.sampled_from([[None], [None, 0, 5], [-1, 2]]))
    touched, drafted = draw(st.booleans()), draw(st.booleans())
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        request: dict[str, Any] = {"temperature": draw(st.sampled_from(temperatures))}
        if request["temperature"]:
            request |= draw(st.sampled_from(SHAPES))
            request["seed"] = draw(st.sampled_from([None, None, 11]))
        if drafted:
            request.pop("min_p", None)
        request["logprobs"] = draw(st.sampled_from(logprobs))
        if not drafted and draw(st.integers(0, 5)) == 0:
            request["logprob_token_ids"] = [1, 40]
        if touched:
            request |= draw(st.sampled_from([NOTHING, *ASKS]))
        requests.append(request)
    drafts = None
    if drafted:
        tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=2)
        drafts = [draw(tokens) for _ in requests]
        drafts[0] = drafts[0] or [5]
    rows = len(requests) + sum(map(len, drafts or ()))
    logits = logits_of(
        rows,
        draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        draw(st.integers(0, 10**6)),
        draw(st.sampled_from([None, *EDGES])),
    )
    if drafts:
        # Drafts that are likely get accepted.
        at = 0
        for ids in drafts:
            for position in range(len(ids)):
                ids[position] = int(logits[at + position].float().nan_to_num().argmax())
            at += len(ids) + 1
    mode = draw(st.sampled_from(MODES))
    return Case(requests, logits, mode, drafts, processor=draw(st.integers(0, 7)) == 0)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan copies as on a GPU, unless the parameter is "cpu"."""
    if getattr(request, "param", "gpu") == "gpu":
        monkeypatch.setattr(sampler_copies, "_CONVERTING", frozenset())


ON_BOTH = pytest.mark.parametrize("device", ["gpu", "cpu"], indirect=True)


@ON_BOTH
@given(case=cases())
@draws(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_samples_have_upstreams_bits(case: Case) -> None:
    """Tokens, logprobs of every mode, and the states of the generators."""
    compare(case)


def both(case: Case) -> tuple[Counter[str], Counter[str]]:
    """The passes of upstream that are gone, and those that are new."""
    stock, ours = (passes(under_test(load, case)) for load in (modules.pristine, modules.overlaid))
    return stock - ours, ours - stock


def a_case(dtype: torch.dtype, drafts: bool = False, mode: str = MODES[0], **asks: Any) -> Case:
    ids: list[list[int]] | None = [[1, 2], [3, 4], [5, 6]] if drafts else None
    rows = 3 * ROWS if drafts else ROWS
    requests = [{"temperature": 0.0, **asks} for _ in range(ROWS)]
    return Case(requests, logits_of(rows, dtype, 1, None), mode, ids)


B16, F32 = torch.bfloat16, torch.float32
RANDOM: dict[str, Any] = {"temperature": 1.0, "seed": 4}


@pytest.mark.parametrize(
    ("case", "gone"),
    [
        (a_case(B16), {"_to_copy": 1}),
        (a_case(torch.float16), {"_to_copy": 1}),
        (a_case(F32), {}),
        (a_case(B16, logprobs=5), {"_to_copy": 1}),
        (a_case(B16, logprobs=5, mode="raw_logits"), {"_to_copy": 1}),
        (a_case(F32, logprobs=5, mode="raw_logits"), {"clone": 1}),
        (a_case(B16, logprobs=5, mode="processed_logits"), {}),
        (a_case(B16, logprobs=5, mode="processed_logprobs"), {}),
        (a_case(B16, mode="processed_logprobs"), {"_to_copy": 1}),
        # Random: a float32 copy is needed, but once, and no division by 1.
        (a_case(B16, **RANDOM), {"div_": 1}),
        (a_case(B16, temperature=0.7, seed=4), {}),
        (a_case(B16, **RANDOM, logprobs=5), {"div_": 1, "_to_copy": 1}),
        (a_case(torch.float16, **RANDOM, logprobs=5), {"div_": 1}),
        (a_case(B16, temperature=0.7, seed=4, logprobs=5), {"_to_copy": 1}),
        (a_case(B16, **RANDOM, mode="processed_logprobs"), {"div_": 1, "_log_softmax": 1}),
        (a_case(B16, **RANDOM, mode="processed_logprobs", logprobs=0), {"div_": 1}),
        # Touched: the copies stay.
        (a_case(B16, logit_bias={1: 2.0}), {}),
        (a_case(B16, min_tokens=9, stop_token_ids=[3]), {}),
        (a_case(B16, allowed_token_ids=[3]), {}),
        (a_case(B16, bad_words_token_ids=[[3]]), {}),
        (a_case(B16, logit_bias={1: 2.0}, logprobs=5), {"_to_copy": 1}),
        (a_case(F32, logit_bias={1: 2.0}, logprobs=5, mode="raw_logits"), {}),
        # Drafts: bonus and target rows.
        (a_case(B16, drafts=True), {"_to_copy": 3, "clone": 1}),
        (a_case(F32, drafts=True), {"clone": 2}),
        (a_case(F32, drafts=True, logprobs=5), {"clone": 2}),
        (a_case(F32, drafts=True, logit_bias={1: 2.0}), {"clone": 2}),
        (a_case(F32, drafts=True, logit_bias={1: 2.0}, logprobs=5), {}),
        (a_case(F32, drafts=True, **RANDOM), {"clone": 2, "div_": 2}),
        (a_case(F32, drafts=True, temperature=0.7, seed=4), {"clone": 2}),
        (a_case(F32, drafts=True, temperature=0.7, seed=4, logprobs=0), {}),
    ],
)
def test_needless_passes_over_logits_are_gone(case: Case, gone: dict[str, int]) -> None:
    assert both(case) == (Counter(gone), Counter())


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("case", "gone"),
    [
        (a_case(B16), {}),
        (a_case(torch.float16), {}),
        (a_case(F32), {}),
        (a_case(B16, logprobs=5), {"_to_copy": 1}),
        (a_case(torch.float16, logprobs=5), {}),
        (a_case(F32, logprobs=5, mode="raw_logits"), {"clone": 1}),
        (a_case(B16, **RANDOM, logprobs=5), {"div_": 1, "_to_copy": 1}),
        (a_case(B16, drafts=True), {"_to_copy": 1, "clone": 1}),
        (a_case(F32, drafts=True), {"clone": 2}),
    ],
)
def test_on_a_cpu_the_greedy_choice_reads_float32(case: Case, gone: dict[str, int]) -> None:
    assert both(case) == (Counter(gone), Counter())


def test_a_users_processor_may_touch_logits() -> None:
    case = a_case(B16)
    case.processor = True
    assert both(case) == (Counter(), Counter())
    compare(case)


@pytest.mark.parametrize("field", ["copies", "temperature", "logitsprocs"])
def test_metadata_that_is_not_the_plans_takes_upstreams_path(field: str) -> None:
    case = a_case(B16, **RANDOM, logprobs=3)
    ours = under_test(modules.overlaid, case)
    metadata = ours.batch.sampling_metadata
    changed = {
        "copies": None,
        "temperature": torch.tensor([0.5, 1.0, 2.0]),
        "logitsprocs": type(metadata.logitsprocs)(),
    }
    stock = under_test(modules.pristine, case)
    for one in (stock, ours):
        if field != "copies" or one is ours:
            setattr(one.batch.sampling_metadata, field, changed[field])
    assert passes(stock) == passes(ours)
    stock, ours = run(stock), run(ours)
    assert torch.equal(stock.result.sampled_token_ids, ours.result.sampled_token_ids)


def test_switched_off_every_pass_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_READINESS", "-sampler-copies")
    assert both(a_case(B16, drafts=True)) == (Counter(), Counter())


def test_the_plan_follows_the_batch() -> None:
    """Requests that touch logits come and go; the minimum of tokens is reached in between."""
    case = a_case(B16)
    batch = under_test(modules.overlaid, case).batch

    def plan() -> tuple[bool, bool]:
        batch.refresh_metadata()
        copies = batch.sampling_metadata.copies
        return copies.changes_logits, copies.scales_logits

    assert plan() == (False, False)
    late = state(Spec([1], [], {"min_tokens": 2, "stop_token_ids": [3]}), "late")
    batch.add_request(late)
    assert plan() == (True, False)
    late.output_token_ids.extend([5, 6])
    assert plan() == (True, False)
    batch.add_request(state(Spec([1], [], {"temperature": 0.5}), "warm"))
    assert plan() == (False, True)
    batch.remove_request("warm")
    batch.condense()
    assert plan() == (False, False)
