"""A step's requests and inputs, compared with upstream's own update and preparation.

Lockstep runs compare every buffer of both runners after every step (``support.lockstep.inputs``).
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import ref

import numpy as np
import pytest
import torch
from support.lockstep import LockstepRun
from support.modules import interpreted
from vllm.v1.readiness import worker
from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.inputs import step_inputs
from vllm.v1.readiness.outputs import history
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import BlockTable


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of requests in each step whose inputs were prepared here."""
    rows: list[int] = []
    write = step_inputs.write_on_cpu

    def noted(runner: Any, step: step_inputs.Rows, *arguments: Any) -> Any:
        rows.append(len(step.ends))
        return write(runner, step, *arguments)

    monkeypatch.setattr(step_inputs, "write_on_cpu", noted)
    return rows


@pytest.fixture
def continued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of requests in each step that were updated here."""
    rows: list[int] = []
    advance = step_inputs.StepInputs.advance

    def noted(self: Any, runner: Any, scheduled: Any) -> Any:
        rest = advance(self, runner, scheduled)
        if rest is not scheduled:
            assert not rest.scheduled_cached_reqs.req_ids
            rows.append(len(scheduled.scheduled_cached_reqs.req_ids))
        return rest

    monkeypatch.setattr(step_inputs.StepInputs, "advance", noted)
    return rows


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_step_is_served(
    asynchronous: bool, prepared: list[int], continued: list[int]
) -> None:
    """Steps with prompts, and steps of a changed batch, are served like all others."""
    run = LockstepRun(asynchronous=asynchronous, max_num_seqs=3, max_tokens_a_step=6)
    for request in range(2):
        run.add([1 + request, 2, 3], max_tokens=20, ignore_eos=True)
    run.run(6)
    run.add([9] * 12, max_tokens=4, ignore_eos=True)
    run.run(3)
    assert prepared == [2] * 6 + [3] * 3
    assert continued == [2] * 6 + [3] * 2
    run.finish()
    assert len(prepared) == 20


def test_memory_that_was_given_back_is_filled(
    prepared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the KV cache was asleep, the device may hold anything, the inputs' buffers included."""
    suits = mock.Mock(wraps=step_inputs.is_supported)
    monkeypatch.setattr(step_inputs, "is_supported", suits)
    run = LockstepRun()
    for number in range(2):
        run.add([1 + number, 2, 3], max_tokens=20, ignore_eos=True)
    run.run(6)
    assert suits.call_count == 1
    worker.of(run.ours.batch).lose_block_tables()
    for runner in (run.ours.runner, run.stock.runner):
        for name in ("seq_lens", "positions", "num_computed_tokens"):
            getattr(runner, name).fill_(77)
    run.finish()
    assert suits.call_count == 2
    assert len(prepared) == 20


def test_an_ended_request_is_free_at_its_removal() -> None:
    """Its state owns its slots, and the others of its last step go on."""
    run = LockstepRun()
    first = run.add([1, 2, 3], max_tokens=20, ignore_eos=True)
    run.add([2, 3], max_tokens=20, ignore_eos=True)
    run.run(3)
    batch = run.ours.batch
    ended = ref(run.ours.runner.requests.pop(first))
    assert ended() is not None
    worker.of(batch).remove_request(first, batch.req_id_to_index[first])
    assert ended() is None


def settled(run: LockstepRun, most: int) -> list[int]:
    """The number of steps whose tokens are not written yet, as each of some steps ends."""
    tokens = worker.of(run.ours.batch).history
    assert tokens is not None
    lengths = []
    for _ in range(most):
        run.run(1)
        lengths.append(len(tokens.in_flight))
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
def test_tokens_are_written_together_though_the_batch_changes(late: dict[str, Any]) -> None:
    """Rows move, requests come and leave, and their tokens still reach their own rows."""
    run = LockstepRun(max_model_len=200, max_num_seqs=4)
    first = run.add([1, 2, 3], max_tokens=60, ignore_eos=True)
    second = run.add([2, 3], max_tokens=60, ignore_eos=True)
    for number in range(2):
        run.add([4 + number], max_tokens=6, ignore_eos=True)
    lengths = settled(run, 5)
    run.abort(first)
    run.add([4, 5], max_tokens=60, ignore_eos=True, **late)
    lengths += settled(run, 5)
    assert lengths == [*range(1, 11)]
    known = run.settled()[second]
    assert len(known) >= 9
    assert known == run.truth(second)[: len(known)]
    run.finish()


