"""Copies of upstream's objects that the overlay has a part in: they are as stock's copies are.

A copy is not live: upstream serves it, and the object that it was made of does not notice.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill, state
from support.lockstep import LockstepRun
from support.logprobs import FINAL, Side, Step, Wish
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.readiness import worker
from vllm.v1.readiness.inputs import block_tables
from vllm.v1.readiness.sample import thinking_fixes
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

VOCABULARY = 37
PLACEHOLDER = -1

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda original: pickle.loads(pickle.dumps(original)),
    "deepcopy": copy.deepcopy,
}
ALL_WAYS = {**WAYS, "copy": copy.copy}


def each_way(ways: dict[str, Callable[[Any], Any]]) -> pytest.MarkDecorator:
    """Run a test once for each way to copy."""
    return pytest.mark.parametrize("copied", ways.values(), ids=ways)


def specs() -> list[Spec]:
    """Requests that use each feature of a batch."""
    return [
        Spec([1, 2, 3], [4, 5, 4], {"presence_penalty": 1.0, "repetition_penalty": 1.4}),
        Spec([1, 2], [7], {"bad_words": [[7, 3], [9]], "min_tokens": 4, "stop_token_ids": [5]}),
        Spec([5], [7], {"logit_bias": {3: 9.0}, "allowed_token_ids": [3, 4]}),
        Spec([6, 7, 8], [], {"temperature": 0.7, "top_k": 3, "min_p": 0.1, "seed": 4}),
    ]


def filled(side: Any) -> Any:
    """A side's batch with requests."""
    batch = empty(side, VOCABULARY)
    fill(batch, specs())
    return batch


def sampled(side: Any, metadata: Any, rows: int) -> list[int]:
    """What a side's sampler gives of drawn logits by some metadata."""
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5)
    with torch.compiler.set_stance("force_eager"):
        output = side(modules.SAMPLER).Sampler()(logits, metadata)
    return list(output.sampled_token_ids.flatten().tolist())


def go_on(side: Any, batch: Any) -> list[Any]:
    """Change a batch as a runner does, and sample from it after each change."""
    seen: list[Any] = [sampled(side, batch.sampling_metadata, batch.num_reqs)]
    batch.remove_request("r1")
    batch.condense()
    batch.add_request(state(Spec([3], [2, 2], {"frequency_penalty": 1.5}), "later"))
    batch.swap_states(0, 1)
    batch.refresh_metadata()
    seen.append(sampled(side, batch.sampling_metadata, batch.num_reqs))
    seen.append([list(output or ()) for output in batch.req_output_token_ids])
    seen.append(batch.token_ids_cpu[: batch.num_reqs, :8].tolist())
    return seen


@each_way(WAYS)
def test_a_copied_batch_goes_on_as_stocks_does(copied: Callable[[Any], Any]) -> None:
    seen = []
    for side in (modules.pristine, modules.overlaid):
        original = filled(side)
        twin = copied(original)
        gone = weakref.ref(original)
        del original
        gc.collect()
        assert gone() is None
        seen.append(go_on(side, twin))
    assert seen[0] == seen[1]


@each_way(ALL_WAYS)
def test_the_batch_of_a_copy_stays_live(copied: Callable[[Any], Any]) -> None:
    original = filled(modules.overlaid)
    attached = worker.of(original)
    twin = copied(original)
    assert worker.of(twin) is not attached
    assert not worker.of(twin).on
    assert worker.of(original) is attached
    assert original.sampling_metadata.output_token_ids is attached.output_lists
    if copied is not copy.copy:
        go_on(modules.overlaid, twin)
        assert list(attached.requests) == ["r0", "r1", "r2", "r3"]
        assert go_on(modules.overlaid, original) == go_on(
            modules.pristine, filled(modules.pristine)
        )


@each_way(WAYS)
def test_copied_metadata_samples_as_stocks_does(copied: Callable[[Any], Any]) -> None:
    seen = []
    for side in (modules.pristine, modules.overlaid):
        metadata = copied(filled(side).sampling_metadata)
        assert type(metadata.output_token_ids) is list
        seen.append((metadata.output_token_ids, sampled(side, metadata, 4)))
    assert seen[0] == seen[1]


