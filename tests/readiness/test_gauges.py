"""What is left to upstream is counted with its reason, and what is held can be asked for."""

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill
from support.lockstep import VOCABULARY, LockstepRun, fail_third_slot
from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.sample.bad_words import BadWords
from vllm.v1.readiness.sample.penalties import Penalties
from vllm.v1.readiness.sample.slots import Slots

PENALTY: dict[str, Any] = {"presence_penalty": -0.6}
WORDS: dict[str, Any] = {"bad_words": [[0], [1, 2]]}
EACH = pytest.mark.parametrize(("kind", "params"), [(Penalties, PENALTY), (BadWords, WORDS)])


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], int]]:
    """The counts of this test alone."""
    gc.collect()  # batches of other tests
    fallbacks: dict[tuple[str, str], int] = {}
    monkeypatch.setattr(gauges, "_fallbacks", fallbacks)
    yield fallbacks


def held(slots: Any) -> dict[str, int]:
    return {metric: value for metric, _, value in slots.held()}


@EACH
def test_each_step_without_a_slot_for_all_is_counted(
    kind: type[Slots],
    params: dict[str, Any],
    counted: dict[tuple[str, str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_READINESS_SLOTS", "2")
    lockstep = LockstepRun()
    slots = lockstep.ours.batch.readiness.find(kind)
    first, *_ = (lockstep.add([n, 1], max_tokens=20, **params) for n in range(3))
    lockstep.run(4)
    assert counted == {(kind.name, gauges.NO_SLOT): 4}
    assert held(slots)[gauges.SLOTS] == 0
    lockstep.abort(first)
    lockstep.run(2)
    assert counted == {(kind.name, gauges.NO_SLOT): 4}
    assert held(slots)[gauges.SLOTS] == 2
    assert held(slots)[gauges.SLOT_BYTES] > 0
    lockstep.finish()


@EACH
def test_steps_without_memory_are_counted(
    kind: type[Slots],
    params: dict[str, Any],
    counted: dict[tuple[str, str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lockstep = LockstepRun()
    fail_third_slot(monkeypatch, lockstep.ours.batch.readiness.find(kind))
    for n in range(3):
        lockstep.add([n, 1], **params)
    lockstep.run(3)
    assert counted == {(kind.name, gauges.NO_ROOM): 3}


def test_odd_requests_are_counted_and_steps_that_are_served_are_not(
    counted: dict[tuple[str, str], int],
) -> None:
    lockstep = LockstepRun()
    lockstep.add([1, 2], max_tokens=40, **PENALTY, **WORDS)
    lockstep.run(4)
    assert counted == {}
    lockstep.add([3], max_tokens=3, bad_words=[[-1]])
    lockstep.run(3)
    assert counted == {("bad-words", gauges.OTHER_INPUT): 3}
    lockstep.finish()


def test_a_feature_that_is_off_does_not_fall_back(counted: dict[tuple[str, str], int]) -> None:
    lockstep = LockstepRun(switch="-penalties,-bad-words")
    lockstep.add([1, 2], **PENALTY, **WORDS)
    lockstep.finish()
    assert counted == {}


def test_logits_of_another_batch_are_counted(counted: dict[tuple[str, str], int]) -> None:
    batch = empty(modules.overlaid, VOCABULARY)
    fill(batch, [Spec([1], [2], PENALTY)] * 2)
    logits = torch.randn(2, VOCABULARY)
    batch.readiness.begin_step()
    batch.readiness.prepare(logits, None)
    assert Penalties.take(batch.sampling_metadata, logits[:1])[0] is None
    assert counted == {("penalties", gauges.OTHER_INPUT): 1}


class Holding:
    """Something that holds memory."""

    def __init__(self, *values: gauges.Value) -> None:
        self.values = values

    def held(self) -> tuple[gauges.Value, ...]:
        return self.values


def test_holders_are_added_up_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "_holders", type(gauges._holders)())
    one = Holding(
        gauges.Value("slots", ("penalties",), 3), gauges.Value("pinned_bytes", ("readback",), 8)
    )
    two = Holding(gauges.Value("slots", ("penalties",), 4), gauges.Value("slots", ("other",), 1))
    gauges.watch(one)
    gauges.watch(two)
    assert gauges.collect() == [
        ("pinned_bytes", ("readback",), 8),
        ("slots", ("other",), 1),
        ("slots", ("penalties",), 7),
    ]
    del two
    gc.collect()
    assert Counter(metric for metric, _, _ in gauges.collect())["slots"] == 1
