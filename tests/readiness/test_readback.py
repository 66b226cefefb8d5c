"""Readbacks on a simulated device: the host reads the values that the device had.

The device decides when copies arrive. The oracle is a clone of each source, taken as its
readback starts. The same property must fail with each of several planted faults.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.asynchronous import cycling
from support.device import Device, installed, poison
from support.mutants import MUTANTS, mutated
from vllm.v1.readiness import fences
from vllm.v1.readiness.readback import Readback, Readbacks, has_events

CPU = torch.device("cpu")
LEAST = 2048
DTYPES = [
    *(torch.int32, torch.int64, torch.float32),
    *(torch.uint8, torch.bfloat16, torch.bool),
]
PROMPT_DTYPES = [torch.int32, torch.float32, torch.int32]
_chance = itertools.count()

Shape = tuple[tuple[int, ...], torch.dtype]


class Start(NamedTuple):
    """Start a readback; afterwards keep, drop or overwrite its sources."""

    shapes: list[Shape]
    side: bool
    fate: str


class Read(NamedTuple):
    """Wait for a readback, and keep its tensors, or views of single rows, or nothing."""

    which: int
    keep: str


class Prompt(NamedTuple):
    """Reserve tensors for a prompt's logprobs, and fill the first chunk."""

    rows: int
    width: int
    chunk: int


class Chunk(NamedTuple):
    """Fill a prompt's next chunk, and read all of it after the last one."""

    which: int
    rows: int


class Drop(NamedTuple):
    """Drop a readback or a prompt, in flight or not, or a view."""

    kind: str
    which: int


Operation = Start | Read | Prompt | Chunk | Drop
Schedule = tuple[list[Operation], list[int]]

PICK = st.integers(0, 5)
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
STARTS = st.builds(
    Start,
    st.lists(SHAPES, max_size=4),
    st.booleans(),
    st.sampled_from(["kept", "dropped", "overwritten"]),
)
READS = st.builds(Read, PICK, st.sampled_from(["all", "array row", "tensor row", "nothing"]))
OPERATIONS = st.lists(
    st.one_of(
        STARTS,
        STARTS,
        READS,
        READS,
        st.builds(Prompt, st.integers(1, 9), WIDTHS, st.integers(1, 4)),
        st.builds(Chunk, PICK, st.integers(1, 5)),
        st.builds(Chunk, PICK, st.integers(1, 5)),
        *[st.builds(Drop, st.just(kind), PICK) for kind in ("held", "views", "rooms")],
    ),
    max_size=30,
)
SCHEDULES = st.tuples(OPERATIONS, st.lists(st.integers(0, 5), max_size=12))


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random data, different each time."""
    generator = torch.Generator().manual_seed(next(_chance))
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    highest = 2 if dtype == torch.bool else 150
    return torch.randint(0, highest, tuple(shape), generator=generator).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equality of shape, dtype and every byte, whatever a dtype makes of them."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    return bool(
        torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected)))
    )


class Held(NamedTuple):
    """A readback, and its expected content."""

    readback: Readback
    expected: list[torch.Tensor]


class Room:
    """A prompt's tensors, and their expected content so far."""

    def __init__(self, tensors: list[torch.Tensor], rows: int) -> None:
        self.tensors = tensors
        self.expected = [torch.empty_like(tensor) for tensor in tensors]
        self.rows = rows
        self.filled = 0


