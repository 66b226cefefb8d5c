"""Penalties, bit for bit upstream's, by torch's operations and by the interpreted kernels.

Rounding on a GPU, and the form in which upstream divides there, are tested in tests/gpu.
"""

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.batches import Spec, empty, fill, same_bits, stock_penalties
from support.examples import draws
from support.lockstep import LockstepRun
from vllm.v1.readiness.sample import penalties as under_test
from vllm.v1.readiness.sample.penalties import Penalties

VOCABULARY = 37
EDGES = [0.0, -0.0, float("inf"), float("-inf"), 1e-40, -1e-40, 3e38, -3e38]
PENALTY: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.6,
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    with modules.kernels_interpreted("penalties"):
        yield


@pytest.fixture(params=["torch", "kernels"])
def kernels(request: pytest.FixtureRequest) -> bool:
    """True to run the kernels in Triton's interpreter, False for torch's operations."""
    if request.param == "kernels":
        request.getfixturevalue("interpreted")
    return bool(request.param == "kernels")


def batches(specs: list[Spec], vocab: int, kernels: bool) -> tuple[Any, Any]:
    """Return upstream's batch and ours with the same requests."""
    stock, ours = empty(modules.pristine, vocab), empty(modules.overlaid, vocab)
    fill(stock, specs)
    fill(ours, specs)
    ours.readiness.penalties.kernels = kernels
    return stock, ours


def prepared(batch: Any, logits: torch.Tensor) -> Penalties | None:
    """Begin a step with these logits, and return the penalties if they serve it."""
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(logits, None)
    penalties = Penalties.take(batch.sampling_metadata, logits)[0]
    assert penalties is None or type(penalties) is Penalties
    return penalties


def compare(stock: Any, ours: Any, logits: torch.Tensor) -> None:
    """Apply the penalties to the same logits on both sides."""
    penalties = prepared(ours, logits)
    assert penalties is not None
    # Upstream's form depends on the layout, which a clone keeps.
    mine = torch.empty_strided(logits.shape, logits.stride()).copy_(logits)
    penalties.apply(mine, None, per_draft=False)
    assert same_bits(mine, stock_penalties(stock, logits))


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.usefixtures("interpreted")
def test_kernels_serve_plain_target_and_bonus_rows(asynchronous: bool, drafts: int) -> None:
    lockstep = LockstepRun(3, asynchronous, drafts, reorder_threshold=1 + drafts)
    lockstep.ours.batch.readiness.penalties.kernels = True
    lockstep.ours.batch.readiness.warm_up()
    lockstep.add([1, 2, 3], presence_penalty=1.5)
    lockstep.add([1, 2, 3, 5], max_tokens=14)
    lockstep.step()
    lockstep.add(list(range(30)), repetition_penalty=1.3, frequency_penalty=-0.3)
    lockstep.add([7], repetition_penalty=0.8, max_tokens=5)
    lockstep.finish()
    assert lockstep.ours.waits == 0


@given(data=st.data(), vocab=st.sampled_from([1, 5, 64, 257, 1500]))
@draws(25)
@pytest.mark.usefixtures("interpreted")
def test_logits_have_upstreams_bits(data: st.DataObject, vocab: int) -> None:
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
    stock, ours = batches(specs, vocab, True)
    logits = torch.tensor([[chooser.gauss(0, 5) for _ in range(vocab)] for _ in specs])
    for row in logits:
        row[chooser.randrange(vocab)] = chooser.choice(EDGES)
    penalties = prepared(ours, logits)
    if penalties is None:
        assert ours.sampling_metadata.no_penalties
        return
    expected = stock_penalties(stock, logits.clone())
    before = logits.clone()
    penalties.apply(logits, None, per_draft=False)
    for row, spec in enumerate(specs):
        reference = expected if spec.params else before
        assert same_bits(logits[row], reference[row])


def test_an_id_above_the_vocabulary_counts_for_nothing(kernels: bool) -> None:
    """Upstream's scatter fails on it, on a GPU with the end of the engine."""
    specs = [Spec([1, VOCABULARY + 9], [VOCABULARY + 1, 3], PENALTY)]
    stock, ours = batches(specs, VOCABULARY, kernels)
    logits = torch.randn(1, VOCABULARY)
    with pytest.raises(RuntimeError, match="out of bounds"):
        stock_penalties(stock, logits.clone())
    sane, _ = batches([Spec([1], [3], PENALTY)], VOCABULARY, False)
    compare(sane, ours, logits)


@pytest.mark.parametrize("width", [VOCABULARY + 3, VOCABULARY + 64])
def test_wider_logits_are_upstreams(width: int) -> None:
    """A vocabulary padded or extended by LoRA: its padding token is one of the logits."""
    stock, ours = batches([Spec([1, 2], [3, 4], PENALTY), Spec([1], [2], {})], VOCABULARY, False)
    logits = torch.randn(2, width)
    assert prepared(ours, logits) is None
    mine, theirs = (
        load(modules.SAMPLER)
        .Sampler()
        .apply_logits_processors(logits.clone(), batch.sampling_metadata, False)
        for load, batch in ((modules.overlaid, ours), (modules.pristine, stock))
    )
    assert same_bits(mine, theirs)
    assert not same_bits(mine, logits)


