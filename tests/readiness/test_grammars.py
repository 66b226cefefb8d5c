"""The feature grammars: the logits are those that upstream's function makes, and nothing waits.

Upstream's function and ours get the same steps. Ours sends masks to the simulated device, several
steps ahead of it. xgrammar's own kernel for CPUs applies them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import batches, modules
from support.asynchronous import cycling
from support.device import Device, installed, poison
from support.examples import draws
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.readiness import worker
from vllm.v1.readiness.sample import grammars
from vllm.v1.readiness.sample.grammars import Grammars
from vllm.v1.structured_output.utils import apply_grammar_bitmask

VOCABULARY = 70
#: Bytes that CUDA copies from pageable memory without a wait.
STAGED = 64 << 10


def make_batch(names: list[str], vocabulary: int = VOCABULARY) -> Any:
    """What the feature reads of a batch."""
    return SimpleNamespace(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        device=torch.device("cpu"),
        vocab_size=vocabulary,
        max_num_reqs=8,
    )


def request(name: str, structured: bool = True) -> Any:
    params = StructuredOutputsParams(regex="a") if structured else None
    return batches.state(batches.Spec([1], [], {"structured_outputs": params}), name)


class Step:
    """One step: masks, whose they are, drafts and logits.

    Args:
        names: of the batch's requests, in order.
        structured: whose masks there are, in the scheduler's order; not all are in the batch.
        drafts: request to the number of its drafts.
        seed: of masks and logits.
        vocabulary: number of logits.
    """

    def __init__(
        self,
        names: list[str],
        structured: list[str],
        drafts: dict[str, int],
        seed: int,
        vocabulary: int = VOCABULARY,
    ) -> None:
        chance = np.random.default_rng(seed)
        self.batch = make_batch(names, vocabulary)
        spec = {name: [5] * count for name, count in drafts.items() if count}
        self.scheduled: Any = SimpleNamespace(scheduled_spec_decode_tokens=spec)
        count = sum(1 + len(spec.get(name, ())) for name in structured)
        words = -(-vocabulary // 32)
        masks = chance.integers(-(1 << 31), 1 << 31, (count, words), dtype=np.int32)
        self.output: Any = SimpleNamespace(
            structured_output_request_ids=structured, grammar_bitmask=masks
        )
        positions = sum(1 + len(spec.get(name, ())) for name in names)
        values = chance.standard_normal((positions, vocabulary), dtype=np.float32)
        self.logits = torch.from_numpy(values)

    def stock(self) -> torch.Tensor:
        logits = self.logits.clone()
        apply_grammar_bitmask(self.scheduled, self.output, self.batch, logits)
        return logits

    def ours(self, feature: Grammars) -> torch.Tensor:
        """Masked logits; the scheduler then fills its masks anew."""
        logits = self.logits.clone()
        feature.batch = self.batch
        assert feature.apply_grammars(self.scheduled, self.output, logits)
        self.output.grammar_bitmask.fill(0)
        return logits


NAMES = [f"r{number}" for number in range(8)]
STEPS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        st.lists(st.sampled_from(NAMES), unique=True),
        st.one_of(st.just({}), st.dictionaries(st.sampled_from(NAMES), st.integers(0, 3))),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=10,
)


@contextmanager
def simulated(decisions: list[int]) -> Iterator[tuple[Device, Grammars]]:
    """The feature on a simulated device."""
    with installed(Device(cycling(decisions))) as device:
        yield device, Grammars(make_batch([]), 3)


@given(steps=STEPS, decisions=st.lists(st.integers(0, 5)), least=st.sampled_from([0, 4 << 20]))
@draws(200)
def test_logits_are_upstreams(steps: list[Any], decisions: list[int], least: int) -> None:
    """Rows with and without a grammar, drafts, both orders; the device lags behind."""
    with mock.patch.object(grammars, "_LEAST", least), simulated(decisions) as (device, feature):
        for number, drawn in enumerate(steps):
            step = Step(*drawn)
            expected = step.stock()
            for name in step.output.structured_output_request_ids[number % 3 :]:
                feature.add_request(request(name))
            assert batches.same_bits(step.ours(feature), expected)
        device.default.finish()
        assert device.rewritten == 0
        assert device.stream_waits == 0


EVERY: tuple[Any, Any, dict[str, Any], int] = (NAMES, NAMES[::-1], {}, 1)


def test_buffers_are_made_when_a_request_comes_and_more_if_the_device_lags() -> None:
    with simulated([]) as (device, feature):
        feature.add_request(request("plain", structured=False))
        assert device.allocations == 0
        for name in NAMES:
            feature.add_request(request(name))
        assert device.allocations == 2
        for seed in range(10):
            Step(*EVERY[:3], seed).ours(feature)
            device.default.finish()
        Step(*EVERY).ours(feature)
        Step(*EVERY).ours(feature)
        assert device.allocations == 2
        Step(*EVERY).ours(feature)
        assert device.allocations == 3


def test_only_masks_that_there_are_are_sent() -> None:
    vocabulary = 32 * 1000
    with simulated([]) as (device, feature):
        Step(NAMES, NAMES[2:3], {}, 0, vocabulary).ours(feature)
        Step(NAMES, NAMES, {}, 0, vocabulary).ours(feature)
    assert 4000 < device.uploads[0] < 4100
    assert device.uploads[1:] == [8 * 4000]


def test_nothing_is_sent_from_pageable_memory() -> None:
    """CUDA would wait for the forward pass, as upstream does. A tenth of a batch has a grammar."""
    names = [f"r{number}" for number in range(30)]
    step = Step(names, names[:3], {}, 0, 151_936)
    expected = step.stock()
    to = torch.Tensor.to
    with (
        simulated([]) as (device, feature),
        mock.patch.object(torch.Tensor, "to", autospec=True, side_effect=to) as sent,
    ):
        assert batches.same_bits(step.ours(feature), expected)
        tensors = [call.args[0] for call in sent.mock_calls]
        assert not [each for each in tensors if each.nbytes > STAGED and not device._memory(each)]


def test_what_is_unknown_is_upstreams() -> None:
    with simulated([]) as (device, feature):
        spoils: list[Callable[[Any], Any]] = [
            lambda step: step.output.grammar_bitmask.astype(np.int64),
            lambda step: torch.from_numpy(step.output.grammar_bitmask),
            lambda step: step.output.grammar_bitmask[0],
            lambda step: step.output.grammar_bitmask[:-1],
        ]
        for spoil in spoils:
            step = Step(*EVERY)
            feature.batch, step.output.grammar_bitmask = step.batch, spoil(step)
            logits = step.logits.clone()
            assert not feature.apply_grammars(step.scheduled, step.output, logits)
            assert torch.equal(logits, step.logits)
        step = Step(*EVERY)
        with pytest.raises(IndexError):
            apply_grammar_bitmask(step.scheduled, step.output, step.batch, step.logits[:-1])
        assert not feature.apply_grammars(step.scheduled, step.output, step.logits[:-1])
        assert not feature.apply_grammars(step.scheduled, step.output, step.logits.to("meta"))
        assert device.allocations == 0
    on_cpu = batches.empty(modules.overlaid, VOCABULARY)
    on_cpu.add_request(request("r1"))
    assert not on_cpu.readiness.apply_grammars(step.scheduled, step.output, step.logits)


def test_the_feature_follows_an_input_batch() -> None:
    """Its buffers are there as soon as a request with a grammar is."""
    with installed(Device(cycling([]))) as device:
        batch = batches.empty(modules.overlaid, VOCABULARY)
        before = device.allocations
        batch.add_request(request("one", structured=False))
        assert device.allocations == before
        batch.add_request(request("two"))
        assert device.allocations == before + 2
        feature = batch.readiness.grammars
        assert feature._names == {"two"}
        batch.remove_request("two")
        assert not feature._names
        step = Step(["one", "three"], ["three"], {}, 0)
        poison(feature._buffers[0].memory)
        assert batches.same_bits(
            step.ours(feature), Step(["one", "three"], ["three"], {}, 0).stock()
        )


class SampledError(Exception):
    """The runner has come to its sampler."""


@pytest.mark.parametrize("served", [True, False])
def test_the_runner_asks_the_feature_first(served: bool) -> None:
    """Upstream's function is called if the feature leaves the step to it."""
    module = modules.overlaid(modules.RUNNER)
    calls = mock.Mock()
    calls.ours.return_value = served
    calls.sample.side_effect = SampledError
    batch = SimpleNamespace()
    vars(worker.of(batch))["apply_grammars"] = calls.ours
    runner = SimpleNamespace(
        execute_model_state=(*[None] * 10,), input_batch=batch, _sample=calls.sample
    )
    upstreams = mock.patch.object(module, "apply_grammar_bitmask", calls.upstreams)
    with upstreams, pytest.raises(SampledError):
        module.GPUModelRunner.sample_tokens(runner, SimpleNamespace())
    names = [name for name, *_ in calls.mock_calls]
    assert names == ["ours", *["upstreams"] * (not served), "sample"]