@pytest.mark.parametrize("named", [{"drafts": 2}, {"processor": "older"}, {"processor": "user"}])
def test_tokens_that_are_read_are_written_in_each_step(named: dict[str, Any]) -> None:
    run = LockstepRun(max_model_len=200, **named)
    for number in range(3):
        run.add([1 + number, 2, 3], max_tokens=100, ignore_eos=True)
    run.run(4)
    assert max(settled(run, 12)) <= 2


@pytest.mark.parametrize(
    ("named", "updated", "served"),
    [
        ({"switch": "-step-inputs"}, False, False),
        ({"drafts": 2}, False, False),
        ({"own": "batch"}, False, False),
        ({"own": "_update_states"}, False, True),
    ],
)
def test_other_steps_are_upstreams(
    named: dict[str, Any], updated: bool, served: bool, prepared: list[int], continued: list[int]
) -> None:
    """A user's own way to update the batch is not replaced, and its inputs are served."""
    run = LockstepRun(**named)
    for request in range(3):
        run.add([1 + request, 2, 3], max_tokens=9, ignore_eos=True)
    run.run(9)
    assert (bool(continued), bool(prepared)) == (updated, served)


def test_few_requests_are_updated_by_upstream(
    prepared: list[int], continued: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their inputs are still prepared together, also as their number crosses the limit."""
    monkeypatch.setattr(step_inputs, "ENOUGH", 3)
    run = LockstepRun()
    for request in range(4):
        run.add([1 + request, 2, 3], max_tokens=4 + 3 * request, ignore_eos=True)
    run.run(8)
    assert continued == [4] * 3 + [3] * 3
    run.add([9, 8], max_tokens=9, ignore_eos=True)
    run.finish()
    assert continued == [4] * 3 + [3] * 4
    assert len(prepared) > 2 * len(continued)


@pytest.mark.parametrize("owner", ["runner", "class", "table"])
def test_a_method_that_is_replaced_later_is_called(
    owner: str,
    prepared: list[int],
    fallbacks: dict[tuple[str, str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = LockstepRun()
    for request in range(3):
        run.add([1 + request, 2, 3], max_tokens=20, ignore_eos=True)
    run.run(4)
    served = len(prepared)
    assert served
    runner = run.ours.runner
    target, name = {
        "runner": (runner, "_prepare_input_ids"),
        "class": (type(runner), "_prepare_input_ids"),
        "table": (runner.input_batch.block_table, "commit_block_table"),
    }[owner]
    calls: list[int] = []
    before = getattr(target, name)

    def replacement(*args: Any) -> Any:
        calls.append(1)
        return before(*args)

    monkeypatch.setattr(target, name, replacement)
    run.run(3)
    assert len(calls) == 3
    assert len(prepared) == served
    assert fallbacks == {("step-inputs", gauges.REPLACED): 1}


def make_state(sizes: list[int], seed: int) -> tuple[Any, list[BlockTable]]:
    """Make a runner's buffers with drawn contents, and a block table for each block size."""
    draw = torch.Generator().manual_seed(seed)
    most, length, device = 133, 3000, torch.device("cpu")

    def drawn(high: int, dtype: torch.dtype = torch.int32, size: int = most) -> torch.Tensor:
        return torch.randint(high, (size,), generator=draw, dtype=dtype)

    tables = []
    for size in sizes:
        table = BlockTable(size, most, -(-length // size), 4000, False, device, size, 1)
        table.block_table.gpu.random_(1, 2**20, generator=draw)
        table.slot_mapping.gpu.fill_(-7)
        tables.append(table)

    def buffer(size: int, dtype: torch.dtype) -> CpuGpuBuffer:
        made = CpuGpuBuffer(size, dtype=dtype, device=device, pin_memory=False)
        made.gpu = drawn(2, dtype, size)
        return made

    return SimpleNamespace(
        arange_np=np.arange(4000),
        num_computed_tokens=drawn(9),
        seq_lens=drawn(9),
        optimistic_seq_lens_cpu=torch.zeros(most, dtype=torch.int32),
        positions=drawn(9, torch.int64, 4000),
        input_ids=buffer(4000, torch.int32),
        query_start_loc=buffer(most + 1, torch.int32),
        discard_request_mask=buffer(most, torch.bool),
    ), tables


def make_rows(count: int, longest: int, sampled: bool, seed: int) -> step_inputs.Rows:
    """Draw a step of ``count`` requests of up to ``longest`` tokens each."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, longest + 1, count).astype(np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    computed = draw.integers(0, 900, count).astype(np.int32)
    previous = draw.permutation(count) if sampled else None
    tokens = None
    if previous is None or longest > 1:
        tokens = draw.integers(0, 1000, ends[-1]).astype(np.int32)
        if previous is not None:
            previous[draw.random(count) < 0.3] = -1
    return step_inputs.Rows(lengths, ends, computed, draw.random(count) < 0.5, previous, tokens)


@pytest.mark.parametrize("sampled", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [[16], [4, 16, 1], []])
@pytest.mark.parametrize(("count", "longest"), [(1, 1), (1, 1500), (21, 1), (21, 20)])
def test_kernel_equals_host(
    count: int, longest: int, sizes: list[int], sampled: torch.dtype | None
) -> None:
    """The kernel, interpreted, writes what the code for the CPU writes, and nothing else."""
    tokens = None
    if sampled is not None:
        tokens = torch.arange(2 * count, dtype=sampled).view(count, 2)[:, :1]
    rows = make_rows(count, longest, sampled is not None, seed=count)
    total = int(rows.ends[-1])
    one, tables = make_state(sizes, seed=count)
    other, others = make_state(sizes, seed=count)
    starts = one.query_start_loc.np
    starts[1 : count + 1] = rows.ends
    starts[count + 1 :] = total
    one.optimistic_seq_lens_cpu[:count] = torch.from_numpy(rows.computed + rows.lengths)
    one.discard_request_mask.np[:count] = rows.discarded
    expected = step_inputs.write_on_cpu(one, rows, tokens, tables)
    words = np.full(5000, 55, np.int32)
    size = step_inputs.pack(rows, words)
    assert (words[size:] == 55).all()
    indices = torch.full((133,), 99, dtype=torch.int32)
    with interpreted("prepare_inputs") as kernels:
        kernels.launch(
            other,
            torch.from_numpy(words),
            count,
            total,
            rows.tokens is not None,
            tokens,
            indices,
            step_inputs.table_arguments(others),
        )
    assert torch.equal(indices[:count], expected)
    assert (indices[count:] == 99).all()
    for name in ("num_computed_tokens", "seq_lens", "positions"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("input_ids", "query_start_loc", "discard_request_mask"):
        assert torch.equal(getattr(one, name).gpu, getattr(other, name).gpu), name
    for mine, theirs in zip(tables, others, strict=True):
        assert torch.equal(mine.slot_mapping.gpu, theirs.slot_mapping.gpu)


@pytest.mark.parametrize("prompts", [0, 1, 8, 9, 30])
def test_each_token_that_is_not_on_the_device_is_gathered(prompts: int) -> None:
    """Few prompts are gathered one by one, many together with all other rows."""
    count, draw = 40, np.random.default_rng(prompts)
    ids = torch.from_numpy(draw.integers(0, 1000, (count, 64)).astype(np.int32))
    runner: Any = SimpleNamespace(
        input_batch=SimpleNamespace(token_ids_cpu=ids.numpy(), token_ids_cpu_tensor=ids),
        arange_np=np.arange(2000),
    )
    lengths, previous = np.ones(count, np.int32), draw.permutation(count)
    rows = draw.choice(count, prompts, replace=False)
    lengths[rows] = draw.integers(2, 30, prompts)
    lengths[rows[:1]] = 1  # such as a prompt of one token
    previous[rows[::2]] = -1  # the others have their last token on the device
    ends, computed = np.cumsum(lengths), draw.integers(0, 30, count)
    tokens = step_inputs._gather(runner, lengths, ends, computed, previous)
    for row, (length, end, first) in enumerate(zip(lengths, ends, computed, strict=True)):
        known = length - (previous[row] >= 0)
        mine = tokens[end - length : end][:known]
        assert mine.tolist() == ids[row, first : first + known].tolist()
