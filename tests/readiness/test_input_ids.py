"""The feature input-ids: what a step is given, beside the pinned runner's."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from support.inputs import DRAFTS, ROWS, Row, Step, differences, make, prepare


@st.composite
def rows(draw: Any, drafts: bool) -> Row:
    """Draw a request: a decode with or without drafts, a new one, or a chunk of a prompt."""
    kind = draw(st.sampled_from(["decode"] * 4 + ["new", "chunk", "resumed"]))
    prompt = draw(st.integers(1, 5))
    if kind in ("new", "chunk"):
        computed = 0 if kind == "new" else draw(st.integers(0, prompt - 1))
        tokens = draw(st.integers(1, prompt - computed))
        return Row(prompt, 0, computed, tokens, known=kind == "chunk" and draw(st.booleans()))
    output = draw(st.integers(1, 5))
    count = draw(st.sampled_from([None, 0, 1, 2, DRAFTS, DRAFTS])) if drafts else None
    computed = prompt + output - 1 if draw(st.integers(0, 9)) else prompt - 1
    return Row(prompt, output, computed, 1, count, known=kind == "decode")


@st.composite
def steps(draw: Any) -> Step:
    """Draw a step whose rows may be those of the step before, or have moved."""
    drafts = draw(st.booleans())
    size = draw(st.sampled_from([4, ROWS]))
    if draw(st.booleans()):
        requests = draw(st.lists(rows(drafts), min_size=1, max_size=size))
    else:
        decode = Row(drafts=DRAFTS if drafts else None)
        new = st.lists(rows(drafts), max_size=3)
        requests = [decode] * draw(st.integers(1, size - 3)) + draw(new)
    count = len(requests)
    before = range(count + draw(st.sampled_from([0, 0, 2])))
    moved = draw(st.booleans())
    previous = draw(st.permutations(before)) if moved else list(before)
    drafted = [row for row, each in enumerate(requests) if each.drafts is not None]
    proposed = [torch.int64, torch.int64, torch.int32, None, list]
    return Step(
        requests,
        previous[:count],
        draw(st.permutations(drafted)) if draw(st.booleans()) else drafted,
        draw(st.sampled_from(proposed)),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.integers(0, 9)) > 0,
        draw(st.booleans()),
    )


@draws(300)
@given(step=steps(), value=st.sampled_from(["on", "on", "on", "off", "-input-ids"]))
def test_a_step_is_given_what_the_pinned_runner_gives_it(step: Step, value: str) -> None:
    stock = prepare(*make(modules.pristine, step))
    assert not differences(stock, prepare(*make(modules.overlaid, step, value)))


DECODES = [Row() for _ in range(20)]
DRAFTED = [Row(drafts=DRAFTS) for _ in range(20)]
SAME, MOVED = range(20), [*range(1, 20), 0]
STEPS = {
    "the batch before": Step(DECODES, SAME, []),
    "moved": Step(DECODES, MOVED, []),
    "none known": Step([Row(3, 0, 0, 3, known=False)] * 20, SAME, []),
    "drafts": Step(DRAFTED, SAME, SAME),
    "drafts of some": Step([*DRAFTED[1:], Row()], MOVED, SAME[:19]),
    "few rows": Step(DRAFTED[:2], [1, 0], [0, 1]),
}


@pytest.mark.parametrize(
    ("name", "uploads"),
    [("the batch before", 0), ("none known", 0), ("moved", 1), ("drafts", 2), ("few rows", 2)],
)
def test_tokens_and_drafts_take_one_upload_each_from_pinned_memory_of_their_own(
    name: str, uploads: int
) -> None:
    runner, scheduled, lengths = make(modules.overlaid, STEPS[name])
    runner.pin_memory = True
    pinned: list[torch.Tensor] = []
    sent = []
    empty, to = torch.empty, torch.Tensor.to

    def allocate(*size: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        made = empty(*size, **named)
        if pin_memory:
            pinned.append(made)
        return made

    def upload(tensor: torch.Tensor, *named: Any, **more: Any) -> torch.Tensor:
        if torch.device("cpu") in named:
            assert more == {"non_blocking": True}
            sent.append(tensor)
        return to(tensor, *named, **more)

    with mock.patch("torch.empty", allocate), mock.patch("torch.Tensor.to", upload):
        runner._prepare_inputs(scheduled, lengths)
    assert len(sent) == uploads
    assert all(one is other for one, other in zip(sent, pinned, strict=True))


def test_metadata_of_drafts_begins_where_kernels_are_compiled_for() -> None:
    runner, scheduled, lengths = make(modules.overlaid, Step(DRAFTED[:7], MOVED[:7], SAME[:7]))
    _, drafts = runner._prepare_inputs(scheduled, lengths)
    tensors = [each for each in vars(drafts).values() if isinstance(each, torch.Tensor)]
    assert len(tensors) == 6
    start = drafts.logits_indices.data_ptr()
    assert {(each.data_ptr() - start) % 16 for each in tensors[1:]} == {0}


def test_indices_of_other_types_go_upstreams_way() -> None:
    results = []
    for load in (modules.pristine, modules.overlaid):
        runner, _, lengths = make(load, STEPS["drafts"])
        counts = lengths - 1
        results.append(vars(runner._calc_spec_decode_metadata(counts, lengths.cumsum(dtype="i4"))))
    assert not differences(*results)


#: A method that a user replaces, and what it then does not ask of the feature.
OWN = {"_prepare_input_ids": "fill", "_compute_prev_positions": "find_previous"}


@pytest.mark.parametrize("own", OWN)
def test_a_users_own_method_bypasses_the_feature(own: str) -> None:
    step = STEPS["drafts of some"]
    stock = prepare(*make(modules.pristine, step))
    runner, scheduled, lengths = make(modules.overlaid, step, own=own)
    with mock.patch.object(runner.input_batch.readiness.input_ids, OWN[own]) as called:
        assert not differences(stock, prepare(runner, scheduled, lengths))
    called.assert_not_called()


def test_a_runner_that_updates_its_requests_itself_counts_their_tokens_itself() -> None:
    """It may give a request another list than the batch has."""
    for own, counted in ((None, True), ("_update_states", False)):
        runner, scheduled, lengths = make(modules.overlaid, STEPS["moved"], own=own)
        counts = runner.input_batch.readiness.input_ids.count_tokens(runner)
        assert (counts is not None) == counted
        if not counted:
            runner.requests["r3"].output_token_ids = [1] * 9
            runner._prepare_inputs(scheduled, lengths)
            assert runner.discard_request_mask.np.nonzero()[0].tolist() == [3]
