"""The outputs of a step on a simulated device: upstream's runner beside ours.

Both runners get the same tensors. Upstream's have them on the host at once; in ours they
arrive when the device's schedule, drawn by Hypothesis, lets them.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import device, modules
from support.batches import Spec, empty, fill
from support.examples import draws
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput, RoutedExpertsTensors, SamplerOutput
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.outputs import model_outputs

VOCABULARY = 37
HIDDEN = 5

seeds = st.integers(0, 2**32 - 1)
widths = st.sampled_from([None, 0, 1, 5, 20, VOCABULARY])


def logprobs_of(chance: torch.Generator, positions: int, width: int) -> LogprobsTensors:
    shape = (positions, width + 1)
    return LogprobsTensors(
        torch.randint(0, VOCABULARY, shape, generator=chance).to(torch.int32),
        torch.randn(shape, generator=chance),
        torch.randint(0, VOCABULARY, (positions,), generator=chance),
    )


def sampled_of(
    chance: torch.Generator, rows: int, drafts: int = 0, width: int | None = None
) -> SamplerOutput:
    """Draw samples; each row keeps one token or more, and the rest is rejected."""
    ids = torch.randint(0, VOCABULARY, (rows, 1 + drafts), generator=chance).to(torch.int32)
    kept = torch.randint(1, 2 + drafts, (rows, 1), generator=chance)
    ids[torch.arange(1 + drafts) >= kept] = -1
    positions = rows * (1 + drafts)
    return SamplerOutput(ids, None if width is None else logprobs_of(chance, positions, width))


class RunnerUnderTest:
    """A model runner, upstream's or ours, as far as its outputs need it.

    Attributes:
        prompt_logprobs: the logprobs that the sampler gives for a chunk of a prompt.
        syncs: number of waits for the whole device.
    """

    def __init__(self, load: Any, requests: int, asynchronous: bool = False) -> None:
        self.module = load(modules.RUNNER)
        batch = empty(load, VOCABULARY, max_num_reqs=8, num_spec_tokens=3)
        fill(batch, [Spec([1, 2, 3], [], {}) for _ in range(requests)])
        self.runner = object.__new__(self.module.GPUModelRunner)
        self.syncs = 0
        vars(self.runner).update(
            input_batch=batch,
            requests={r: SimpleNamespace(output_token_ids=[]) for r in batch.req_ids},
            num_prompt_logprobs={},
            discard_request_mask=SimpleNamespace(np=np.zeros(8, bool)),
            use_async_scheduling=asynchronous,
            routed_experts_initialized=False,
            max_model_len=256,
            device=torch.device("cpu"),
            sampled_token_ids_pinned_cpu=torch.empty((8, 1), dtype=torch.int64),
            transfer_event=torch.Event(),
            query_start_loc=SimpleNamespace(np=np.array([0, 0])),
            _sync_device=self._sync,
            model=SimpleNamespace(compute_logits=lambda hidden: hidden),
            sampler=SimpleNamespace(
                compute_logprobs=lambda logits: logits, gather_logprobs=self._gather
            ),
        )
        self.prompt_logprobs: LogprobsTensors | None = None
        self.stream = torch.cuda.Stream()
        #: What only our output classes take.
        self._extra = {"outputs": batch.readiness.outputs} if load is modules.overlaid else {}

    def _sync(self) -> None:
        self.syncs += 1

    def _gather(self, _: Any, count: int, targets: torch.Tensor) -> LogprobsTensors:
        assert self.prompt_logprobs is not None
        assert len(targets) == len(self.prompt_logprobs.logprobs)
        return self.prompt_logprobs

    @property
    def outputs(self) -> Any:
        return self.runner.input_batch.readiness.outputs

    def bookkeep(self, sampled: SamplerOutput) -> tuple[Any, ...]:
        """Show the samples of a synchronous step."""
        rows = len(sampled.sampled_token_ids)
        shown: tuple[Any, ...] = self.runner._bookkeeping_sync(
            SimpleNamespace(total_num_scheduled_tokens=rows, num_scheduled_tokens={}),
            *(sampled, None, torch.empty(rows, HIDDEN), rows),
        )
        return shown

    def output(
        self,
        sampled: SamplerOutput,
        discarded: Sequence[int] = (),
        experts: RoutedExpertsTensors | None = None,
    ) -> Any:
        """Start the output of an asynchronous step."""
        return self.module.AsyncGPUModelRunnerOutput(
            model_runner_output=ModelRunnerOutput(req_ids=[], req_id_to_index={}),
            sampled_token_ids=sampled.sampled_token_ids,
            logprobs_tensors=sampled.logprobs_tensors,
            invalid_req_indices=discarded,
            async_output_copy_stream=self.stream,
            vocab_size=VOCABULARY,
            routed_experts=experts,
            **self._extra,
        )

    def pooler_output(self, pooled: Any, finished: list[bool]) -> Any:
        """Start the output of a step of a pooling model."""
        return self.module.AsyncGPUPoolingModelRunnerOutput(
            ModelRunnerOutput(req_ids=[], req_id_to_index={}),
            *(pooled, finished, self.stream),
            **self._extra,
        )

    def ask_prompt_logprobs(self, widths: dict[str, int], length: int) -> None:
        """Let requests ask for logprobs of their prompts."""
        self.runner.num_prompt_logprobs = dict(widths)
        self.runner.requests = {
            req_id: SimpleNamespace(
                prompt_token_ids=list(range(length)),
                in_progress_prompt_logprobs_cpu=None,
                num_computed_tokens=0,
            )
            for req_id in widths
        }

    def compute_chunk(self, req_id: str, chunk: int, logprobs: LogprobsTensors) -> dict[str, Any]:
        """Compute a chunk of a prompt; the logprobs of each prompt that ends with it."""
        self.prompt_logprobs = copy.deepcopy(logprobs)
        hidden = torch.empty(chunk, HIDDEN)
        ended: dict[str, Any] = self.runner._get_prompt_logprobs_dict(hidden, {req_id: chunk})
        self.runner.requests[req_id].num_computed_tokens += chunk
        self.prompt_logprobs.logprobs.fill_(-99)  # the memory is used again
        return ended


class Pair(NamedTuple):
    """Both runners, and the device."""

    stock: RunnerUnderTest
    ours: RunnerUnderTest
    device: device.Device


@contextmanager
def pair(seed: int, rows: int, asynchronous: bool = False) -> Iterator[Pair]:
    """Make both runners on a device whose schedule is drawn with ``seed``."""
    with device.installed(device.Device(random.Random(seed).randrange)) as simulation:
        stock = RunnerUnderTest(modules.pristine, rows, asynchronous)
        yield Pair(stock, RunnerUnderTest(modules.overlaid, rows, asynchronous), simulation)
        assert simulation.stream_waits == 0


@pytest.fixture
def ours() -> Iterator[RunnerUnderTest]:
    """Our runner with three requests, on a device where copies arrive when they are waited for."""
    with device.installed(device.Device(lambda _: 0)):
        yield RunnerUnderTest(modules.overlaid, 3)


def as_lists(logprobs: Any) -> Any:
    """Return logprobs as lists, which copies them."""
    if logprobs is None:
        return None
    ids, values, ranks, ends = logprobs
    return ids.tolist(), values.tolist(), ranks.tolist(), ends


@draws(60)
@given(seed=seeds, rows=st.integers(1, 5), drafts=st.integers(0, 3), width=widths, data=st.data())
def test_a_synchronous_step_shows_its_samples(
    seed: int, rows: int, drafts: int, width: int | None, data: st.DataObject
) -> None:
    chance = torch.Generator().manual_seed(seed)
    discarded = data.draw(st.sets(st.integers(0, rows - 1)))
    with pair(seed, rows) as (stock, ours, simulation):
        steps = []
        for _ in range(3):
            sampled = sampled_of(chance, rows, drafts, width)
            before = fences.counts().get("output", 0)
            shown = []
            for each in (stock, ours):
                each.runner.discard_request_mask.np[sorted(discarded)] = True
                copied = copy.deepcopy(sampled)
                shown.append(each.bookkeep(copied))
                # The next work on the device may use the memory for something else.
                copied.sampled_token_ids.fill_(-99)
            assert fences.counts().get("output", 0) - before <= 1
            steps.append([(as_lists(each[1]), each[2], each[1]) for each in shown])
        assert simulation.copies
    for theirs, mine in steps:
        assert mine[:2] == theirs[:2]
        # The values of one step stay through the next ones.
        assert as_lists(mine[2]) == theirs[0]
    batches = [each.runner.input_batch.token_ids_cpu for each in (stock, ours)]
    assert (batches[0] == batches[1]).all()


@draws(60)
@given(
    seed=seeds,
    rows=st.integers(1, 5),
    drafts=st.integers(0, 3),
    width=widths,
    routed=st.booleans(),
    order=st.permutations(range(3)),
    small=st.sampled_from([model_outputs.SMALL, 0]),
)
def test_an_asynchronous_output_gives_its_samples(
    seed: int, rows: int, drafts: int, width: int | None, routed: bool, order: list[int], small: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    with (
        pair(seed, rows, True) as (stock, ours, simulation),
        mock.patch.object(model_outputs, "SMALL", small),
    ):
        steps = []
        for _ in range(3):
            sampled = sampled_of(chance, rows, drafts, width)
            discarded = [row for row in range(rows) if torch.rand(1, generator=chance) < 0.2]
            experts = None
            if routed:
                data = torch.randint(0, 255, (rows, 2, 2), generator=chance).to(torch.uint8)
                experts = RoutedExpertsTensors(data, torch.arange(rows))
            steps.append(
                [
                    each.output(copy.deepcopy(sampled), discarded, copy.deepcopy(experts))
                    for each in (stock, ours)
                ]
            )
        assert simulation.copies
        for step in order:
            theirs, mine = (output.get_output() for output in steps[step])
            assert mine.sampled_token_ids == theirs.sampled_token_ids
            assert as_lists(mine.logprobs) == as_lists(theirs.logprobs)
            assert (mine.routed_experts is None) == (theirs.routed_experts is None)
            routes = (mine.routed_experts or (), theirs.routed_experts or ())
            assert all((one == other).all() for one, other in zip(*routes, strict=True))


@draws(60)
@given(seed=seeds, finished=st.lists(st.booleans(), min_size=1, max_size=7), kind=st.integers(0, 2))
def test_a_poolers_output_reaches_the_requests_that_have_finished(
    seed: int, finished: list[bool], kind: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    pooled: Any = torch.randn(len(finished), 4, generator=chance)
    if kind == 1:
        pooled = [torch.randn(n, 4, generator=chance) for n in range(len(finished))]
    if kind == 2:
        pooled = [row.to(torch.bfloat16) if n % 2 else None for n, row in enumerate(pooled)]
    with pair(seed, 1, True) as (stock, ours, _):
        outputs = [each.pooler_output(copy.deepcopy(pooled), finished) for each in (stock, ours)]
        theirs, mine = (output.get_output().pooler_output for output in outputs)
    assert [row is None for row in mine] == [row is None for row in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


@pytest.mark.parametrize("width", [0, VOCABULARY])
def test_kept_token_ids_keep_no_large_output(ours: RunnerUnderTest, width: int) -> None:
    """The history keeps those of up to 17 steps, and a vocabulary's logprobs take megabytes."""
    chance = torch.Generator().manual_seed(1)
    ours.outputs.readbacks.least = 64
    kept = []
    with mock.patch.object(model_outputs, "SMALL", 100):
        for _ in range(17):
            output = ours.output(sampled_of(chance, 3, 0, width))
            kept.append(output.sampled_token_ids_cpu)
            output.get_output()
    (pinned,) = (held.value for held in ours.outputs.readbacks.held())
    assert pinned <= 17 * 256 + 2 * 2048


