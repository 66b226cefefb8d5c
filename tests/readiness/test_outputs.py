"""What a step shows the host, on a simulated device: upstream's runner beside ours.

The functions of both runners get the same tensors. Upstream's have them on the host at
once; in ours they arrive when the device's schedule, drawn by Hypothesis, lets them.
"""

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import device, modules
from support.batches import Spec, empty, fill
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput, RoutedExpertsTensors, SamplerOutput
from vllm.v1.readiness import fences

VOCABULARY = 37
HIDDEN = 5

seeds = st.integers(0, 2**32 - 1)
widths = st.sampled_from([None, 0, 1, 5, 20, VOCABULARY])


def simulated(seed: int) -> device.Device:
    return device.Device(random.Random(seed).randrange)


def logprobs_of(chance: torch.Generator, positions: int, width: int) -> LogprobsTensors:
    shape = (positions, width + 1)
    return LogprobsTensors(
        torch.randint(0, VOCABULARY, shape, generator=chance).to(torch.int32),
        torch.randn(shape, generator=chance),
        torch.randint(0, VOCABULARY, (positions,), generator=chance),
    )


def sampled_of(chance: torch.Generator, rows: int, drafts: int, width: int | None) -> SamplerOutput:
    """Each row keeps one token or more, the rest is rejected."""
    ids = torch.randint(0, VOCABULARY, (rows, 1 + drafts), generator=chance).to(torch.int32)
    kept = torch.randint(1, 2 + drafts, (rows, 1), generator=chance)
    ids[torch.arange(1 + drafts) >= kept] = -1
    positions = rows * (1 + drafts)
    return SamplerOutput(ids, None if width is None else logprobs_of(chance, positions, width))


class Half:
    """What `_bookkeeping_sync` and its neighbours need of a runner, upstream's or ours."""

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
            _sync_device=self._sync,
            model=SimpleNamespace(compute_logits=lambda hidden: hidden),
            sampler=SimpleNamespace(
                compute_logprobs=lambda logits: logits, gather_logprobs=self._gather
            ),
        )
        #: What only our output classes take.
        self.extra = {"outputs": batch.readiness.outputs} if load is modules.overlaid else {}
        self.prompt_logprobs: LogprobsTensors | None = None

    def _sync(self) -> None:
        self.syncs += 1

    def _gather(self, _: Any, count: int, targets: torch.Tensor) -> LogprobsTensors:
        assert self.prompt_logprobs is not None
        assert len(targets) == len(self.prompt_logprobs.logprobs)
        return self.prompt_logprobs

    def bookkeep(self, sampled: SamplerOutput) -> tuple[Any, ...]:
        rows = len(sampled.sampled_token_ids)
        found: tuple[Any, ...] = self.runner._bookkeeping_sync(
            SimpleNamespace(total_num_scheduled_tokens=rows, num_scheduled_tokens={}),
            sampled,
            None,
            torch.empty(rows, HIDDEN),
            rows,
        )
        return found


def plain(logprobs: Any) -> Any:
    """Logprobs as lists, which copies them."""
    if logprobs is None:
        return None
    ids, values, ranks, ends = logprobs
    return ids.tolist(), values.tolist(), ranks.tolist(), ends


@settings(max_examples=150, deadline=None)
@given(seed=seeds, rows=st.integers(1, 5), drafts=st.integers(0, 3), width=widths, data=st.data())
def test_a_synchronous_step_shows_what_was_sampled(
    seed: int, rows: int, drafts: int, width: int | None, data: st.DataObject
) -> None:
    chance = torch.Generator().manual_seed(seed)
    discarded = data.draw(st.sets(st.integers(0, rows - 1)))
    with device.installed(simulated(seed)) as simulation:
        stock, ours = (Half(load, rows) for load in (modules.pristine, modules.overlaid))
        kept = []
        for _ in range(3):
            sampled = sampled_of(chance, rows, drafts, width)
            before = fences.counts().get("output", 0)
            shown = []
            for half in (stock, ours):
                half.runner.discard_request_mask.np[sorted(discarded)] = True
                theirs = copy.deepcopy(sampled)
                shown.append(half.bookkeep(theirs))
                # What follows on the device may use the memory for something else.
                theirs.sampled_token_ids.fill_(-99)
            assert fences.counts().get("output", 0) - before <= 1
            kept.append([(plain(each[1]), each[2], each[1]) for each in shown])
        assert simulation.copies
        assert simulation.stream_waits == 0
    for theirs, mine in kept:
        assert mine[:2] == theirs[:2]
        # ... and what was shown of one step stays as it was through the next ones.
        assert plain(mine[2]) == theirs[0]
    same = [half.runner.input_batch.token_ids_cpu for half in (stock, ours)]
    assert (same[0] == same[1]).all()