def test_samples_of_wider_logits_are_counted_later(kernels: bool) -> None:
    specs = [Spec([1, 2], [3, 4], PENALTY), Spec([1], [2], {})]
    stock, ours = batches(specs, VOCABULARY, kernels)
    nobody = torch.zeros(16, dtype=torch.bool)
    for width, token in ((VOCABULARY, 5), (VOCABULARY + 3, 6), (VOCABULARY + 3, 6)):
        prepared(ours, torch.randn(2, width))
        ours.readiness.observe_sampled(torch.tensor([[token], [token]]), nobody)
        for batch in (stock, ours):
            for row, output in enumerate(batch.req_output_token_ids):
                batch.token_ids_cpu[row, batch.num_tokens_no_spec[row]] = token
                batch.num_tokens_no_spec[row] += 1
                output.append(token)
    compare(stock, ours, torch.randn(2, VOCABULARY))


def test_a_request_keeps_its_slot_in_another_row(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [Spec([1, n], [3, 3 + n], PENALTY if n else {}) for n in range(4)]
    stock, ours = batches(specs, VOCABULARY, kernels)
    everybody = torch.ones(16, dtype=torch.bool)
    for change in (
        lambda _: None,
        lambda batch: batch.swap_states(0, 2),
        lambda batch: (batch.remove_request("r1"), batch.condense()),
    ):
        for batch in (stock, ours):
            change(batch)
            batch.refresh_metadata()
        rows = ours.num_reqs
        compare(stock, ours, torch.randn(rows, VOCABULARY))
        ours.readiness.observe_sampled(torch.zeros(rows, 1, dtype=torch.int32), everybody)
        again = mock.Mock(side_effect=AssertionError("a slot is built again"))
        monkeypatch.setattr(ours.readiness.penalties, "build", again)


class OnCuda(torch.Tensor):  # type: ignore[misc]  # torch is not followed
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_divides_positive_logits_where_upstream_does() -> None:
    """On CUDA, upstream divides a positive logit and multiplies another."""
    vocab, penalty = 300, torch.tensor([1.3])
    spec = Spec(list(range(0, vocab, 2)), [], {"repetition_penalty": 1.3})
    _, batch = batches([spec], vocab, True)
    penalties = prepared(batch, torch.empty(1, vocab))
    assert penalties is not None
    logits = torch.randn(1, vocab) * 10
    expected = torch.where(logits > 0, logits / penalty, logits * penalty)
    other = torch.where(logits > 0, logits * (1 / penalty), logits * penalty)
    assert not same_bits(expected[:, ::2], other[:, ::2])
    before = logits.clone()
    penalties.apply(logits.as_subclass(OnCuda), None, per_draft=False)
    assert same_bits(logits[:, ::2], expected[:, ::2])
    assert same_bits(logits[:, 1::2], before[:, 1::2])


@pytest.mark.parametrize("vocab", [5, 64, 300])
@pytest.mark.usefixtures("interpreted")
def test_a_kernel_builds_the_slots_that_torch_builds(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that is not zeroed; ids beyond the vocabulary count for nothing."""
    monkeypatch.setattr(under_test, "_BLOCK", 64)
    chooser = random.Random(vocab)
    ids = range(vocab + 2)
    specs = [
        Spec(chooser.choices(ids, k=prompt), chooser.choices(ids, k=output), PENALTY)
        for prompt, output in [(1, 0), (4, 3), (69, 2), (2, 150), (64, 64)]
    ]
    _, batch = batches(specs, vocab, True)
    penalties = batch.readiness.penalties
    for slot in [penalties.memory.allocate() for _ in specs]:
        slot.fill_(-7)
    rows = [3, 0, 4, 2, 1]
    built = penalties.build(rows)
    penalties.kernels = False
    for slot, other in zip(built, penalties.build(rows), strict=True):
        assert slot.tolist() == other.tolist()


@pytest.mark.parametrize("named", [{}, {"own": "sampler"}, {"drafts": 2}])
def test_prompts_are_gathered_for_upstream_only(
    named: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor of prompts, as wide as the longest one, is made only if upstream reads it."""
    batch = modules.overlaid(modules.INPUT_BATCH).InputBatch
    upstreams = batch._make_prompt_token_ids_cpu_tensor
    make = mock.create_autospec(upstreams, side_effect=upstreams)
    monkeypatch.setattr(batch, upstreams.__name__, make)
    run = LockstepRun(max_num_seqs=3, **named)
    run.add([1, 2, 3], max_tokens=4, ignore_eos=True)
    run.run(2)
    for number in range(6):
        run.add([1 + number] * 9, max_tokens=4, ignore_eos=True, **PENALTY)
    run.finish()
    assert make.called is ("own" in named)