def test_the_device_memory_of_an_output_is_free_once_it_was_given(ours: RunnerUnderTest) -> None:
    """As upstream frees it, and not only when the next step starts a readback."""
    chance = torch.Generator().manual_seed(1)
    sampled = sampled_of(chance, 2, 0, VOCABULARY)
    pooled = torch.randn(2, 4, generator=chance)
    sources = [sampled.sampled_token_ids, *sampled.logprobs_tensors[:3], pooled]
    memory = [StorageWeakRef(source.untyped_storage()) for source in sources]
    outputs = [ours.output(sampled), ours.pooler_output(pooled, [True, True])]
    del sampled, pooled, sources
    assert not any(reference.expired() for reference in memory)
    for output in outputs:
        output.get_output()
    assert all(reference.expired() for reference in memory)


@draws(60)
@given(
    seed=seeds,
    asynchronous=st.booleans(),
    width=st.sampled_from([0, 1, 5, 20, VOCABULARY]),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    gone=st.booleans(),
)
def test_a_prompts_logprobs_arrive_whole_in_any_chunks(
    seed: int, asynchronous: bool, width: int, chunks: list[int], gone: bool
) -> None:
    """A second request's chunks lie between; it may leave with its copies in flight."""
    chance = torch.Generator().manual_seed(seed)
    length = sum(chunks)
    with pair(seed, 2, asynchronous) as (stock, ours, _):
        widths = {"r1": 3, "r0": width}
        for each in (stock, ours):
            each.ask_prompt_logprobs(widths, length)
        theirs: dict[str, Any] = {}
        mine: dict[str, Any] = {}
        for number, chunk in enumerate(chunks):
            for req_id in [r for r in widths if r in stock.runner.num_prompt_logprobs]:
                left = length - stock.runner.requests[req_id].num_computed_tokens - 1
                logprobs = logprobs_of(chance, min(chunk, left), widths[req_id])
                for each, ended in ((stock, theirs), (ours, mine)):
                    ended.update(each.compute_chunk(req_id, chunk, logprobs))
                    if gone and number == len(chunks) // 2 and req_id == "r1":
                        del each.runner.requests[req_id]
                        each.runner.num_prompt_logprobs.pop(req_id, None)
        assert "r0" in theirs
        assert theirs.keys() == mine.keys()
        if asynchronous:
            ours.output(sampled_of(chance, 1)).get_output()
        for req_id, expected in theirs.items():
            assert as_lists(mine[req_id]) == as_lists(expected)
            assert [part.dtype for part in mine[req_id][:3]] == [
                part.dtype for part in expected[:3]
            ]
        assert ours.syncs == 0


