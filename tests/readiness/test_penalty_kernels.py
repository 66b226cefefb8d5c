"""The Triton kernels under Triton's interpreter, against upstream on this machine.

Rounding on a GPU, and the form in which upstream divides there, are tested in tests/gpu.
"""

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import modules
from support.batches import Spec, empty, fill, same_bits, stock_penalties
from support.lives import Life
from vllm.v1.readiness import penalties as under_test
from vllm.v1.readiness.penalties import Penalties

EDGES = [0.0, -0.0, float("inf"), float("-inf"), 1e-40, -1e-40, 3e38, -3e38]


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with modules.interpreted("penalties") as module:
        yield module


def interpreted(life: Life, kernels: ModuleType) -> Life:
    life.ours.batch.readiness.penalties.kernels = kernels
    life.ours.batch.readiness.warm_up()
    return life


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_life(kernels: ModuleType, asynchronous: bool, drafts: int) -> None:
    """Every step's logits are compared with upstream's, plain, target and bonus rows."""
    life = interpreted(Life(3, asynchronous, drafts, reorder_threshold=1 + drafts), kernels)
    life.add([1, 2, 3], presence_penalty=1.5)
    life.add([1, 2, 3, 5], max_tokens=14)
    life.step()
    life.add(list(range(30)), repetition_penalty=1.3, frequency_penalty=-0.3)
    life.add([7], repetition_penalty=0.8, max_tokens=5)
    life.finish()
    assert life.ours.waits == 0


@given(data=st.data(), vocab=st.sampled_from([1, 5, 64, 257, 1500]))
@settings(max_examples=25)
def test_any_logits(kernels: ModuleType, data: st.DataObject, vocab: int) -> None:
    """Zeros of either sign, infinities and subnormal numbers among them."""
    chooser = random.Random(data.draw(st.integers(0, 10**6)))
    specs = []
    for _ in range(4):
        params: dict[str, Any] = {}
        if chooser.random() < 0.8:
            params = {
                "repetition_penalty": chooser.choice([1.0, 0.3, 1.3, 1.9]),
                "frequency_penalty": chooser.choice([0.0, 0.3, -1.7]),
                "presence_penalty": chooser.choice([0.1, -0.9, 2.0]),
            }
        prompt = chooser.choices(range(vocab), k=chooser.randrange(1, 20))
        specs.append(Spec(prompt, chooser.choices(range(vocab), k=chooser.randrange(20)), params))
    stock, ours = empty(modules.pristine, vocab), empty(modules.overlaid, vocab)
    fill(stock, specs)
    fill(ours, specs)
    ours.readiness.penalties.kernels = kernels
    logits = torch.tensor([[chooser.gauss(0, 5) for _ in range(vocab)] for _ in specs])
    for row in logits:
        row[chooser.randrange(vocab)] = chooser.choice(EDGES)
    ours.readiness.begin_step()
    ours.readiness.prepare(logits, None)
    penalties = Penalties.take(ours.sampling_metadata, logits)[0]
    if penalties is None:
        assert ours.sampling_metadata.no_penalties
        return
    expected = stock_penalties(stock, logits.clone())
    before = logits.clone()
    penalties.apply(logits, after_drafts=False)
    for row, spec in enumerate(specs):
        reference = expected if spec.params else before
        assert same_bits(logits[row], reference[row])


def test_the_dividing_form(kernels: ModuleType) -> None:
    """What upstream does on CUDA: a positive logit is divided, another multiplied."""
    vocab, penalty = 300, torch.tensor([1.3])
    batch = empty(modules.overlaid, vocab)
    fill(batch, [Spec(list(range(0, vocab, 2)), [], {"repetition_penalty": 1.3})])
    penalties = batch.readiness.penalties
    penalties.kernels = kernels
    batch.readiness.begin_step()
    batch.readiness.prepare(torch.empty(1, vocab), None)
    logits = torch.randn(1, vocab) * 10
    expected = torch.where(logits > 0, logits / penalty, logits * penalty)
    other = torch.where(logits > 0, logits * (1 / penalty), logits * penalty)
    assert not same_bits(expected[:, ::2], other[:, ::2])
    numbers = (batch.sampling_metadata.repetition_penalties, torch.zeros(1), torch.zeros(1))
    slots = penalties._addresses
    before = logits.clone()
    penalties._launch(logits, slots, numbers, kernels.NO_DRAFTS, slots, slots, 1, divide=True)
    assert same_bits(logits[:, ::2], expected[:, ::2])
    assert same_bits(logits[:, 1::2], before[:, 1::2])


def test_a_block_never_leaves_its_row(kernels: ModuleType) -> None:
    """Rows of a wider tensor: what lies between them stays."""
    vocab = under_test._BLOCK + 7
    specs = [Spec([n], [3], {"presence_penalty": 1.0}) for n in range(3)]
    batch = empty(modules.overlaid, vocab)
    fill(batch, specs)
    batch.readiness.penalties.kernels = kernels
    wide = torch.full((3, vocab + 5), 2.0)
    batch.readiness.begin_step()
    batch.readiness.prepare(wide[:, :vocab], None)
    batch.readiness.penalties.apply(wide[:, :vocab], after_drafts=False)
    assert (wide[:, vocab:] == 2.0).all()
    assert (wide[:, 3] == 1.0).all()
    assert (wide[:, 4:vocab] == 2.0).all()


def test_only_the_vocabulary_is_counted(kernels: ModuleType) -> None:
    """Rejected drafts are -1; an id that is none would be counted in another's slot."""
    vocab = 20
    memory = torch.zeros(2 * vocab, dtype=torch.int32)
    slots = torch.tensor([memory.data_ptr(), 0, memory.data_ptr()])
    sampled = torch.tensor([[2, 2, vocab, -1], [3, 3, 3, 3], [5, 5, 5, 5]], dtype=torch.int32)
    discarded = torch.tensor([False, False, True])
    kernels.count_kernel[(3,)](sampled, 4, 4, discarded, slots, vocab)
    assert memory.nonzero().flatten().tolist() == [2]
    assert memory[2] == 2
