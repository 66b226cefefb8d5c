"""What torch draws on CUDA, in numpy: an oracle that shares no code with our kernels.

Philox4x32-10 is written from its paper (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As
Easy as 1, 2, 3; SC 2011). The order of elements is that of torch's loop over a grid of threads.

:func:`emulate` has PyTorch on the CPU draw so, with generators that have an offset. The GPU's
logarithm is replaced by a function that every machine computes alike.
"""

from typing import Any

import numpy as np
import pytest
import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Compute Philox4x32-10.

    Args:
        counter: uint32 [n, 4].
        key: two words.

    Returns:
        uint32 [n, 4].
    """
    x = counter.astype(np.uint64).T
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * w) % 2**32) for k, w in zip(key, _WEYL, strict=True))
        product0 = x[0] * np.uint64(_MULTIPLIERS[0])
        product1 = x[2] * np.uint64(_MULTIPLIERS[1])
        high0, high1 = product0 >> np.uint64(32), product1 >> np.uint64(32)
        x = np.stack([high1 ^ x[1] ^ k0, product1 & _MASK, high0 ^ x[3] ^ k1, product0 & _MASK])
    return x.T.astype(np.uint32)


def at(seed: int, index: np.ndarray, thread: np.ndarray) -> np.ndarray:
    """Compute the words of cuRAND's draw ``index`` in the sequence of each thread."""
    counter = np.zeros((len(thread), 4), np.uint32)
    counter[:, 0] = index & 0xFFFFFFFF
    counter[:, 1] = index >> 32
    counter[:, 2] = thread
    return philox(counter, (seed % 2**32, seed >> 32))


def threads_for(size: int, most_threads: int) -> int:
    """Return how many threads torch has for a tensor."""
    return min(-(-size // 256) * 256, most_threads)


def words(seed: int, offset: int, size: int, most_threads: int) -> np.ndarray:
    """Return the word of each element of a float32 tensor, in order."""
    threads = threads_for(size, most_threads)
    element = np.arange(size)
    draw, rest = np.divmod(element, 4 * threads)
    column, thread = np.divmod(rest, threads)
    four = at(seed, offset // 4 + draw, thread)
    mine: np.ndarray = four[element, column]
    return mine


def unit(word: np.ndarray) -> np.ndarray:
    """Return the float32 in (0, 1] that cuRAND makes of each word."""
    exact = word.astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33
    return exact.astype(np.float32)


def logarithm(value: Any) -> Any:
    """Stand in for the GPU's logarithm; exact wherever it runs."""
    return value - 1.0


def exponential(seed: int, offset: int, size: int, most_threads: int) -> np.ndarray:
    """Return what exponential_ writes, with our stand-in for the logarithm."""
    u = unit(words(seed, offset, size, most_threads))
    log = logarithm(u) * np.float32(0.693147182)
    clamped: np.ndarray = np.where(u >= np.float32(1 - 2**-24), np.float32(-(2**-24)), log)
    return -clamped


def uniform(seed: int, offset: int, size: int) -> np.ndarray:
    """Return what uniform_ writes to a float64 tensor that has a thread for each element."""
    four = at(seed, np.full(size, offset // 4), np.arange(size)).astype(object)
    # Rounded once, as Python divides integers.
    numbers = [(2 * (int(a) ^ (int(b) << 21)) + 1) / 2**54 for a, b, *_ in four]
    return np.array([0.0 if number == 1.0 else number for number in numbers])


class Generator(torch.Generator):  # type: ignore[misc]
    """A generator on the CPU that has a seed and an offset, as those of CUDA devices.

    Attributes:
        sets: how often the offset was set.
    """

    seed_ = 0
    offset = 0
    sets = 0

    def manual_seed(self, seed: int) -> "Generator":
        """See torch.Generator."""
        self.seed_ = seed % 2**64
        return self

    def initial_seed(self) -> int:
        """See torch.Generator."""
        return self.seed_

    def get_offset(self) -> int:
        """See torch.Generator."""
        return self.offset

    def set_offset(self, offset: int) -> None:
        """See torch.Generator."""
        assert offset >= 0
        assert offset % 4 == 0
        self.offset = offset
        self.sets += 1


class Draws:
    """Draws as our kernels do, in numpy."""

    most_drafts = 8

    def __init__(self, most_threads: int) -> None:
        self.most_threads = most_threads

    def exponential(self, noise: torch.Tensor, sent: list[torch.Tensor], behind: int) -> int:
        """See sample.seeds.Draws."""
        size = noise.shape[1]
        for row, seed, counter in zip(*(array.tolist() for array in sent[:3]), strict=True):
            offset = 4 * (counter + behind)
            values = exponential(seed % 2**64, offset, size, self.most_threads)
            noise[row] = torch.from_numpy(values)
        draws: int = -(-size // (4 * threads_for(size, self.most_threads)))
        return draws

    def uniform(self, values: torch.Tensor, sent: list[torch.Tensor], behind: int) -> int:
        """See sample.seeds.Draws."""
        for _, seed, counter, first, count in zip(*(a.tolist() for a in sent), strict=True):
            drawn = uniform(seed % 2**64, 4 * (counter + behind), count)
            values[first : first + count] = torch.from_numpy(drawn)
        return 1


def emulate(patch: pytest.MonkeyPatch, most_threads: int) -> list[Generator]:
    """Have PyTorch on the CPU draw as on a device of so many threads.

    Returns:
        The generators that torch drew from, one for each call.
    """
    uses: list[Generator] = []
    own: dict[str, Any] = {}

    def drawn(self: torch.Tensor, name: str, generator: Any) -> torch.Tensor:
        if not isinstance(generator, Generator):
            return own[name](self, generator=generator)
        uses.append(generator)
        size, per_draw = self.numel(), 2
        arguments = (generator.seed_, generator.offset, size)
        if name == "exponential_":
            values = exponential(*arguments, most_threads)
            per_draw = 4
        else:
            values = uniform(*arguments)
        threads = threads_for(size, most_threads)
        generator.offset += 4 * -(-size // (per_draw * threads))
        return self.copy_(torch.from_numpy(values))

    for name in ("exponential_", "uniform_"):
        own[name] = getattr(torch.Tensor, name)
        patch.setattr(
            torch.Tensor,
            name,
            lambda self, generator=None, name=name: drawn(self, name, generator),
        )
    patch.setattr(torch, "Generator", Generator)
    return uses