def test_prompts_beyond_the_limit_of_pinned_memory_are_upstreams(ours: RunnerUnderTest) -> None:
    outputs = ours.outputs
    outputs.readbacks.most = outputs.readbacks.least * 2
    first, second = (outputs.empty_prompt_logprobs(8, 1) for _ in range(2))
    chunk = logprobs_of(torch.Generator(), 2, 0)
    assert outputs.start_prompt_logprobs(first, slice(0, 2), *chunk[:3])
    assert not outputs.start_prompt_logprobs(second, slice(0, 2), *chunk[:3])
    assert outputs.finish_prompt_logprobs([first], False)
    assert not outputs.finish_prompt_logprobs([first, second], False)
    del first
    third = outputs.empty_prompt_logprobs(8, 1)
    assert outputs.start_prompt_logprobs(third, slice(0, 2), *chunk[:3])


def test_switched_off_upstreams_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_READINESS", "-readback")
    with pair(0, 2) as (_, ours, simulation):
        sampled = sampled_of(torch.Generator(), 2, 0, 3)
        assert ours.bookkeep(sampled)[2] == sampled.sampled_token_ids.tolist()
        assert simulation.allocations == simulation.copies == 0


def test_earlier_copies_of_upstreams_are_waited_for_as_well(ours: RunnerUnderTest) -> None:
    """Routed experts, and the tokens that each request has accepted: in upstream's memory."""
    issued = torch.Event.device.allocate(4)
    issued.copy_(torch.arange(4, dtype=torch.uint8), non_blocking=True)
    assert issued.tolist() != [0, 1, 2, 3]
    ours.bookkeep(sampled_of(torch.Generator(), 3))
    assert issued.tolist() == [0, 1, 2, 3]
