"""The penalty kernels on a GPU, against upstream's own."""

import random
from typing import Any

import pytest
import torch
from gpu.waits import errors_for_waits
from support import modules
from support.batches import Spec, empty, fill, prompts, same_bits, state, stock_penalties
from vllm.v1.readiness.sample.penalties import Penalties
from vllm.v1.sample.ops.penalties import apply_all_penalties
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

pytestmark = pytest.mark.gpu

#: Special values of logits.
EDGES = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, 3.4e38, -3.4e38]


def a_batch(vocab: int, seed: int) -> Any:
    """Sixteen requests, every fourth without penalties."""
    chooser = random.Random(seed)
    specs = []
    for number in range(16):
        params: dict[str, Any] = {}
        if number % 4:
            params = {
                "repetition_penalty": chooser.choice([1.0, 1.3, 0.7, 1.0000001, 1.9]),
                "frequency_penalty": chooser.choice([0.0, 0.3, -0.7, 1.1, 2.0]),
                "presence_penalty": chooser.choice([0.1, 1.5, -0.9, 1e-7]),
            }
        pool = [chooser.randrange(vocab) for _ in range(40)] + [0, vocab - 1]
        prompt = chooser.choices(pool, k=chooser.randrange(1, 100))
        output = chooser.choices(pool, k=chooser.randrange(0, 150))
        specs.append(Spec(prompt, output, params))
    batch = empty(modules.overlaid, vocab, "cuda")
    fill(batch, specs)
    return batch


def logits_for(rows: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn((rows, vocab), device="cuda", generator=generator) * 8
    columns = torch.randint(0, vocab, (rows, len(EDGES)), device="cuda", generator=generator)
    return logits.scatter_(1, columns, torch.tensor(EDGES, device="cuda").expand(rows, -1))


@pytest.mark.parametrize("vocab", [37, 1009, 32000, 50257, 151936, 151937])
@pytest.mark.parametrize("contiguous", [True, False])
def test_as_upstream_to_the_bit(vocab: int, contiguous: bool) -> None:
    """Upstream divides by the penalty where the logits are contiguous, else multiplies."""
    batch = a_batch(vocab, seed=vocab)
    logits = logits_for(16, vocab, seed=vocab)
    if not contiguous:
        wide = torch.full((16, vocab + 64), 5.0, device="cuda")
        wide[:, :vocab] = logits
        logits = wide[:, :vocab]
    expected = stock_penalties(batch, logits.clone(memory_format=torch.preserve_format))
    if not contiguous:
        other = torch.full_like(wide, 5.0)
        other[:, :vocab] = logits
        expected = stock_penalties(batch, other[:, :vocab])
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(logits, None)
    penalties = Penalties.take(batch.sampling_metadata, logits)[0]
    assert penalties is not None
    before = logits.clone()
    penalties.apply(logits, None, per_draft=False)
    assert same_bits(before[::4], logits[::4])
    penalised = [row for row in range(16) if row % 4]
    finite = ~before.isnan()
    assert torch.equal(logits.isnan(), expected.isnan())
    mine, theirs = (x.where(finite, 0.0)[penalised] for x in (logits, expected))
    assert same_bits(mine, theirs)
    assert not same_bits(mine, before.where(finite, 0.0)[penalised])
    if not contiguous:
        assert (wide[:, vocab:] == 5.0).all()


@pytest.mark.parametrize("vocab", [1009, 151936])
def test_drafts_count_within_the_step(vocab: int) -> None:
    batch = a_batch(vocab, seed=7)
    chooser = random.Random(8)
    some = [0, vocab - 1, 5, 6]
    drafts = [chooser.choices(some, k=row % 5) for row in range(16)]
    metadata_of_drafts = SpecDecodeMetadata.make_dummy(drafts, torch.device("cuda"))
    bonus = logits_for(16, vocab, seed=10)
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(bonus, metadata_of_drafts)
    penalties = Penalties.take(batch.sampling_metadata, bonus)[0]
    assert penalties is not None
    metadata = batch.sampling_metadata
    outputs = [list(output) for output in metadata.output_token_ids]

    rows = torch.tensor([row for row, ids in enumerate(drafts) for _ in ids], device="cuda")
    targets = logits_for(len(rows), vocab, seed=9)
    expected = apply_all_penalties(
        targets.clone(),
        prompts(batch)[rows],
        metadata.presence_penalties[rows],
        metadata.frequency_penalties[rows],
        metadata.repetition_penalties[rows],
        [outputs[row] + ids[:n] for row, ids in enumerate(drafts) for n in range(len(ids))],
    )
    finite = ~targets.isnan()
    assert Penalties.take(metadata, targets, metadata_of_drafts)[0] is penalties
    penalties.apply(targets, metadata_of_drafts, per_draft=True)
    touched = rows % 4 != 0
    assert same_bits(targets.where(finite, 0)[touched], expected.where(finite, 0)[touched])

    finite = ~bonus.isnan()
    expected = apply_all_penalties(
        bonus.clone(),
        prompts(batch),
        metadata.presence_penalties,
        metadata.frequency_penalties,
        metadata.repetition_penalties,
        [outputs[row] + ids for row, ids in enumerate(drafts)],
    )
    penalties.apply(bonus, penalties.drafts, per_draft=False)
    touched = torch.arange(16) % 4 != 0
    assert same_bits(bonus.where(finite, 0)[touched], expected.where(finite, 0)[touched])


def test_what_is_sampled_is_counted_and_nothing_waits() -> None:
    """Under torch's sync debug mode, where any wait is an error."""
    vocab = 1009
    batch = a_batch(vocab, seed=3)
    torch.manual_seed(3)
    logits = logits_for(16, vocab, seed=3).nan_to_num()
    discarded = torch.zeros(16, dtype=torch.bool, device="cuda")
    discarded[5] = True
    sampled = torch.randint(0, vocab, (16, 3), device="cuda", dtype=torch.int32)
    sampled[6:9, 1:] = -1
    sampled[9, 1] = sampled[9, 0]
    batch.readiness.warm_up()
    batch.readiness.history.begin_step()
    batch.readiness.begin_sampling(logits, None)
    batch.readiness.observe_sampled(sampled, discarded)
    torch.cuda.synchronize()
    late = state(Spec([4, 5], [6], {"presence_penalty": 1.0}), "late")
    batch.remove_request("r15")
    with errors_for_waits():
        batch.add_request(late)  # in the row of the one that left
        batch.refresh_metadata()
        batch.readiness.history.begin_step()
        batch.readiness.begin_sampling(logits, None)
        penalties = Penalties.take(batch.sampling_metadata, logits)[0]
        assert penalties is not None
        penalties.apply(logits.clone(), None, per_draft=False)
        batch.readiness.observe_sampled(sampled, discarded)
    for row, ids in enumerate(sampled.tolist()):
        if row != 5:
            times = 1 if row == 15 else 2
            batch.req_output_token_ids[row].extend([t for t in ids if t >= 0] * times)
    expected = stock_penalties(batch, logits.clone())
    penalties.apply(logits, None, per_draft=False)
    assert same_bits(logits, expected)
