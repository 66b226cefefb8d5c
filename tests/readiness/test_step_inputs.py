"""The inputs of decode steps whose batch has not changed, beside upstream's own preparation.

Lockstep runs compare every buffer of both runners after every step (``support.lockstep.inputs``).
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.lockstep import LockstepRun
from support.modules import interpreted
from vllm.v1.readiness import live
from vllm.v1.readiness.inputs import step_inputs
from vllm.v1.readiness.outputs import history
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import BlockTable


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step that was advanced here."""
    rows: list[int] = []
    advance = step_inputs.advance

    def noted(runner: Any, count: int, *arguments: Any) -> None:
        rows.append(count)
        advance(runner, count, *arguments)

    monkeypatch.setattr(step_inputs, "advance", noted)
    return rows


def decode(run: LockstepRun, requests: int, length: int) -> None:
    """Add requests of this many tokens, and run them up to their last step."""
    for request in range(requests):
        run.add([1 + request, 2, 3], max_tokens=length, ignore_eos=True)
    run.run(length)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_unchanged_batch_is_advanced(asynchronous: bool, advanced: list[int]) -> None:
    """All decode steps but the first are served here, across several blocks."""
    run = LockstepRun(asynchronous=asynchronous)
    decode(run, requests=5, length=20)
    assert advanced == [5] * 18


def test_changed_batch_is_upstreams(advanced: list[int]) -> None:
    """Upstream prepares the step that changes the batch, and the one after it."""
    run = LockstepRun()
    for request in range(2):
        run.add([1 + request, 2, 3], max_tokens=20, ignore_eos=True)
    run.run(6)
    before = len(advanced)
    run.add([9, 9], max_tokens=4, ignore_eos=True)
    run.run(2)
    assert len(advanced) == before
    run.run(2)
    assert advanced[before:] == [3, 3]
    run.finish()
    assert advanced[before:] == [3, 3, *[2] * 9]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_prompt_in_chunks_of_a_token_is_upstreams(asynchronous: bool, advanced: list[int]) -> None:
    """Each request gets one token a step, as if all decoded; one of them is a prompt's."""
    run = LockstepRun(asynchronous=asynchronous, max_num_seqs=3, max_tokens_a_step=3)
    for request in range(2):
        run.add([1 + request], max_tokens=40, ignore_eos=True)
    run.run(5)
    run.add([9] * 12, max_tokens=8, ignore_eos=True)
    run.run(1)
    before = len(advanced)
    run.run(11)
    assert len(advanced) == before
    run.run(4)
    assert advanced[before:] == [3, 3, 3]
    run.finish()


def test_memory_that_was_given_back_is_filled_by_upstream(advanced: list[int]) -> None:
    """After the KV cache was asleep, the device may hold anything."""
    run = LockstepRun()
    for number in range(2):
        run.add([1 + number, 2, 3], max_tokens=20, ignore_eos=True)
    run.run(6)
    before = len(advanced)
    live.of(run.ours.batch).lose_block_tables()
    run.run(1)
    assert len(advanced) == before
    run.run(2)
    assert len(advanced) == before + 2
    run.finish()


def test_step_after_one_that_was_not_prepared_is_upstreams(advanced: list[int]) -> None:
    """Its batch was updated, and then a connector, say, ended it."""
    run = LockstepRun()
    for number in range(2):
        run.add([1 + number, 2, 3], max_tokens=20, ignore_eos=True)
    run.run(6)
    before = len(advanced)
    prepare = run.ours.runner._prepare_inputs
    run.ours.runner._prepare_inputs = run.stock.runner._prepare_inputs = lambda *_: (None, None)
    with mock.patch("support.lockstep.run.same_inputs"):
        run.run(1)
    del run.ours.runner._prepare_inputs, run.stock.runner._prepare_inputs
    assert prepare == run.ours.runner._prepare_inputs
    run.run(1)
    assert len(advanced) == before
    run.finish()
    assert len(advanced) > before


def in_flight(run: LockstepRun) -> int:
    """The number of steps whose tokens are not written yet."""
    tokens = live.of(run.ours.batch).history
    assert tokens is not None
    return len(tokens.in_flight)


def settled(run: LockstepRun, most: int) -> list[int]:
    """The number of steps in flight as each of some steps ends."""
    lengths = []
    for _ in range(most):
        run.run(1)
        lengths.append(in_flight(run))
    return lengths


