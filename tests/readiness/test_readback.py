"""Readbacks on a simulated device: the host reads the values that the device had.

The device decides when copies arrive. The oracle is a clone of each source, taken as its
readback starts.
"""

import itertools
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.asynchronous import cycling
from support.device import Device, installed
from support.examples import draws
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.outputs.readback import Readback, Readbacks

CPU = torch.device("cpu")
DTYPES = [
    *(torch.int32, torch.int64, torch.float32),
    *(torch.uint8, torch.bfloat16, torch.bool),
]
_seeds = itertools.count()

Shape = tuple[tuple[int, ...], torch.dtype]

DECISIONS = st.lists(st.integers(0, 5), max_size=12)
WIDTHS = st.sampled_from([1, 2, 6, 21, 38])
SHAPES = st.tuples(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 4)),
        st.tuples(st.integers(0, 4), WIDTHS),
        st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 3)),
    ),
    st.sampled_from(DTYPES),
)


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Draw data, different each time."""
    generator = torch.Generator().manual_seed(next(_seeds))
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    highest = 2 if dtype == torch.bool else 150
    return torch.randint(0, highest, tuple(shape), generator=generator).to(dtype)


@given(
    layouts=st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=40),
    at_once=st.integers(1, 4),
    decisions=DECISIONS,
    side=st.booleans(),
)
@draws(40)
def test_there_are_no_more_buffers_than_are_in_use_at_a_time(
    layouts: list[list[Shape]], at_once: int, decisions: list[int], side: bool
) -> None:
    with installed(Device(cycling(decisions))) as device:
        readbacks = Readbacks(CPU, least=1 << 16)
        stream = torch.cuda.Stream() if side else None
        held: list[Readback] = []
        for layout in layouts:
            if len(held) == at_once:
                held.pop(0).wait("test")
            held.append(readbacks.start([random_tensor(*shape) for shape in layout], stream))
        assert device.allocations <= at_once


def test_a_buffer_dropped_in_flight_is_used_again_once_its_copy_has_arrived() -> None:
    with installed(Device(cycling([]))) as device:
        readbacks = Readbacks(CPU)
        for _ in range(5):
            readbacks.start([torch.arange(9)])
        assert device.allocations == 5
        device.default.finish()
        for _ in range(5):
            readbacks.start([torch.arange(9)])
        assert device.allocations == 5


def test_a_readback_larger_than_all_before_gets_a_buffer_of_its_own_size() -> None:
    with installed(Device(cycling([]))) as device:
        readbacks = Readbacks(CPU, least=64)
        for exponent in range(12):
            for _ in range(3):
                readbacks.start([random_tensor((1 << exponent,), torch.int64)]).wait("test")
        assert device.allocations == 9  # 64 bytes hold the first four


def test_a_wait_is_a_fence_of_its_owner_for_one_event() -> None:
    with installed(Device(cycling([]))):
        readbacks = Readbacks(CPU)
        before = fences.counts().get("test-owner", 0)
        first, second = (readbacks.start([torch.arange(3)]) for _ in range(2))
        assert not first.event.query()
        assert first.wait("test-owner")[0].tolist() == [0, 1, 2]
        assert first.event.query()
        assert not second.event.query()
        first.wait("test-owner")
        assert fences.counts()["test-owner"] == before + 1


def test_tensors_that_were_not_reserved_are_not_filled() -> None:
    with installed(Device(cycling([]))):
        readbacks = Readbacks(CPU)
        tensors = [torch.zeros(2)]
        assert not readbacks.fill(tensors, slice(0, 1), [torch.ones(1)])
        assert readbacks.event_of(tensors) is None
        assert tensors[0].tolist() == [0, 0]
