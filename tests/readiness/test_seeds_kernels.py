"""The kernels of seeds under Triton's interpreter, beside Philox and torch's order in numpy.

The GPU's approximate logarithm is not known here: the kernels call a stand-in for it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import modules, philox

#: Of the simulated device: two multiprocessors.
THREADS = 2 * 256
#: Few threads, exactly all, one more; each word of the one draw full; more draws than one.
SIZES = [1, 41, 256, 300, 512, 513, 1024, 1537, 2047, 2048, 2049, 5000]
SEEDS = [0, 7, 2**32 - 1, 10**14, 2**63, 2**64 - 1]
OFFSETS = [0, 4, 400, 4 * (2**32 - 1), 4 * 2**33]
CASES = [(seed, offset) for seed in SEEDS for offset in OFFSETS]
#: Of seed 7, some words near the ends: draw, thread, which of its four, and the word.
EXTREMES = [
    (14964, 16, 2, 2**32 - 40),
    (14067, 368, 3, 2**32 - 198),
    (8113, 376, 0, 2**32 - 438),
    (17757, 327, 3, 2**32 - 599),
    (21574, 394, 1, 35),
]
UNTOUCHED = -1.0


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with modules.kernels_interpreted("seeds") as module:
        monkeypatch.setattr(module, "lg2", philox.logarithm)
        yield module


def sent(*arrays: Sequence[int]) -> list[torch.Tensor]:
    """Return arrays as the kernels take them: int64, of which seeds are the bits."""
    numbers = ([(number + 2**63) % 2**64 - 2**63 for number in array] for array in arrays)
    return [torch.tensor(array) for array in numbers]


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_filled_as_torch_would_and_no_others(kernels: Any, size: int) -> None:
    """Requests are in no order of their rows, of which some are nobody's."""
    cases = CASES if size == 300 else CASES[::7]  # which has all offsets
    noise = torch.full((len(cases) + 4, size), UNTOUCHED)
    rows = [*range(len(cases) + 3, 4, -1), 0]
    seeds, offsets = zip(*cases, strict=True)
    behind = 5
    counters = [offset // 4 - behind for offset in offsets]
    drawn = kernels.Draws(THREADS).exponential(noise, sent(rows, seeds, counters), behind)
    assert drawn == -(-size // (4 * philox.threads_for(size, THREADS)))
    for row, seed, offset in zip(rows, seeds, offsets, strict=True):
        wanted = philox.exponential(seed, offset, size, THREADS)
        assert noise[row].numpy().tobytes() == wanted.tobytes()
    assert (noise[1:5] == UNTOUCHED).all()


@pytest.mark.parametrize(("draw", "thread", "column", "word"), EXTREMES)
def test_words_near_the_ends(kernels: Any, draw: int, thread: int, column: int, word: int) -> None:
    """The largest are clamped; numpy is told the bound as an integer."""
    assert philox.at(7, np.array([draw]), np.array([thread]))[0, column] == word
    noise = torch.empty(1, 4 * THREADS)
    kernels.Draws(THREADS).exponential(noise, sent([0], [7], [draw]), 0)
    u = philox.unit(np.array([word], np.uint32))
    value = np.float32(2**-24)
    if word < 2**32 - 384:  # as a float32, less than 2**32 - 256
        value = -(philox.logarithm(u) * np.float32(0.693147182))[0]
    assert noise[0, thread + THREADS * column].item() == value
    assert value > 0


def test_drafts_are_given_what_uniform_draws(kernels: Any) -> None:
    """Requests without a seed, and without drafts, lie between."""
    counts = [1 + place * 127 // (len(CASES) - 1) for place in range(len(CASES))]
    gap = 2
    firsts = [sum(counts[:place]) + gap * (place + 1) for place in range(len(CASES))]
    seeds, offsets = zip(*CASES, strict=True)
    counters = [offset // 4 - 3 for offset in offsets]
    values = torch.full((firsts[-1] + counts[-1] + gap,), UNTOUCHED, dtype=torch.float64)
    arrays = sent([0] * len(CASES), seeds, counters, firsts, counts)
    assert kernels.Draws(THREADS).uniform(values, arrays, 3) == 1
    for first, count, (seed, offset) in zip(firsts, counts, CASES, strict=True):
        wanted = philox.uniform(seed, offset, count)
        assert values[first : first + count].tolist() == wanted.tolist()
        assert (values[first - gap : first] == UNTOUCHED).all()
    assert (values[-gap:] == UNTOUCHED).all()


@pytest.mark.parametrize("name", ["exponential", "uniform"])
def test_a_torch_that_draws_otherwise_is_noticed(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One bit of one number, an offset that grows by more, or another number of threads.

    Rows of the model's vocabulary would agree by chance: a few threads fill them.
    """
    uses = philox.emulate(monkeypatch, THREADS)
    device = torch.device("cpu")
    drawn = getattr(torch.Tensor, f"{name}_")

    def other_bit(self: torch.Tensor, generator: Any) -> torch.Tensor:
        drawn(self, generator=generator)
        bits = self.view(torch.int32)
        bits[len(bits) // 2] ^= 1
        return self

    def more(self: torch.Tensor, generator: Any) -> torch.Tensor:
        generator.offset += 4
        return drawn(self, generator=generator)

    for other in (other_bit, more):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, f"{name}_", other)
            assert not kernels.agree(kernels.Draws(THREADS), device, [300])
    assert uses
    assert not kernels.agree(kernels.Draws(2 * THREADS), device, [300])
    assert kernels.agree(kernels.Draws(THREADS), device, [300])