def test_tokens_of_an_unchanged_batch_are_written_for_many_steps_at_once() -> None:
    run = LockstepRun(max_model_len=200)
    for number in range(3):
        run.add([1 + number, 2, 3], max_tokens=100, ignore_eos=True)
    run.run(4)
    lengths = settled(run, 60)
    assert max(lengths) == history.LAG + 1
    assert lengths.count(2) == 60 // history.LAG


@pytest.mark.parametrize("late", [{}, {"presence_penalty": 1.0}, {"logprobs": 2}])
def test_tokens_are_written_before_the_batch_changes(late: dict[str, Any]) -> None:
    """Lockstep runs then compare all that is known with what the scheduler has."""
    run = LockstepRun(max_model_len=200)
    first = run.add([1, 2, 3], max_tokens=100, ignore_eos=True)
    run.run(10)
    run.add([4, 5], max_tokens=60, ignore_eos=True, **late)
    run.run(1)
    assert in_flight(run) == 2
    known = run.settled()[first]
    assert len(known) > 6
    assert known == run.truth(first)[: len(known)]
    lengths = settled(run, 12)
    assert (max(lengths) > 2) is ("logprobs" not in late)
    run.finish()


@pytest.mark.parametrize("named", [{"drafts": 2}, {"processor": "older"}, {"processor": "user"}])
def test_tokens_that_are_read_are_written_in_each_step(named: dict[str, Any]) -> None:
    run = LockstepRun(max_model_len=200, **named)
    for number in range(3):
        run.add([1 + number, 2, 3], max_tokens=100, ignore_eos=True)
    run.run(4)
    assert max(settled(run, 12)) <= 2


def test_switched_off(advanced: list[int]) -> None:
    """With the feature off, every step is upstream's."""
    decode(LockstepRun(switch="-step-inputs"), requests=3, length=9)
    assert not advanced


@pytest.mark.parametrize("own", ["_update_states", "batch"])
def test_subclass_is_upstreams(own: str, advanced: list[int]) -> None:
    """A user's own batch, or own way to update it, is served by upstream's code."""
    decode(LockstepRun(own=own), requests=3, length=9)
    assert not advanced


def make_state(rows: int, sizes: list[int], seed: int) -> tuple[Any, list[BlockTable]]:
    """Make a runner's buffers with drawn contents, and a block table for each block size."""
    draw = torch.Generator().manual_seed(seed)
    most, length, device = rows + 3, 200, torch.device("cpu")

    def drawn(high: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(high, (most,), generator=draw, dtype=dtype)

    tables = []
    for size in sizes:
        table = BlockTable(size, most, -(-length // size), most, False, device, size, 1)
        table.block_table.gpu.random_(1, 2**20, generator=draw)
        table.slot_mapping.gpu.fill_(-1)
        tables.append(table)
    ids = CpuGpuBuffer(most, dtype=torch.int32, device=device, pin_memory=False)
    ids.gpu = drawn(1000)
    return SimpleNamespace(
        arange_np=np.arange(most),
        num_computed_tokens=drawn(length - 1),
        seq_lens=drawn(9),
        positions=drawn(9, torch.int64),
        input_ids=ids,
    ), tables


@pytest.mark.parametrize("sampled", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [[16], [4, 16, 1], []])
@pytest.mark.parametrize("rows", [1, 130])
def test_kernel_equals_host(rows: int, sizes: list[int], sampled: torch.dtype | None) -> None:
    """The kernel, interpreted, writes what the code for the CPU writes, and nothing else."""
    tokens = None
    if sampled is not None:
        tokens = torch.arange(2 * rows, dtype=sampled).view(rows, 2)[:, :1]
    one, tables = make_state(rows, sizes, seed=rows)
    other, others = make_state(rows, sizes, seed=rows)
    step_inputs.advance(one, rows, tokens, tables)
    with interpreted("step_inputs") as kernels:
        kernels.advance(other, rows, tokens, step_inputs.addresses(others))
    for name in ("num_computed_tokens", "seq_lens", "positions"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.input_ids.gpu, other.input_ids.gpu)
    for mine, theirs in zip(tables, others, strict=True):
        assert torch.equal(mine.slot_mapping.gpu, theirs.slot_mapping.gpu)
