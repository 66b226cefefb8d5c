"""Subclasses by others: an unknown one takes upstream's path, and never fails."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill, state
from vllm.v1.readiness import live, worker
from vllm.v1.readiness.sample import sampler_copies_mrv2
from vllm.v1.readiness.sample.sampler_copies_mrv2 import Handling

VOCABULARY = 37
PENALTY = {"presence_penalty": 1.5}


def batch_without_our_constructor() -> Any:
    """Return a batch whose class calls the pristine constructor, not ours."""
    stock = modules.pristine(modules.INPUT_BATCH).InputBatch
    ours = modules.overlaid(modules.INPUT_BATCH).InputBatch

    class Batch(ours):  # type: ignore[misc, valid-type]
        def __init__(self, **named: Any) -> None:
            stock.__init__(self, **named)

    def module(_: str) -> Any:
        return SimpleNamespace(InputBatch=Batch)

    return empty(module, VOCABULARY)


def prepare(batch: Any, sampler: Any = None) -> None:
    """Begin a step of a runner with this sampler, or with vLLM's own."""
    mine = worker.of(batch)
    if mine.history is not None:
        mine.history.begin_step()
    runner = sampler and SimpleNamespace(sampler=sampler)
    mine.begin_sampling(torch.zeros(1, VOCABULARY), None, runner)


def test_a_batch_without_our_constructor_is_upstreams(
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    stock, ours = empty(modules.pristine, VOCABULARY), batch_without_our_constructor()
    specs = [Spec([n, 1], [2], PENALTY if n % 2 else {}) for n in range(4)]
    for batch in (stock, ours):
        fill(batch, specs)
        batch.remove_request("r0")
        batch.condense()
        batch.swap_states(0, 1)
        batch.add_request(state(specs[3], "r9"))
        batch.refresh_metadata()
    assert ours.req_ids == stock.req_ids
    assert (ours.token_ids_cpu == stock.token_ids_cpu).all()
    mine = worker.of(ours)
    mine.begin_sampling(torch.zeros(4, VOCABULARY), None)
    mine.observe_sampled(torch.zeros(4, 1), torch.zeros(4, dtype=torch.bool))
    assert not mine.settle_for_sampling()
    assert mine.history is None
    assert mine.host_needs_drafts()
    assert mine.outputs.readbacks is None
    assert ours.readiness is mine
    (message,) = [r for r in caplog_vllm.records if "constructor" in r.getMessage()]
    assert "Batch does not call" in message.getMessage()


def test_a_batch_of_another_class_is_left_alone(caplog_vllm: pytest.LogCaptureFixture) -> None:
    """Under an inherited runner, whose seams find it."""

    class Unknown(SimpleNamespace):  # a name of its own: others' warnings come once a process
        __slots__ = ()  # it cannot be referenced weakly, either

    batch = Unknown()
    attached = worker.of(batch)
    attached.cut("r0", 1)
    attached.begin_sampling(torch.zeros(1, VOCABULARY), None, SimpleNamespace(sampler=object()))
    assert attached.host_needs_drafts()
    assert attached.history is None
    assert attached.outputs.readbacks is None
    assert worker.of(batch) is attached
    assert sum("Unknown does not" in r.getMessage() for r in caplog_vllm.records) == 1


def test_a_mock_is_left_alone() -> None:
    """Upstream's own tests call runners' methods with mocks, which have every attribute."""
    batch = mock.MagicMock()
    attached = worker.of(batch)
    assert isinstance(attached, live.LiveBatch)
    assert worker.of(batch) is attached
    assert attached.step_metadata is None


def sampled(load: Any, logits: torch.Tensor) -> Any:
    """Sample by a sampler that changes logits where vLLM's own leaves them alone."""

    class Sampler(load(modules.SAMPLER).Sampler):  # type: ignore[misc]
        def apply_logits_processors(self, logits: Any, *others: Any, **named: Any) -> Any:
            logits = super().apply_logits_processors(logits, *others, **named)
            logits[:, 3] += 100.0
            return logits

    sampler = Sampler("raw_logits")
    batch = empty(load, VOCABULARY)
    fill(batch, [Spec([1, n], [2], {"logprobs": 2}) for n in range(3)])
    if hasattr(batch, "readiness"):
        batch.readiness.history.begin_step()
        batch.readiness.begin_sampling(logits, None, SimpleNamespace(sampler=sampler))
    with torch.compiler.set_stance("force_eager"):  # it would compile every shape
        return sampler(logits, batch.sampling_metadata)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sampler_that_changes_logits_itself_has_upstreams_output(dtype: torch.dtype) -> None:
    """The raw logits are those before it, and the tokens those that it asks for."""
    logits = torch.randn(3, VOCABULARY).to(dtype)
    expected = sampled(modules.pristine, logits.clone())
    ours = sampled(modules.overlaid, logits.clone())
    assert ours.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist() == [[3]] * 3
    for mine, theirs in zip(ours.logprobs_tensors[:3], expected.logprobs_tensors[:3], strict=True):
        assert torch.equal(mine, theirs)


def test_a_batch_with_lists_of_its_own_is_not_served() -> None:
    """The samplers read those lists, and nobody would wait for their tokens."""
    batch = empty(modules.overlaid, VOCABULARY)
    batch.req_output_token_ids = []
    fill(batch, [Spec([1], [2], PENALTY)])
    prepare(batch)
    assert not batch.readiness.penalties.serving
    assert batch.readiness.host_needs_drafts()


def test_a_sampler_that_is_replaced_is_checked_again() -> None:
    """A sampler of another class reads the lists on the host; ours does not."""
    batch = empty(modules.overlaid, VOCABULARY)
    fill(batch, [Spec([1], [2], PENALTY)])
    own = modules.overlaid(modules.SAMPLER).Sampler()
    for sampler, served in ((own, True), (object(), False), (own, True)):
        prepare(batch, sampler)
        assert batch.readiness.penalties.serving is served
        assert batch.readiness.host_needs_drafts() is not served
        batch.readiness.observe_sampled(
            torch.ones(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.bool)
        )


def test_a_derived_mrv2_sampler_makes_every_copy() -> None:
    """It may not call the constructor of Model Runner V2's, in which ours is attached."""

    class Sampler(modules.overlaid(modules.MRV2_SAMPLER).Sampler):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    sampler = Sampler()
    copies = sampler_copies_mrv2.of(sampler)
    copies.add_request(3)
    rows = torch.tensor([0, 3]).numpy()
    assert copies.decide(torch.zeros(2, VOCABULARY), rows) is Handling.COPY
    sampler_copies_mrv2.attach(sampler, 4)
    assert not sampler_copies_mrv2.of(sampler).on