@each_way(WAYS)
def test_a_copy_has_every_token_but_the_newest(copied: Callable[[Any], Any]) -> None:
    """An unchanged batch may be many steps behind; stock's is not."""
    run = LockstepRun()
    names = [run.add([number, 1], max_tokens=40, presence_penalty=1.0) for number in range(2)]
    run.run(9)
    batch = copied(run.ours.batch)
    for row, name in enumerate(names):
        output = batch.req_output_token_ids[row]
        assert output[:-1] == run.truth(name)[: len(output) - 1]
        length = int(batch.num_tokens_no_spec[row])
        assert batch.token_ids_cpu[row, 2 : length - 1].tolist() == output[:-1]
    assert PLACEHOLDER not in copied(run.ours.batch.sampling_metadata).output_token_ids[0][:-1]
    run.finish()


@each_way(WAYS)
@pytest.mark.parametrize("fixes", [True, False])
def test_a_copied_thinking_budget_is_upstreams(copied: Callable[[Any], Any], fixes: bool) -> None:
    run = LockstepRun(markers=([1], [2]), switch="on" if fixes else "-fixes")
    run.add([5, 1, 5], max_tokens=20, thinking_token_budget=6)
    run.run(4)
    holder = copied(run.ours.batch).thinking_budget_state_holder
    assert type(holder) is (thinking_fixes.FixedHolder if fixes else ThinkingBudgetStateHolder)
    stock = copied(run.stock.batch.thinking_budget_state_holder)
    assert vars(holder).keys() == vars(stock).keys()
    assert holder._state.keys() == stock._state.keys() == {0}
    assert holder._state[0].keys() == stock._state[0].keys()
    run.finish()


@each_way(WAYS)
def test_copied_block_tables_are_sent_by_upstream(copied: Callable[[Any], Any]) -> None:
    original = filled(modules.overlaid)
    tables = original.block_table
    tables.add_row(([7, 8],), 0)
    twin = copied(tables)
    assert twin.readiness is None
    assert type(twin.block_tables[0].changed_rows) is set
    assert isinstance(tables.block_tables[0].changed_rows, block_tables.ChangedRows)
    twin.commit_block_table(1)
    assert twin.block_tables[0].block_table.gpu[0, :2].tolist() == [7, 8]
    assert tables.block_tables[0].block_table.gpu[0, :2].tolist() == [0, 0]


@each_way(ALL_WAYS)
def test_a_copied_request_has_no_slot_of_the_batch(copied: Callable[[Any], Any]) -> None:
    """Two requests would count their tokens in it."""
    run = LockstepRun()
    name = run.add([1, 2], max_tokens=40, presence_penalty=1.0)
    run.run(4)
    batch = run.ours.batch
    penalties = batch.readiness.penalties
    request = batch.readiness.requests[name]
    batch.readiness.remove_request(name, 0)
    assert penalties._kept[name].tensor is not None
    twin = copied(request)
    other = empty(modules.overlaid, VOCABULARY)
    other.add_request(twin)
    others = worker.of(other).penalties
    assert others is not None
    assert others._slots == {name: None}
    batch.readiness.add_request(request)
    assert penalties._slots[name] is not None


@each_way(WAYS)
@pytest.mark.parametrize("text", [True, False])
def test_a_copied_logprobs_processor_is_upstreams(copied: Callable[[Any], Any], text: bool) -> None:
    shown = []
    for ours in (False, True):
        side = Side(ours, [Wish(3, 3, FINAL)], text)
        for number in range(4):
            side.take(number, Step([1], 4, number))
        processor = side.processor.request_states["0"].logprobs_processor
        twin = copied(processor)
        assert type(twin) is LogprobsProcessor
        shown.append(repr((twin.logprobs, twin.prompt_logprobs, twin.cumulative_logprob)))
        for number in range(4, 10):
            side.take(number, Step([1], 4, number))
        shown[-1] += repr(side.given[-1].outputs[0].logprobs)
    assert shown[0] == shown[1]
