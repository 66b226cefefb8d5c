"""Masks of grammars on a GPU that is always behind: upstream's bits, and no wait."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gpu.waits import errors_for_waits, waited
from support import batches
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.readiness.sample.grammars import Grammars
from vllm.v1.structured_output.utils import apply_grammar_bitmask

pytestmark = pytest.mark.gpu
pytest.importorskip("xgrammar", reason="its kernel applies the masks", exc_type=ImportError)

ROWS = 128
NAMES = [f"r{row}" for row in range(ROWS)]
DRAFTS = 3


def make_batch(names: list[str], vocabulary: int) -> Any:
    """What the feature reads of a batch."""
    return SimpleNamespace(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        device=torch.device("cuda"),
        vocab_size=vocabulary,
        max_num_reqs=ROWS,
    )


def make_feature(vocabulary: int) -> Grammars:
    """The feature, with buffers for all rows."""
    feature = Grammars(make_batch(NAMES, vocabulary), DRAFTS)
    for name in NAMES:
        params = {"structured_outputs": StructuredOutputsParams(regex="a")}
        feature.add_request(batches.state(batches.Spec([1], [], params), name))
    return feature


class Step:
    """One step: its batch, masks and logits.

    Args:
        chance: draws it.
        vocabulary: number of tokens.
        dtype: of the logits.
        structured: how many requests have a grammar.
    """

    def __init__(
        self, chance: random.Random, vocabulary: int, dtype: torch.dtype, structured: int
    ) -> None:
        self.names = chance.sample(NAMES, chance.choice([ROWS, chance.randint(1, ROWS)]))
        self.batch = make_batch(self.names, vocabulary)
        drafted = chance.random() < 0.4
        spec = {name: [5] * chance.randint(1, DRAFTS) for name in self.names if drafted}
        chosen = chance.sample(self.names, min(structured, len(self.names)))
        names = chance.sample([*chosen, "absent"], len(chosen) + 1)
        count = sum(1 + len(spec.get(name, ())) for name in names)
        draw = np.random.default_rng(chance.randrange(1 << 30))
        shape = (count, -(-vocabulary // 32))
        self.masks = draw.integers(-(1 << 31), 1 << 31, shape, dtype=np.int32)
        self.scheduled: Any = SimpleNamespace(scheduled_spec_decode_tokens=spec)
        self.output: Any = SimpleNamespace(
            structured_output_request_ids=names, grammar_bitmask=self.masks
        )
        positions = sum(1 + len(spec.get(name, ())) for name in self.names)
        self.logits = torch.randn(positions, vocabulary, device="cuda").to(dtype)

    def stock(self, logits: torch.Tensor) -> None:
        apply_grammar_bitmask(self.scheduled, self.output, self.batch, logits)

    def ours(self, feature: Grammars, logits: torch.Tensor) -> None:
        feature.batch = self.batch
        assert feature.apply_grammars(self.scheduled, self.output, logits)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one.view(torch.uint8), other.view(torch.uint8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [997, 32_000, 151_936])
def test_logits_are_upstreams_and_the_host_does_not_wait(
    vocabulary: int, dtype: torch.dtype
) -> None:
    """Several steps are in flight, and the scheduler fills its masks anew behind each."""
    chance = random.Random(vocabulary)
    feature = make_feature(vocabulary)
    for structured in (1, 13, ROWS):  # kernels are compiled at their first launch
        step = Step(chance, vocabulary, dtype, structured)
        step.ours(feature, step.logits.clone())
        step.stock(step.logits.clone())
    for _ in range(8):
        pairs = []
        for _ in range(6):
            step = Step(chance, vocabulary, dtype, chance.choice([1, 13, ROWS]))
            expected, found = step.logits.clone(), step.logits.clone()
            step.stock(expected)
            torch.cuda._sleep(chance.choice([0, 1_000_000, 20_000_000]))
            with errors_for_waits():
                step.ours(feature, found)
            step.masks.fill(0)
            pairs.append((expected, found))
        assert all(same(*pair) for pair in pairs)


@pytest.mark.parametrize("structured", [13, ROWS])
def test_masks_are_sent_while_the_device_is_busy(structured: int) -> None:
    feature = make_feature(151_936)
    step = Step(random.Random(1), 151_936, torch.float32, structured)
    logits = step.logits
    assert waited(lambda: step.stock(logits)) > 0.03, "the release does not wait: drop the feature"
    assert waited(lambda: step.ours(feature, logits)) < 0.01
    assert len(feature._buffers) == 2