@settings(max_examples=150, deadline=None)
@given(
    seed=seeds,
    rows=st.integers(1, 5),
    drafts=st.integers(0, 3),
    width=widths,
    routed=st.booleans(),
    order=st.permutations(range(3)),
)
def test_an_asynchronous_output_gives_what_was_sampled(
    seed: int, rows: int, drafts: int, width: int | None, routed: bool, order: list[int]
) -> None:
    chance = torch.Generator().manual_seed(seed)
    with device.installed(simulated(seed)) as simulation:
        stock, ours = (Half(load, rows, True) for load in (modules.pristine, modules.overlaid))
        stream = torch.cuda.Stream()
        steps = []
        for _ in range(3):
            sampled = sampled_of(chance, rows, drafts, width)
            discarded = [row for row in range(rows) if torch.rand(1, generator=chance) < 0.2]
            experts = None
            if routed:
                data = torch.randint(0, 255, (rows, 2, 2), generator=chance).to(torch.uint8)
                experts = RoutedExpertsTensors(data, torch.arange(rows))
            outputs = []
            for half in (stock, ours):
                theirs = copy.deepcopy((sampled, experts))
                outputs.append(
                    half.module.AsyncGPUModelRunnerOutput(
                        model_runner_output=ModelRunnerOutput(req_ids=[], req_id_to_index={}),
                        sampled_token_ids=theirs[0].sampled_token_ids,
                        logprobs_tensors=theirs[0].logprobs_tensors,
                        invalid_req_indices=discarded,
                        async_output_copy_stream=stream,
                        vocab_size=VOCABULARY,
                        routed_experts=theirs[1],
                        **half.extra,
                    )
                )
                del theirs
            steps.append(outputs)
        assert simulation.copies
        for step in order:
            theirs, mine = (output.get_output() for output in steps[step])
            assert mine.sampled_token_ids == theirs.sampled_token_ids
            assert plain(mine.logprobs) == plain(theirs.logprobs)
            assert (mine.routed_experts is None) == (theirs.routed_experts is None)
            for one, other in zip(
                mine.routed_experts or (), theirs.routed_experts or (), strict=True
            ):
                assert (one == other).all()
        assert simulation.stream_waits == 0


