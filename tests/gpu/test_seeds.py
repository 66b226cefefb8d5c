"""The feature seeds on a GPU: the bits are torch's own, and no draw waits.

Engines with seeded requests are compared in test_long.py.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.waits import errors_for_waits
from support import modules
from support.batches import same_bits
from vllm.v1.readiness.inputs import uploads
from vllm.v1.readiness.sample import seeds

pytestmark = pytest.mark.gpu

VOCABULARIES = [997, 32_000, 50_257, 128_256, 151_936, 256_000, 1_100_000]
SEEDS = [0, 7, 2**32 + 5, 10**14, 2**63 - 1, 2**63 + 12345, 2**64 - 1]
OFFSETS = [0, 4, 400, 4 * (2**32 - 2), 4 * 2**35]
SAMPLER = "vllm/v1/sample/ops/topk_topp_sampler.py"
ROWS = 128


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def draws(device: torch.device) -> Any:
    found = seeds.draws_on(device)
    assert found is not None
    return found


def generator(device: torch.device, seed: int, offset: int = 0) -> torch.Generator:
    """Return torch's own generator in this state."""
    made = torch.Generator(device=device)
    made.manual_seed(seed)
    made.set_offset(offset)
    return made


def batch(device: torch.device, rows: list[int], vocab_size: int) -> Any:
    """Return the generators of a batch whose kernels are warm, with seeds in these rows."""
    owner = SimpleNamespace(
        device=device,
        pin_memory=True,
        vocab_size=vocab_size,
        max_num_reqs=ROWS,
        generators={row: generator(device, 3 * row) for row in rows},
    )
    feature = seeds.Seeds.make(owner)
    assert feature is not None
    feature.warm_up()
    assert feature.agrees
    feature.begin_sampling(None)
    return owner.generators


def sizes_of(draws: Any) -> list[int]:
    """Vocabularies, and where the grid and its four words are just full."""
    edges = [draws.most_threads, 4 * draws.most_threads]
    return [*VOCABULARIES, *(edge + more for edge in edges for more in (-1, 0, 1))]


@pytest.mark.parametrize("case", range(len(VOCABULARIES) + 6))
def test_exponentials_are_torchs_bit_for_bit(device: torch.device, draws: Any, case: int) -> None:
    size = sizes_of(draws)[case]
    cases = [(seed, offset) for seed in SEEDS for offset in OFFSETS]
    for behind in (0, 3):
        generators = [generator(device, seed, offset + 4 * behind) for seed, offset in cases]
        rows = random.Random(size).sample(range(len(cases)), len(cases))
        wanted = torch.empty(len(cases), size, device=device)
        for row, each in zip(rows, generators, strict=True):
            wanted[row].exponential_(generator=each)
        signed = [(seed + 2**63) % 2**64 - 2**63 for seed, _ in cases]
        arrays = [torch.tensor(a).numpy() for a in (rows, signed, [o // 4 for _, o in cases])]
        sent = uploads.together(arrays, (), device, True)[0]
        drawn = torch.full_like(wanted, -1.0)
        grown = draws.exponential(drawn, sent, behind)
        assert same_bits(drawn, wanted)
        offsets = [offset + 4 * (behind + grown) for _, offset in cases]
        assert offsets == [each.get_offset() for each in generators]


def test_uniform_numbers_of_drafts_are_torchs(device: torch.device, draws: Any) -> None:
    counts = [*range(1, ROWS + 1)]
    generators = [generator(device, SEEDS[n % 7], OFFSETS[n % 5]) for n in counts]
    signed = [(each.initial_seed() + 2**63) % 2**64 - 2**63 for each in generators]
    counters = [each.get_offset() // 4 for each in generators]
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    arrays = [torch.tensor(a).numpy() for a in (counts, signed, counters, firsts, counts)]
    sent = uploads.together(arrays, (), device, True)[0]
    drawn = torch.zeros(sum(counts), dtype=torch.float64, device=device)
    assert draws.uniform(drawn, sent, 0) == 1
    wanted = torch.empty_like(drawn)
    for part, each in zip(wanted.split(counts), generators, strict=True):
        part.uniform_(generator=each)
    assert torch.equal(drawn, wanted)
    assert [4 * counter + 4 for counter in counters] == [each.get_offset() for each in generators]


@pytest.mark.parametrize("rows", [[*range(ROWS)], [5], [*range(0, ROWS, 3)]])
@pytest.mark.parametrize("vocab_size", [997, 151_936])
def test_samples_are_stocks_and_nothing_waits(
    device: torch.device, vocab_size: int, rows: list[int]
) -> None:
    """Rows are rewound and leave between draws; the default generator is where stock leaves it."""
    ours, stock = batch(device, rows, vocab_size), dict(batch(device, rows, vocab_size))
    probabilities = torch.randn(ROWS, vocab_size, device=device).softmax(-1)
    chance = random.Random(3)
    for _ in range(30):
        tokens, states = [], []
        for load, generators in ((modules.overlaid, ours), (modules.pristine, stock)):
            torch.cuda.manual_seed(11)
            copied = probabilities.clone()
            with errors_for_waits():
                tokens.append(load(SAMPLER).random_sample(copied, generators))
            states.append(torch.cuda.get_rng_state(device))
        assert torch.equal(*tokens)
        assert torch.equal(*states)
        if chance.random() < 0.3:
            row = chance.choice(rows)
            for generators in (ours, stock):
                generators[row].set_offset(generators[row].get_offset() - 4)
        if chance.random() < 0.3 and len(stock) > 1:
            row = chance.choice([*stock])
            assert ours.pop(row).get_offset() == stock.pop(row).get_offset()
            rows = [*stock]
    assert {row: each.get_offset() for row, each in ours.items()} == {
        row: each.get_offset() for row, each in stock.items()
    }
