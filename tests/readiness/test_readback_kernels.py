"""The store kernel under Triton's interpreter: the bytes that it writes, and no others."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.batches import drawn
from support.examples import draws

DTYPES = [torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool]
#: Around a block of the kernel, in elements.
SIZES = [0, 1, 2, 3, 5, 64, 1023, 1024, 1025, 3000]
#: Bytes before and behind each target, which nobody may write.
MARGIN = 16
SENTINEL = 0xAD


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    with modules.interpreted("readback") as module:
        yield module


@draws(60)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(DTYPES)), max_size=9),
    seed=st.integers(0, 1000),
)
def test_each_byte_arrives_and_no_other_is_written(
    kernels: ModuleType, kinds: list[tuple[int, torch.dtype]], seed: int
) -> None:
    sources, arenas, targets = [], [], []
    for number, (size, dtype) in enumerate(kinds):
        sources.append(drawn(size, dtype, seed + number))
        count = size * dtype.itemsize
        arenas.append(torch.full((count + 2 * MARGIN,), SENTINEL, dtype=torch.uint8))
        targets.append(arenas[-1][MARGIN : MARGIN + count].view(dtype))
    kernels.store(sources, targets)
    for source, arena in zip(sources, arenas, strict=True):
        margins = torch.cat([arena[:MARGIN], arena[len(arena) - MARGIN :]])
        assert (margins == SENTINEL).all()
        wanted = source.view(torch.uint8)
        assert torch.equal(arena[MARGIN : len(arena) - MARGIN], wanted)


def test_a_source_of_no_whole_words_is_copied(kernels: ModuleType) -> None:
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    kernels.store([source[1:9], source[9:12]], [target[:8], target[9:12]])
    assert target[:12].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 9, 10, 11]