@settings(max_examples=100, deadline=None)
@given(seed=seeds, finished=st.lists(st.booleans(), min_size=1, max_size=7), kind=st.integers(0, 2))
def test_a_pooler_s_output_reaches_the_requests_that_have_finished(
    seed: int, finished: list[bool], kind: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    pooled: Any = torch.randn(len(finished), 4, generator=chance)
    if kind == 1:
        pooled = [torch.randn(n, 4, generator=chance) for n in range(len(finished))]
    if kind == 2:
        pooled = [row.to(torch.bfloat16) if n % 2 else None for n, row in enumerate(pooled)]
    with device.installed(simulated(seed)):
        stock, ours = (Half(load, 1, True) for load in (modules.pristine, modules.overlaid))
        stream = torch.cuda.Stream()
        outputs = []
        for half in (stock, ours):
            outputs.append(
                half.module.AsyncGPUPoolingModelRunnerOutput(
                    ModelRunnerOutput(req_ids=[], req_id_to_index={}),
                    copy.deepcopy(pooled),
                    finished,
                    stream,
                    **half.extra,
                )
            )
        theirs, mine = (output.get_output().pooler_output for output in outputs)
        assert [row is None for row in mine] == [row is None for row in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


def test_the_device_memory_of_an_output_is_free_once_it_was_given() -> None:
    """As upstream frees it, and not only when the next step starts a readback."""
    chance = torch.Generator().manual_seed(1)
    with device.installed(device.Device(lambda _: 0)):
        half = Half(modules.overlaid, 2, True)
        sampled = sampled_of(chance, 2, 0, VOCABULARY)
        ids, logprobs = sampled.sampled_token_ids, sampled.logprobs_tensors
        pooled = torch.randn(2, 4, generator=chance)
        sources = [ids, *logprobs[:3], pooled]
        memory = [StorageWeakRef(source.untyped_storage()) for source in sources]
        given: Any = (ModelRunnerOutput(req_ids=[], req_id_to_index={}), ids, logprobs, [])
        output = half.module.AsyncGPUModelRunnerOutput(
            *given, torch.cuda.Stream(), VOCABULARY, **half.extra
        )
        pooler_output = half.module.AsyncGPUPoolingModelRunnerOutput(
            given[0], pooled, [True, True], torch.cuda.Stream(), **half.extra
        )
        del sampled, ids, logprobs, pooled, sources, given
        assert not any(each.expired() for each in memory)
        output.get_output()
        pooler_output.get_output()
        assert all(each.expired() for each in memory)


def test_positions_of_a_prompt_that_are_not_computed_hold_nobody_else_s_logprobs() -> None:
    """The first five came from a prefix cache: what lay in the buffer before is not shown."""
    chance = torch.Generator().manual_seed(1)
    length, cached = 9, 5
    with device.installed(simulated(0)):
        half = Half(modules.overlaid, 1)
        half.runner.query_start_loc = SimpleNamespace(np=np.array([0]))
        half.runner.num_prompt_logprobs = {"r0": 2}
        half.runner.requests = {
            "r0": SimpleNamespace(
                prompt_token_ids=list(range(length)),
                in_progress_prompt_logprobs_cpu=None,
                num_computed_tokens=cached,
            )
        }
        half.prompt_logprobs = logprobs_of(chance, length - cached - 1, 2)
        hidden = torch.empty(length - cached, HIDDEN)
        found = half.runner._get_prompt_logprobs_dict(hidden, {"r0": length - cached})["r0"]
        for part, computed in zip(found[:3], half.prompt_logprobs[:3], strict=True):
            assert not part[:cached].any()
            assert torch.equal(part[cached:], computed.to(part.dtype))


def test_a_pooler_s_output_of_another_size_is_refused_as_upstream_refuses_it() -> None:
    with device.installed(simulated(0)):
        half = Half(modules.overlaid, 1, True)
        with pytest.raises(ValueError, match="does not match"):
            half.module.AsyncGPUPoolingModelRunnerOutput(
                ModelRunnerOutput(req_ids=[], req_id_to_index={}),
                torch.zeros(2, 4),
                [True],
                torch.cuda.Stream(),
                outputs=half.runner.input_batch.readiness.outputs,
            )


@settings(max_examples=150, deadline=None)
@given(
    seed=seeds,
    asynchronous=st.booleans(),
    width=st.sampled_from([0, 1, 5, 20, VOCABULARY]),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    gone=st.booleans(),
)
def test_a_prompt_s_logprobs_arrive_whole_however_it_is_chunked(
    seed: int, asynchronous: bool, width: int, chunks: list[int], gone: bool
) -> None:
    """A second request's chunks lie between; it may leave with its copies in flight."""
    chance = torch.Generator().manual_seed(seed)
    length = sum(chunks)
    with device.installed(simulated(seed)) as simulation:
        halves = [Half(load, 2, asynchronous) for load in (modules.pristine, modules.overlaid)]
        for half in halves:
            half.runner.num_prompt_logprobs = {"r0": width, "r1": 3}
            half.runner.query_start_loc = SimpleNamespace(np=np.array([0, 0]))
            half.runner.requests = {
                req_id: SimpleNamespace(
                    prompt_token_ids=list(range(length)),
                    in_progress_prompt_logprobs_cpu=None,
                    num_computed_tokens=0,
                )
                for req_id in ("r0", "r1")
            }
        found: list[dict[str, Any]] = [{}, {}]
        for number, chunk in enumerate(chunks):
            leaves = gone and number == len(chunks) // 2
            for req_id in ("r1", "r0"):
                if req_id not in halves[0].runner.num_prompt_logprobs:
                    continue
                count = min(
                    chunk, length - halves[0].runner.requests[req_id].num_computed_tokens - 1
                )
                made = logprobs_of(chance, count, width if req_id == "r0" else 3)
                for half, results in zip(halves, found, strict=True):
                    half.prompt_logprobs = copy.deepcopy(made)
                    hidden = torch.empty(chunk, HIDDEN)
                    ended = half.runner._get_prompt_logprobs_dict(hidden, {req_id: chunk})
                    results.update(ended)
                    half.runner.requests[req_id].num_computed_tokens += chunk
                    half.prompt_logprobs.logprobs.fill_(-99)  # the memory is used again
                    if leaves and req_id == "r1":
                        del half.runner.requests[req_id]
                        half.runner.num_prompt_logprobs.pop(req_id, None)
        assert "r0" in found[0]
        assert found[0].keys() == found[1].keys()
        if asynchronous:
            ours = halves[1]
            sampled = sampled_of(chance, 1, 0, None)
            ours.module.AsyncGPUModelRunnerOutput(
                model_runner_output=ModelRunnerOutput(req_ids=[], req_id_to_index={}),
                sampled_token_ids=sampled.sampled_token_ids,
                logprobs_tensors=None,
                invalid_req_indices=[],
                async_output_copy_stream=torch.cuda.Stream(),
                vocab_size=VOCABULARY,
                outputs=ours.runner.input_batch.readiness.outputs,
            ).get_output()
        for req_id, theirs in found[0].items():
            mine = found[1][req_id]
            assert plain(mine) == plain(theirs)
            assert [part.dtype for part in mine[:3]] == [part.dtype for part in theirs[:3]]
        assert halves[1].syncs == 0
        assert simulation.stream_waits == 0


def test_beyond_the_pinned_memory_there_may_be_prompts_go_upstream_s_way() -> None:
    with device.installed(simulated(0)):
        outputs = Half(modules.overlaid, 1).runner.input_batch.readiness.outputs
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


def test_nan_counts_arrive() -> None:
    with device.installed(simulated(3)):
        half = Half(modules.overlaid, 3)
        logits = torch.zeros(3, VOCABULARY)
        logits[1, :4] = float("nan")
        assert half.runner._get_nans_in_logits(logits) == {"r0": 0, "r1": 4, "r2": 0}


def test_switched_off_upstream_s_copies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_READINESS", "-readback")
    with device.installed(simulated(0)) as simulation:
        half = Half(modules.overlaid, 2)
        sampled = sampled_of(torch.Generator(), 2, 0, 3)
        found = half.bookkeep(sampled)
        assert found[2] == sampled.sampled_token_ids.tolist()
        assert simulation.allocations == simulation.copies == 0


def test_what_upstream_has_issued_before_is_waited_for_as_well() -> None:
    """Routed experts, and the tokens that each request has accepted: in upstream's memory."""
    with device.installed(simulated(1)) as simulation:
        half = Half(modules.overlaid, 2)
        issued = simulation.allocate(4)
        issued.copy_(torch.arange(4, dtype=torch.uint8), non_blocking=True)
        assert issued.tolist() != [0, 1, 2, 3]
        half.bookkeep(sampled_of(torch.Generator(), 2, 0, None))
        assert issued.tolist() == [0, 1, 2, 3]


def test_each_fence_is_told_with_its_owner_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(fences, "listeners", [lambda *fence: told.append(fence)])
    with device.installed(device.Device(lambda _: 0)):
        half = Half(modules.overlaid, 2)
        half.bookkeep(sampled_of(torch.Generator(), 2, 0, 3))
    ((owner, began, ended),) = told
    assert owner == "output"
    assert 0 < began <= ended