class Host:
    """Performs operations, and checks everything that it has read after each of them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.readbacks = Readbacks(CPU, LEAST)
        self.side = torch.cuda.Stream()
        self.held: list[Held] = []
        #: Tensors and arrays that were read, each with its expected content.
        self.views: list[tuple[Any, torch.Tensor]] = []
        self.rooms: list[Room] = []
        #: Sources that copies on the side stream may still read.
        self.sources: list[list[torch.Tensor]] = []

    def run(self, operations: Sequence[Operation]) -> None:
        """Perform the operations, and in the end read everything."""
        for operation in operations:
            getattr(self, type(operation).__name__.lower())(operation)
            self.check()
        while self.held:
            self.read(Read(0, "all"))
        while self.rooms:
            self.chunk(Chunk(0, self.rooms[0].rows))
        self.device.default.finish()
        self.side.finish()
        self.check()
        assert self.device.strays == 0, "a copy came into memory that was freed"
        assert self.device.stream_waits == 0, "the host waited for a whole stream"

    def check(self) -> None:
        """Compare everything that was read."""
        for view, expected in self.views:
            found = view if isinstance(view, torch.Tensor) else torch.from_numpy(view)
            assert same(found, expected), f"read {found}, and there was {expected}"

    def start(self, operation: Start) -> None:
        sources = [random_tensor(*shape) for shape in operation.shapes]
        expected = [source.clone() for source in sources]
        readback = self.readbacks.start(sources, self.side if operation.side else None)
        self.held.append(Held(readback, expected))
        if operation.fate == "kept":
            self.sources.append(sources)
        elif operation.fate == "overwritten" and not operation.side:
            for source in sources:
                poison(source)

    def read(self, operation: Read) -> None:
        if not self.held:
            return
        held = self.held.pop(operation.which % len(self.held))
        held.readback.wait("test")
        for tensor, expected in zip(held.readback.tensors, held.expected, strict=True):
            assert same(tensor, expected), f"read {tensor}, and there was {expected}"
            if operation.keep == "all":
                self.views.append((tensor, expected))
            elif operation.keep != "nothing" and expected.ndim and len(expected):
                # NumPy has no bfloat16.
                array = operation.keep == "array row" and tensor.dtype != torch.bfloat16
                self.views.append(((tensor.numpy() if array else tensor)[-1:], expected[-1:]))

    def drop(self, operation: Drop) -> None:
        if items := getattr(self, operation.kind):
            del items[operation.which % len(items)]

    def prompt(self, operation: Prompt) -> None:
        shapes = [
            (operation.rows, operation.width),
            (operation.rows, operation.width),
            (operation.rows,),
        ]
        layout = tuple(zip(shapes, PROMPT_DTYPES, strict=True))
        tensors = self.readbacks.reserve(layout)
        assert tensors is not None
        self.rooms.append(Room(tensors, operation.rows))
        self.chunk(Chunk(len(self.rooms) - 1, operation.chunk))

    def chunk(self, operation: Chunk) -> None:
        if not self.rooms:
            return
        at = operation.which % len(self.rooms)
        room = self.rooms[at]
        rows = slice(room.filled, min(room.filled + operation.rows, room.rows))
        room.filled = rows.stop
        # The device's ids are wider than the host's.
        sources = [random_tensor(each[rows].shape, each.dtype) for each in room.tensors]
        sources[0] = sources[0].long()
        for expected, source in zip(room.expected, sources, strict=True):
            expected[rows] = source
        assert self.readbacks.fill(room.tensors, rows, sources)
        for source in sources:
            poison(source)
        if room.filled == room.rows:
            event = self.readbacks.event_of(room.tensors)
            assert event is not None
            event.synchronize()
            self.views += zip(room.tensors, room.expected, strict=True)
            del self.rooms[at]


def what_is_read_is_what_there_was(schedule: Schedule) -> None:
    """The property."""
    operations, decisions = schedule
    with installed(Device(cycling(decisions))) as device:
        Host(device).run(operations)


@given(SCHEDULES)
@settings(max_examples=400)
def test_what_is_read_is_what_there_was_and_stays_so(schedule: Schedule) -> None:
    """In any order, at any time, whatever becomes of the sources and of other readbacks."""
    what_is_read_is_what_there_was(schedule)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_property_finds_a_planted_fault(name: str) -> None:
    """It shows as a wrong value, and without help from shrinking."""
    fails = settings(
        max_examples=2000,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )(given(SCHEDULES)(what_is_read_is_what_there_was))
    with mutated(name), pytest.raises(AssertionError, match="and there was"):
        fails()


@given(
    layouts=st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=40),
    at_once=st.integers(1, 4),
    decisions=st.lists(st.integers(0, 5), max_size=8),
    side=st.booleans(),
)
@settings(max_examples=100)
def test_there_are_as_many_buffers_as_are_in_use_at_a_time(
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


def test_what_was_dropped_in_flight_is_used_again_once_it_has_arrived() -> None:
    with installed(Device(cycling([]))) as device:
        readbacks = Readbacks(CPU)
        for _ in range(5):
            readbacks.start([torch.arange(9)])
        assert device.allocations == 5
        device.default.finish()
        for _ in range(5):
            readbacks.start([torch.arange(9)])
        assert device.allocations == 5


def test_a_larger_one_than_all_before_gets_a_buffer_of_its_own_size() -> None:
    with installed(Device(cycling([]))) as device:
        readbacks = Readbacks(CPU, least=64)
        for exponent in range(12):
            source = random_tensor((1 << exponent,), torch.int64)
            for _ in range(3):
                readback = readbacks.start([source])
                readback.wait("test")
                assert same(readback.tensors[0], source)
                del readback
        assert device.allocations == 9  # 64 bytes hold the first four


def test_a_wait_is_a_fence_of_its_owner_and_for_one_event() -> None:
    with installed(Device(cycling([]))):
        readbacks = Readbacks(CPU)
        before = fences.counts().get("test-owner", 0)
        first, second = (readbacks.start([torch.arange(3)]) for _ in range(2))
        assert not first.ready()
        assert first.wait("test-owner")[0].tolist() == [0, 1, 2]
        assert first.ready()
        assert not second.ready()
        first.wait("test-owner")
        assert fences.counts()["test-owner"] == before + 1


def test_tensors_of_others_are_not_filled() -> None:
    with installed(Device(cycling([]))):
        readbacks = Readbacks(CPU)
        tensors = [torch.zeros(2)]
        assert not readbacks.fill(tensors, slice(0, 1), [torch.ones(1)])
        assert readbacks.event_of(tensors) is None
        assert tensors[0].tolist() == [0, 0]


def test_the_simulated_device_counts_waits_for_whole_streams_and_copies_into_freed_memory() -> None:
    """The property asserts that there are none; the planted faults show the rest of the device."""
    with installed(Device(cycling([]))) as device:
        target = device.allocate(24).view(torch.int64)
        target.copy_(torch.arange(3), non_blocking=True)
        assert device.stream_waits == 0
        target.copy_(torch.arange(3))
        target[::2].copy_(torch.arange(2), non_blocking=True)  # not contiguous
        torch.cuda.synchronize()
        assert device.stream_waits == 3
        target.copy_(torch.arange(3), non_blocking=True)
        del target
        device.default.finish()
        assert device.strays == 1


def test_all_is_put_back() -> None:
    before = (torch.Event, torch.cuda.Stream, torch.cuda.stream, torch.Tensor.copy_)
    with installed(Device(cycling([]))):
        assert torch.Tensor.copy_ is not before[-1]
    assert (torch.Event, torch.cuda.Stream, torch.cuda.stream, torch.Tensor.copy_) == before
    assert "copy_" not in vars(torch.Tensor)
    assert not has_events(CPU)


def test_sources_live_until_they_are_copied_though_the_readback_is_dropped() -> None:
    with installed(Device(lambda n: 0)) as device:
        stream = torch.cuda.Stream()
        readbacks = Readbacks(CPU, LEAST)
        readback = readbacks.start([torch.arange(5)], stream)
        (tensor,), event = readback.tensors, readback.event
        del readback
        assert event is not None
        event.synchronize()
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        assert device.copies == 1
