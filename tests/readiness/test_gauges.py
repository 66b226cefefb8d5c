"""What is left to upstream is counted with its reason, and what is held can be asked for."""

import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill
from support.lockstep import VOCABULARY, LockstepRun
from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.sample.penalties import Penalties

PENALTY: dict[str, Any] = {"presence_penalty": -0.6}
WORDS: dict[str, Any] = {"bad_words": [[0], [1, 2]]}


def test_odd_requests_are_counted_and_steps_that_are_served_are_not(
    fallbacks: dict[tuple[str, str], int],
) -> None:
    lockstep = LockstepRun()
    lockstep.add([1, 2], max_tokens=40, **PENALTY, **WORDS)
    lockstep.run(4)
    assert fallbacks == {}
    lockstep.add([3], max_tokens=3, bad_words=[[-1]])
    lockstep.run(3)
    assert fallbacks == {("bad-words", gauges.OTHER_INPUT): 3}
    lockstep.finish()


def test_a_feature_that_is_off_does_not_fall_back(fallbacks: dict[tuple[str, str], int]) -> None:
    lockstep = LockstepRun(switch="-penalties,-bad-words")
    lockstep.add([1, 2], **PENALTY, **WORDS)
    lockstep.finish()
    assert fallbacks == {}


def test_logits_of_another_batch_are_counted(fallbacks: dict[tuple[str, str], int]) -> None:
    batch = empty(modules.overlaid, VOCABULARY)
    fill(batch, [Spec([1], [2], PENALTY)] * 2)
    logits = torch.randn(2, VOCABULARY)
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(logits, None)
    assert Penalties.take(batch.sampling_metadata, logits[:1])[0] is None
    assert fallbacks == {("penalties", gauges.OTHER_INPUT): 1}


def test_a_runner_that_samples_by_itself_is_counted_as_another_class(
    fallbacks: dict[tuple[str, str], int],
) -> None:
    """Its steps are not begun: before the first step that is, and after it."""
    batch = empty(modules.overlaid, VOCABULARY)
    fill(batch, [Spec([1], [2], PENALTY)])
    logits = torch.randn(1, VOCABULARY)
    assert Penalties.take(batch.sampling_metadata, logits)[0] is None
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(logits, None)
    assert Penalties.take(batch.sampling_metadata, logits)[0] is not None
    batch.readiness.observe_sampled(torch.ones(1, 1, dtype=torch.int32), torch.zeros(1).bool())
    assert Penalties.take(batch.sampling_metadata, logits)[0] is None
    assert fallbacks == {("penalties", gauges.OTHER_CLASS): 2}


def test_a_sampler_without_seams_is_counted_by_the_words_of_its_features(
    fallbacks: dict[tuple[str, str], int],
) -> None:
    batch = empty(modules.overlaid, VOCABULARY)
    batch.readiness.begin_sampling(
        torch.randn(1, VOCABULARY), None, SimpleNamespace(sampler=object())
    )
    words = {word for word, reason in fallbacks if reason == gauges.OTHER_CLASS}
    assert words == {"bad-words", "history", "penalties", "sampler-copies"}


class Holding:
    """Something that holds memory."""

    def __init__(self, *values: gauges.Value) -> None:
        self.values = values

    def held(self) -> tuple[gauges.Value, ...]:
        return self.values


def test_holders_are_added_up_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # batches of other tests
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
